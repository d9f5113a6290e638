"""Prediction: options alone, interactions where real subsets show them, and how sure that is."""

import pytest
import torch

from segue.planning.damage import random_subsets
from segue.planning.prediction import predicted, quadratic

OPTIONS = [(f"layers.{i}", "a") for i in range(6)]


def matrix(seed: int = 0) -> torch.Tensor:
    j = torch.randn(6, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    j = j + 0.7 * j.mean(0)  # logits move in a common direction
    return j @ j.T / 40


def form(h: torch.Tensor, subset) -> float:
    x = torch.tensor([float(option in subset) for option in OPTIONS], dtype=torch.float64)
    return float(x @ h @ x / 2)


def alone(h: torch.Tensor) -> list[float]:
    return (h.diagonal() / 2).tolist()


def found_for(h, drawn, damages, each=None):
    return predicted(OPTIONS, each or alone(h), h, drawn, damages)


def test_the_terms_of_the_form_add_up_to_it():
    h = matrix()
    singles, pairs = quadratic(OPTIONS, h)
    for subset in random_subsets(OPTIONS, 20, 0):
        chosen = [OPTIONS.index(option) for option in subset]
        assert float(singles[chosen].sum() + pairs[chosen][:, chosen].sum()) == pytest.approx(form(h, subset))


def test_a_form_that_explains_all_is_the_prediction_without_subsets():
    found = found_for(matrix(), [], [])
    assert found.of(OPTIONS) == pytest.approx(form(matrix(), OPTIONS))
    assert found.r2 is None
    assert found.interval(OPTIONS)[1] == float("inf")


@pytest.mark.parametrize("factor", [1.0, 0.4])
def test_interactions_that_real_subsets_show_are_found(factor):
    h, drawn = matrix(), random_subsets(OPTIONS, 40, 0)
    found = found_for(h, drawn, [factor * form(h, subset) for subset in drawn])
    others = [subset for subset in random_subsets(OPTIONS, 57, 1) if subset not in drawn]
    assert others
    for subset in others:
        assert found.of(subset) == pytest.approx(factor * form(h, subset), rel=1e-6)
    assert found.r2 == pytest.approx(1.0, abs=1e-6)


def test_a_form_that_explains_nothing_leaves_the_options_alone():
    """Real damage is far larger than the form says: steps are large, and what options damage alone is added up."""
    h, drawn = matrix(), random_subsets(OPTIONS, 40, 0)
    each = [1000.0 * (i + 1) for i in range(6)]
    found = found_for(h, drawn, [sum(each[OPTIONS.index(o)] for o in s) for s in drawn], each)
    for i, option in enumerate(OPTIONS):
        assert found.of([option]) == pytest.approx(each[i], rel=0.01)
    assert found.of(OPTIONS) == pytest.approx(sum(each), rel=0.01)
    assert found.alone == tuple(each)


def test_options_without_any_damage_are_predicted_without_any():
    drawn = random_subsets(OPTIONS, 48, 0)
    found = predicted(OPTIONS, [0.0] * 6, torch.zeros(6, 6, dtype=torch.float64), drawn, [0.0] * len(drawn))
    assert found.of(OPTIONS) == 0
    assert found.interval(OPTIONS) == (0.0, 0.0)


@pytest.mark.parametrize("noise", [0.05, 0.4])
def test_intervals_hold_nine_of_ten(noise):
    inside, total, widths = 0, 0, []
    for seed in range(10):
        h, drawn = matrix(seed), random_subsets(OPTIONS, 40, seed)
        draw = torch.Generator().manual_seed(seed)
        real = {
            s: form(h, s) * float((noise * torch.randn((), generator=draw)).exp())
            for s in random_subsets(OPTIONS, 57, seed + 1)
        }
        found = found_for(h, drawn, [real[s] for s in map(tuple, drawn)])
        for subset in real.keys() - set(drawn):
            low, high = found.interval(subset)
            inside += low <= real[subset] <= high
            total += 1
            widths.append((high - low) / real[subset])
    assert inside / total >= 0.8
    assert sum(widths) / len(widths) < 10 * noise

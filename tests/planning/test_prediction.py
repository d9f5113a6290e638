"""Prediction: the correction finds what the quadratic form misses, and says how sure it is."""

import pytest
import torch

from segue.planning.damage import random_subsets
from segue.planning.prediction import corrected, uncorrected

OPTIONS = [(f"layers.{i}", "a") for i in range(6)]


def matrix(seed: int = 0) -> torch.Tensor:
    j = torch.randn(6, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return j @ j.T / 40


def form(h: torch.Tensor, subset) -> float:
    x = torch.tensor([float(option in subset) for option in OPTIONS], dtype=torch.float64)
    return float(x @ h @ x / 2)


def test_without_subsets_it_is_the_quadratic_form():
    h = matrix()
    found = uncorrected(OPTIONS, h)
    for subset in random_subsets(OPTIONS, 20, 0):
        assert found.of(subset) == pytest.approx(max(0.0, form(h, subset)))
    assert found.r2 is None


def test_a_form_that_is_off_by_a_factor_is_corrected_exactly():
    h, drawn = matrix(), random_subsets(OPTIONS, 40, 0)
    found = corrected(OPTIONS, h, drawn, [0.4 * form(h, subset) for subset in drawn])
    others = [subset for subset in random_subsets(OPTIONS, 63, 1) if subset not in drawn]
    assert others
    for subset in others:
        assert found.of(subset) == pytest.approx(0.4 * form(h, subset), rel=1e-3)
    assert found.r2 == pytest.approx(1.0, abs=1e-4)


def test_a_site_whose_damage_the_form_misses_is_found():
    h, drawn = matrix(), random_subsets(OPTIONS, 40, 0)

    def real(subset):
        return form(h, subset) + (2.0 if OPTIONS[3] in subset else 0.0)

    found = corrected(OPTIONS, h, drawn, [real(subset) for subset in drawn])
    plain = uncorrected(OPTIONS, h)
    others = [subset for subset in random_subsets(OPTIONS, 63, 1) if subset not in drawn]
    error, before = (sum(abs(p.of(subset) - real(subset)) for subset in others) for p in (found, plain))
    assert error < before / 5


@pytest.mark.parametrize("noise", [0.05, 0.4])
def test_intervals_hold_nine_of_ten(noise):
    inside, total, widths = 0, 0, []
    for seed in range(10):
        h, drawn = matrix(seed), random_subsets(OPTIONS, 40, seed)
        draw = torch.Generator().manual_seed(seed)
        real = {
            s: form(h, s) * float((noise * torch.randn((), generator=draw)).exp())
            for s in random_subsets(OPTIONS, 63, seed + 1)
        }
        found = corrected(OPTIONS, h, drawn, [real[s] for s in map(tuple, drawn)])
        for subset in real.keys() - set(drawn):
            low, high = found.interval(subset)
            inside += low <= real[subset] <= high
            total += 1
            widths.append((high - low) / real[subset])
    assert inside / total >= 0.8
    assert sum(widths) / len(widths) < 10 * noise

"""What diagnostics measure on: the distribution of a gate's weight, stated or drawn; sites by pattern; minibatches."""

import math

import numpy as np
import pytest
import torch

from segue.diagnostics.gate_distribution import distribution_of, fixed_batches, select_sites
from segue.errors import DataError, PlanError, SiteError
from segue.gates import Bernoulli, Blend, GumbelSoftmax, Noise
from tests.diagnostics import reference
from tests.diagnostics.reference import Silent, ThreeWeights

ALPHAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def integrated(p, temperature, power=1, count=400_000):
    """Integrate a power of the soft coin over its uniform noise by a fine sum."""
    u = (np.arange(count) + 0.5) / count
    odds = (p / (1 - p) * u / (1 - u)) ** (1 / temperature)
    return float(((odds / (1 + odds)) ** power).mean())


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_blend_is_deterministic(alpha):
    found = distribution_of(Blend(), alpha)
    assert found.outcomes == ((1 - alpha, 1.0),)
    assert (found.mean, found.variance, found.mean_above_zero) == (1 - alpha, 0.0, 1 - alpha)
    assert found.exact
    assert not found.drawn


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_coin_chooses_the_student_with_probability_one_minus_alpha(alpha):
    found = distribution_of(Bernoulli(), alpha)
    assert dict(found.outcomes) == {weight: c for weight, c in ((0.0, alpha), (1.0, 1 - alpha)) if c > 0}
    assert found.mean == 1 - alpha
    assert found.variance == pytest.approx(alpha * (1 - alpha), rel=1e-15)
    assert found.mean_above_zero == (0.0 if alpha == 1 else 1.0)
    drawn = [found.draw(Noise(0, step, "x")) for step in range(4000)]
    assert np.mean(drawn) == pytest.approx(1 - alpha, abs=0.03)
    assert set(drawn) == {weight for weight, _ in found.outcomes}


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.01])
def test_the_nodes_of_a_soft_coin_integrate_it(p, temperature):
    found = distribution_of(GumbelSoftmax(temperature=temperature), 1 - p)
    mean, second = integrated(p, temperature), integrated(p, temperature, 2)
    assert found.mean == pytest.approx(mean, rel=5e-6)
    assert found.variance == pytest.approx(second - mean**2, rel=5e-6)
    assert found.mean == pytest.approx(GumbelSoftmax(temperature=temperature)(1 - p, None), rel=1e-6)
    assert found.mean_above_zero == pytest.approx(found.mean, rel=1e-12)
    assert math.fsum(chance for _, chance in found.outcomes) == pytest.approx(1.0, abs=1e-12)
    assert not found.exact
    assert not found.drawn


def test_the_mean_of_a_soft_coin_is_not_p():
    assert distribution_of(GumbelSoftmax(), 0.9).mean == pytest.approx(0.184, abs=5e-4)
    assert integrated(0.1, 1.0) == pytest.approx(0.184, abs=5e-4)


def test_a_uniform_soft_coin_has_the_variance_of_the_uniform_distribution():
    found = distribution_of(GumbelSoftmax(), 0.5)
    assert found.mean == pytest.approx(0.5, rel=1e-12)
    assert found.variance == pytest.approx(1 / 12, rel=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_soft_coin_at_the_ends_has_no_chance(alpha):
    found = distribution_of(GumbelSoftmax(), alpha)
    assert found.outcomes == ((1 - alpha, 1.0),)
    assert found.exact
    assert found.variance == 0.0


def test_a_gate_of_ones_own_may_say_its_law():
    found = distribution_of(ThreeWeights(), 0.6)
    assert found.exact
    assert found.mean == pytest.approx(0.4)
    drawn = [found.draw(Noise(1, step, "x")) for step in range(4000)]
    assert set(drawn) == {weight for weight, _ in found.outcomes}
    assert np.var(drawn) == pytest.approx(found.variance, rel=0.05)


def test_a_gate_that_says_nothing_is_drawn_and_summed_up():
    found = distribution_of(Silent(), 0.5)
    assert found.drawn
    assert not found.exact
    assert len(found.outcomes) == 64
    assert found.mean == pytest.approx(0.5, abs=0.02)
    assert found.variance == pytest.approx(1 / 12, rel=0.03)
    assert distribution_of(Silent(), 0.5).outcomes == found.outcomes


def test_a_coin_that_says_nothing_keeps_its_two_weights():
    found = distribution_of(lambda alpha, noise: Bernoulli()(alpha, noise), 0.25)
    assert {weight for weight, _ in found.outcomes} == {0.0, 1.0}
    assert found.mean == pytest.approx(0.75, abs=0.03)
    assert found.mean_above_zero == 1.0


def test_a_constant_gate_that_says_nothing_has_no_chance():
    found = distribution_of(lambda alpha, noise: 0.3, 0.25)
    assert found.outcomes == ((0.3, 1.0),)
    assert found.variance == 0.0


class Saying:
    def __init__(self, *outcomes):
        self.said = outcomes

    def __call__(self, alpha, noise):
        return 0.5

    def outcomes(self, alpha):
        return self.said


def test_what_cannot_happen_is_left_out():
    assert distribution_of(Saying((0.0, 0.0), (1.0, 0.0), (0.5, 1.0)), 0.5).outcomes == ((0.5, 1.0),)


@pytest.mark.parametrize(
    "outcomes", [[(0.0, 0.3), (1.0, 0.3)], [(0.5, 1.5), (0.1, -0.5)], [(2.0, 1.0)], [], [(0.0, 0.9), (1.0, 0.2)]]
)
def test_a_law_that_is_none_is_refused(outcomes):
    with pytest.raises(PlanError, match="Saying.outcomes"):
        distribution_of(Saying(*outcomes), 0.5)


@pytest.mark.parametrize("alpha", [-1e-9, 1.0000001, 2.0, math.nan, math.inf])
def test_alpha_is_between_0_and_1(alpha):
    with pytest.raises(PlanError, match=r"distribution_of\(alpha=...\) must be a number from 0 to 1, got "):
        distribution_of(Bernoulli(), alpha)


@pytest.fixture(scope="module")
def handover():
    return reference.vit(depth=3, width=4).handover


@pytest.mark.parametrize(
    ("patterns", "indices"),
    [
        (None, (0, 1, 2)),
        ("blocks.*.attn", (0, 1, 2)),
        ("blocks.1.attn", (1,)),
        (["blocks.2.attn", "blocks.0.attn"], (0, 2)),
        (("blocks.{0,1}.attn", "blocks.1.*"), (0, 1)),
    ],
)
def test_sites_are_chosen_by_patterns_in_the_order_of_the_model(handover, patterns, indices):
    assert select_sites(handover, patterns) == [f"blocks.{index}.attn" for index in indices]


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names(handover):
    with pytest.raises(SiteError) as caught:
        select_sites(handover, ["blocks.*.attn", "blocks.1.atn"])
    assert "'blocks.1.atn' matches none of the 3 sites of the handover." in str(caught.value)
    assert "blocks.1.attn" in str(caught.value)
    assert "name sites of the running handover" in str(caught.value)


def test_minibatches_are_read_once_and_keep_their_form(handover):
    x = torch.zeros(2)
    found = fixed_batches(iter([x, (x, "label"), {"ids": [x]}]), handover)
    assert len(found) == 3
    assert found[1][1] == "label"
    assert found[2]["ids"][0] is x


def test_no_minibatch_is_refused(handover):
    with pytest.raises(DataError, match="`batches` is empty"):
        fixed_batches(iter([]), handover)

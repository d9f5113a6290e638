"""The law of a gate's weight: what gates say of themselves, and what is drawn where they say nothing."""

import math

import numpy as np
import pytest

from segue.diagnostics.gate_distribution import law_of
from segue.errors import PlanError
from segue.gates import Bernoulli, Blend, GumbelSoftmax, Noise
from tests.diagnostics.reference import Silent, ThreeWeights

ALPHAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def integrated(p, temperature, power=1, count=400_000):
    """Integrate a power of the soft coin over its uniform noise by a fine sum."""
    u = (np.arange(count) + 0.5) / count
    odds = (p / (1 - p) * u / (1 - u)) ** (1 / temperature)
    return float(((odds / (1 + odds)) ** power).mean())


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_blend_has_no_chance(alpha):
    law = law_of(Blend(), alpha)
    assert law.outcomes == ((1 - alpha, 1.0),)
    assert (law.mean, law.variance, law.heard) == (1 - alpha, 0.0, 1 - alpha)
    assert law.exact
    assert not law.drawn


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_coin_chooses_the_student_with_probability_one_minus_alpha(alpha):
    law = law_of(Bernoulli(), alpha)
    assert dict(law.outcomes) == {weight: c for weight, c in ((0.0, alpha), (1.0, 1 - alpha)) if c > 0}
    assert law.mean == 1 - alpha
    assert law.variance == pytest.approx(alpha * (1 - alpha), rel=1e-15)
    assert law.heard == (0.0 if alpha == 1 else 1.0)
    drawn = [law.draw(Noise(0, step, "x")) for step in range(4000)]
    assert np.mean(drawn) == pytest.approx(1 - alpha, abs=0.03)
    assert set(drawn) == {weight for weight, _ in law.outcomes}


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.01])
def test_the_nodes_of_a_soft_coin_integrate_it(p, temperature):
    law = law_of(GumbelSoftmax(temperature=temperature), 1 - p)
    mean, second = integrated(p, temperature), integrated(p, temperature, 2)
    assert law.mean == pytest.approx(mean, rel=5e-6)
    assert law.variance == pytest.approx(second - mean**2, rel=5e-6)
    assert law.mean == pytest.approx(GumbelSoftmax(temperature=temperature)(1 - p, None), rel=1e-6)
    assert law.heard == pytest.approx(law.mean, rel=1e-12)
    assert math.fsum(chance for _, chance in law.outcomes) == pytest.approx(1.0, abs=1e-12)
    assert not law.exact
    assert not law.drawn


def test_the_mean_of_a_soft_coin_is_not_p():
    assert law_of(GumbelSoftmax(), 0.9).mean == pytest.approx(0.184, abs=5e-4)
    assert integrated(0.1, 1.0) == pytest.approx(0.184, abs=5e-4)


def test_a_uniform_soft_coin_has_the_variance_of_the_uniform_distribution():
    law = law_of(GumbelSoftmax(), 0.5)
    assert law.mean == pytest.approx(0.5, rel=1e-12)
    assert law.variance == pytest.approx(1 / 12, rel=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_soft_coin_at_the_ends_has_no_chance(alpha):
    law = law_of(GumbelSoftmax(), alpha)
    assert law.outcomes == ((1 - alpha, 1.0),)
    assert law.exact
    assert law.variance == 0.0


def test_a_gate_of_ones_own_may_say_its_law():
    law = law_of(ThreeWeights(), 0.6)
    assert law.exact
    assert law.mean == pytest.approx(0.4)
    drawn = [law.draw(Noise(1, step, "x")) for step in range(4000)]
    assert set(drawn) == {weight for weight, _ in law.outcomes}
    assert np.var(drawn) == pytest.approx(law.variance, rel=0.05)


def test_a_gate_that_says_nothing_is_drawn_and_summed_up():
    law = law_of(Silent(), 0.5)
    assert law.drawn
    assert not law.exact
    assert len(law.outcomes) == 64
    assert law.mean == pytest.approx(0.5, abs=0.02)
    assert law.variance == pytest.approx(1 / 12, rel=0.03)
    assert law_of(Silent(), 0.5).outcomes == law.outcomes


def test_a_coin_that_says_nothing_keeps_its_two_weights():
    law = law_of(lambda alpha, noise: Bernoulli()(alpha, noise), 0.25)
    assert {weight for weight, _ in law.outcomes} == {0.0, 1.0}
    assert law.mean == pytest.approx(0.75, abs=0.03)
    assert law.heard == 1.0


def test_a_constant_gate_that_says_nothing_has_no_chance():
    law = law_of(lambda alpha, noise: 0.3, 0.25)
    assert law.outcomes == ((0.3, 1.0),)
    assert law.variance == 0.0


class Saying:
    def __init__(self, *outcomes):
        self.said = outcomes

    def __call__(self, alpha, noise):
        return 0.5

    def outcomes(self, alpha):
        return self.said


def test_what_cannot_happen_is_left_out():
    assert law_of(Saying((0.0, 0.0), (1.0, 0.0), (0.5, 1.0)), 0.5).outcomes == ((0.5, 1.0),)


@pytest.mark.parametrize(
    "outcomes", [[(0.0, 0.3), (1.0, 0.3)], [(0.5, 1.5), (0.1, -0.5)], [(2.0, 1.0)], [], [(0.0, 0.9), (1.0, 0.2)]]
)
def test_a_law_that_is_none_is_refused(outcomes):
    with pytest.raises(PlanError, match="Saying.outcomes"):
        law_of(Saying(*outcomes), 0.5)


@pytest.mark.parametrize("alpha", [-1e-9, 1.0000001, 2.0, math.nan, math.inf])
def test_alpha_is_a_share(alpha):
    with pytest.raises(PlanError, match=r"the gate's law was asked for at alpha=.*\s+alpha is the teacher's share\."):
        law_of(Bernoulli(), alpha)

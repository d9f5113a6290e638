import math

import mpmath
import pytest
import torch
from torch.nn import functional as F

from segue import gates
from segue.errors import PlanError
from segue.gates import Bernoulli, Blend, GumbelSoftmax, Noise

GATES = [Blend(), Bernoulli(), GumbelSoftmax(), GumbelSoftmax(temperature=0.3)]
DRAWS = 20_000


def draws(gate, alpha: float, count: int = DRAWS) -> torch.Tensor:
    return torch.tensor([gate(alpha, Noise(0, step, "site")) for step in range(count)], dtype=torch.float64)


def test_noise_is_a_pure_function_of_seed_step_site_and_draw():
    assert Noise(1, 2, "a").uniform() == Noise(1, 2, "a").uniform()
    keys = [Noise(s, t, n).uniform(d) for s in range(3) for t in range(3) for n in "ab" for d in range(2)]
    assert len(set(keys)) == len(keys)
    assert all(0 < u < 1 for u in keys)


def test_the_largest_noise_is_below_one(monkeypatch):
    class AllOnes:
        def __init__(self, key, digest_size): ...
        def digest(self):
            return b"\xff" * 8

    monkeypatch.setattr(gates, "blake2b", AllOnes)
    assert Noise(0, 0, "site").uniform() == 1 - 2**-53
    assert GumbelSoftmax()(0.5, Noise(0, 0, "site")) <= 1.0


def test_noise_is_uniform():
    u = torch.tensor([Noise(0, step, "x").uniform() for step in range(DRAWS)], dtype=torch.float64).sort().values
    grid = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    assert (u - grid).abs().max() < 1.63 / math.sqrt(DRAWS)  # Kolmogorov-Smirnov at 1 %


def test_noise_never_changes_between_versions():
    assert Noise(0, 0, "blocks.0.attn").uniform() == pytest.approx(0.9996827979946112, abs=1e-15)


def test_draws_never_change_between_versions():
    noise = Noise(0, 0, "s")
    u = noise.uniform()
    assert u > 0.5  # then alpha = 1 - u is exact
    assert [Bernoulli()(alpha, noise) for alpha in (1 - u + 2**-53, 1 - u, 1 - u - 2**-53)] == [0.0, 0.0, 1.0]
    odds = 0.25 / 0.75 * u / (1 - u)
    assert GumbelSoftmax()(0.75, noise) == pytest.approx(odds / (1 + odds), abs=1e-15)
    assert GumbelSoftmax(temperature=0.5)(0.75, noise) == pytest.approx(odds**2 / (1 + odds**2), abs=1e-15)


@pytest.mark.parametrize("gate", GATES, ids=repr)
def test_endpoints_are_exact(gate):
    for noise in (None, Noise(0, 0, "s"), Noise(1, 5, "s")):
        assert gate(1.0, noise) == 0.0
        assert gate(0.0, noise) == 1.0


def test_blend_is_one_minus_alpha():
    assert Blend()(0.3, Noise(0, 0, "s")) == Blend()(0.3, None) == 0.7


def test_bernoulli_is_a_coin_with_probability_one_minus_alpha():
    coins = draws(Bernoulli(), 0.3)
    assert set(coins.tolist()) == {0.0, 1.0}
    assert abs(coins.mean() - 0.7) < 4 * math.sqrt(0.21 / DRAWS)
    assert Bernoulli()(0.3, None) == 0.7


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_gumbel_softmax_has_the_distribution_of_torchs(p, temperature):
    ours = draws(GumbelSoftmax(temperature=temperature), 1 - p).sort().values
    torch.manual_seed(0)
    logits = torch.tensor([p, 1 - p], dtype=torch.float64).log().expand(DRAWS, 2)
    theirs = F.gumbel_softmax(logits, tau=temperature)[:, 0].sort().values
    quantiles = torch.linspace(0.02, 0.98, 49, dtype=torch.float64)
    torch.testing.assert_close(ours.quantile(quantiles), theirs.quantile(quantiles), atol=0.03, rtol=0)


@pytest.mark.parametrize("temperature", [0.05, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_mean_of_the_soft_coin_is_its_integral(p, temperature):
    u = (torch.arange(2_000_000, dtype=torch.float64) + 0.5) / 2_000_000
    integral = torch.sigmoid((torch.tensor(p).double().logit() + u.logit()) / temperature).mean().item()
    assert GumbelSoftmax(temperature=temperature)(1 - p, None) == pytest.approx(integral, abs=2e-6)


def exact_mean(p: float, temperature: float) -> float:
    """The integral over the noise, in 25 digits, with breaks where the sigmoid and the density bend."""
    with mpmath.workdps(25):
        a, t = mpmath.log(p) - mpmath.log1p(-mpmath.mpf(p)), mpmath.mpf(temperature)
        breaks = {k * t - a for k in (-60, -20, -5, 0, 5, 20, 60)} | {mpmath.mpf(k) for k in (-60, -20, -5, 0, 5, 20, 60)}
        inside = [-100, *sorted(x for x in breaks if -100 < x < 100), 100]
        return float(mpmath.quad(lambda x: mpmath.sech(x / 2) ** 2 / 4 / (1 + mpmath.exp(-(a + x) / t)), inside))


@pytest.mark.parametrize("temperature", [1e-6, 1e-2, 0.3, 0.99, 1.0, 100.0])
@pytest.mark.parametrize("alpha", [1 - 2**-53, 0.9, 0.3, 1e-12])
def test_the_mean_of_the_soft_coin_is_exact_at_every_temperature(alpha, temperature):
    gate = GumbelSoftmax(temperature=temperature)
    assert abs(gate(alpha, None) - exact_mean(1 - alpha, temperature)) < 3e-16
    assert math.fsum(weight * probability for weight, probability in gate.nodes(alpha)) == pytest.approx(
        gate(alpha, None), abs=3e-9
    )


@pytest.mark.parametrize("temperature", [0.05, 0.3, 0.99, 1.0, 4.0])
@pytest.mark.parametrize("alpha", [0.9, 0.3])
def test_the_nodes_of_the_soft_coin_are_probabilities_and_so_is_every_second(alpha, temperature):
    nodes = GumbelSoftmax(temperature=temperature).nodes(alpha)
    assert math.fsum(probability for _, probability in nodes) == pytest.approx(1, abs=1e-12)
    for half in (nodes[::2], nodes[1::2]):
        assert 2 * math.fsum(probability for _, probability in half) == pytest.approx(1, abs=0.01)


def test_a_soft_coin_without_chance_has_one_node():
    assert [GumbelSoftmax().nodes(alpha) for alpha in (0.0, 1.0)] == [((1.0, 1.0),), ((0.0, 1.0),)]


def test_the_mean_costs_the_same_at_every_temperature(monkeypatch):
    evaluated = []
    monkeypatch.setattr(gates, "_sigmoid", lambda x, sigmoid=gates._sigmoid: evaluated.append(x) or sigmoid(x))
    for number, temperature in enumerate((100.0, 1.0, 0.3, 0.01, 1e-4, 1e-8, 5e-324)):
        gate, alpha = GumbelSoftmax(temperature=temperature), 0.4 + number * 1e-7  # not in the cache
        gates._logistic.cache_clear()
        evaluated.clear()
        gate(alpha, None)
        assert len(evaluated) == 3 * 381
        assert len(gate.nodes(alpha)) <= 57


@pytest.mark.parametrize("alpha", [0.9, 0.3, 1e-6])
def test_without_temperature_the_soft_coin_is_a_hard_one(alpha):
    for temperature in (1e-6, 1e-12, 5e-324):
        gate = GumbelSoftmax(temperature=temperature)
        assert gate(alpha, None) == pytest.approx(1 - alpha, rel=10 * temperature, abs=1e-15)
        soft = draws(gate, alpha, 2000)
        hard = soft.round()
        assert (soft - hard).abs().max() < 1e-12
        assert abs(hard.mean() - (1 - alpha)) <= 4 * math.sqrt(alpha * (1 - alpha) / 2000)
        ends = [probability for weight, probability in gate.nodes(alpha) if weight > 1 - 1e-9]
        assert math.fsum(ends) == pytest.approx(1 - alpha, abs=20 * temperature + 1e-15)


def test_the_mean_is_not_p():
    assert GumbelSoftmax()(0.9, None) == pytest.approx(0.184, abs=5e-4)


def test_the_soft_coin_survives_extreme_alphas():
    for alpha in (1e-300, 1e-12, 1 - 1e-12):
        for noise in (None, Noise(0, 0, "s")):
            assert 0 <= GumbelSoftmax(temperature=0.01)(alpha, noise) <= 1


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_divides(temperature):
    with pytest.raises(PlanError, match="must be a positive finite number, got"):
        GumbelSoftmax(temperature=temperature)

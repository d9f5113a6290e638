"""Least squares: the closed form against a regression that is written down token by token."""

import pytest
import torch
from torch import Tensor, nn

from segue.errors import DataError, PlanError, StudentError
from segue.sites import Site
from segue.students import LeastSquares
from segue.students.least_squares import RegressionSums

FEATURES, TARGETS, SAMPLES, TOKENS = 7, 3, 8, 10


def made(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def design(x: Tensor, with_bias: bool) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1) if with_bias else x


def summed(x: Tensor, y: Tensor, guess: Tensor, w: Tensor) -> RegressionSums:
    sums = RegressionSums(x.shape[1], y.shape[1], torch.device("cpu"))
    for part in range(0, len(x), 20):
        sums.add(*(each[part : part + 20] for each in (x, y, guess, w)))
    return sums


@pytest.mark.parametrize("with_bias", [True, False])
def test_without_a_ridge_it_is_the_least_squares_solution(with_bias):
    x, y, w = made(50, FEATURES), made(50, TARGETS, seed=1), made(50, seed=2).square() + 0.1
    linear = nn.Linear(FEATURES, TARGETS, bias=with_bias, dtype=torch.float64)
    sums = summed(x, y, linear(x).detach(), w)
    ((weight, bias),) = sums.changes((0.0,), with_bias)
    root = w.sqrt()[:, None]
    expected = torch.linalg.lstsq(design(x, with_bias) * root, y * root).solution
    torch.testing.assert_close(linear.weight.detach().T + weight, expected[:FEATURES])
    if with_bias:
        torch.testing.assert_close(linear.bias.detach() + bias, expected[FEATURES])
    left = (root * (design(x, with_bias) @ expected - y)).square().sum().item()
    assert sums.error(weight, bias) == pytest.approx(left)


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_ridge_pulls_towards_the_present_weights(with_bias):
    x, y, w = made(50, FEATURES), made(50, TARGETS, seed=1), torch.ones(50, dtype=torch.float64)
    linear = nn.Linear(FEATURES, TARGETS, bias=with_bias, dtype=torch.float64)
    ((weight, bias),) = summed(x, y, linear(x).detach(), w).changes((0.3,), with_bias)
    centred = x - x.mean(0) if with_bias else x
    strength = 0.3 * centred.square().sum(0).mean()
    present = linear.weight.detach().T
    # extra rows sqrt(strength) (W - present) = 0; the bias is free
    rows = strength.sqrt() * torch.eye(FEATURES, dtype=x.dtype)
    full = torch.cat([design(x, with_bias), torch.cat([rows, torch.zeros(FEATURES, int(with_bias), dtype=x.dtype)], 1)])
    expected = torch.linalg.lstsq(full, torch.cat([y, rows @ present])).solution
    torch.testing.assert_close(present + weight, expected[:FEATURES])
    if with_bias:
        torch.testing.assert_close(linear.bias.detach() + bias, expected[FEATURES])


def test_a_strong_ridge_changes_nothing_and_scale_does_not_matter():
    x, y, w = made(50, FEATURES), made(50, TARGETS, seed=1), torch.ones(50, dtype=torch.float64)
    guess = torch.zeros_like(y)
    ((weight, _),) = summed(x, y, guess, w).changes((1e12,), False)
    assert weight.abs().max() < 1e-9
    ((one, _),), ((other, _),) = (summed(scale * x, y, guess, w).changes((0.1,), False) for scale in (1, 100))
    torch.testing.assert_close(100 * other, one)


def test_features_of_lower_rank_have_a_solution():
    x = made(50, 2) @ made(2, FEATURES, seed=3)
    y = x @ made(FEATURES, TARGETS, seed=4)
    sums = summed(x, y, torch.zeros_like(y), torch.ones(50, dtype=x.dtype))
    ((weight, bias),) = sums.changes((0.0,), False)
    assert sums.error(weight, bias) < 1e-9 * sums.square


def observed(method: LeastSquares, linear: nn.Linear, x: Tensor, y: Tensor, mask: Tensor | None = None) -> object:
    found = method.observer(nn.Identity(), linear, Site("a"))
    handles = found.hooks()
    for part in range(0, len(x), 4):
        rows = slice(part, part + 4)
        found.observe(y[rows], linear(x[rows]).detach(), None if mask is None else mask[rows])
    for handle in handles:
        handle.remove()
    return found


def by_hand(linear: nn.Linear, x: Tensor, y: Tensor, mask: Tensor, strengths: tuple[float, ...]) -> tuple[Tensor, float, float]:
    """Fit on three samples of four and judge by the fourth, in turn; then fit on all. Each token is relative to its size."""
    square = y.square().sum(-1)
    mean = (square * mask).sum(1) / mask.sum(1)
    root = (mask / torch.maximum(square, mean[:, None])).sqrt()[..., None]
    present, fold = linear.weight.detach().T, torch.arange(len(x)) % 4

    def fit(chosen: Tensor, strength: float) -> Tensor:
        a, b = (root * x)[chosen].flatten(0, 1), (root * y)[chosen].flatten(0, 1)
        gram = a.T @ a
        ridge = strength * gram.diagonal().mean() * torch.eye(len(gram), dtype=x.dtype)
        return present + torch.linalg.solve(gram + ridge, a.T @ (b - a @ present))

    def error(weights: list[Tensor]) -> float:
        missed = sum((root * (x @ weight - y))[fold == k].square().sum() for k, weight in enumerate(weights))
        return (missed / (root * y).square().sum()).sqrt().item()

    tried = {strength: error([fit(fold != k, strength) for k in range(4)]) for strength in strengths}
    best = min(tried, key=tried.get)
    return fit(fold >= 0, best).T, error([present] * 4), tried[best]


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_the_strength_is_chosen_on_samples_that_are_held_out(noise):
    linear = nn.Linear(FEATURES, TARGETS, bias=False, dtype=torch.float64)
    linear.weight.data = made(TARGETS, FEATURES, seed=5)
    x, mask = made(SAMPLES, TOKENS, FEATURES), torch.ones(SAMPLES, TOKENS)
    mask[2, 5:] = mask[3, 2:] = 0
    y = linear(x).detach() + 0.3 * x @ made(FEATURES, TARGETS, seed=1) + noise * made(SAMPLES, TOKENS, TARGETS, seed=2)
    y[:, 0] *= 30  # as the first token of a language model
    method = LeastSquares()
    values, before, after = observed(method, linear, x, y, mask).fit(dict(linear.named_parameters()))
    expected, was, becomes = by_hand(linear, x, y, mask.double(), method.ridge)
    torch.testing.assert_close(values["weight"], expected)
    assert (before, after) == pytest.approx((was, becomes))
    assert after < before


def test_what_does_not_help_is_left_as_it_was():
    linear = nn.Linear(FEATURES, TARGETS, dtype=torch.float64)
    x = made(SAMPLES, TOKENS, FEATURES)
    noise = made(SAMPLES, TOKENS, TARGETS, seed=1)
    found = observed(LeastSquares(), linear, x, linear(x).detach() + noise - noise.mean((0, 1)))
    values, before, after = found.fit(dict(linear.named_parameters()))
    assert values == {}
    assert before == after > 0


@pytest.mark.parametrize(("samples", "said"), [(1, "of 10 tokens 0 are left"), (4, "of 40 tokens 30 are left")])
def test_too_few_tokens_are_refused(samples, said):
    linear = nn.Linear(30, TARGETS, dtype=torch.float64)
    found = observed(LeastSquares(), linear, made(samples, TOKENS, 30), made(samples, TOKENS, TARGETS))
    with pytest.raises(
        DataError, match=rf"(?s)^calibrate\(\) has too few tokens for site 'a'\..*31 unknowns.*{said}.*62 tokens"
    ):
        found.fit(dict(linear.named_parameters()))


def test_an_output_that_another_layer_has_made_is_refused():
    linear = nn.Linear(FEATURES, TARGETS, dtype=torch.float64)
    found = LeastSquares().observer(nn.Identity(), linear, Site("a"))
    with pytest.raises(StudentError, match="something comes after it"):
        found.observe(made(1, 2, TARGETS), made(1, 2, TARGETS), None)


def test_settings_of_version_0_1_0_and_nonsense():
    linear = nn.Linear(FEATURES, FEATURES)
    assert LeastSquares(ridge=1e-3).observer(linear, linear, Site("a")).strengths == (1e-3,)
    with pytest.raises(PlanError, match=r"folds=\.\.\.\) must be an integer of at least 2, got 1"):
        LeastSquares(folds=1)
    with pytest.raises(PlanError, match="stream"):
        LeastSquares(stream="both")

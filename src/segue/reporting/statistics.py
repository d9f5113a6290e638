"""Intervals: what a handful of seeds says about a mean, by Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with the half width of its 95 % interval; one seed has a mean but no interval."""

    mean: float
    half: float | None
    n: int  # seeds that gave a value
    asked: int  # seeds that were run

    @property
    def whole(self) -> bool:
        """Whether every seed gave a value."""
        return self.n == self.asked


@dataclass(frozen=True)
class Difference:
    """A mean of paired differences over seeds; fewer than two pairs have neither interval nor p-value."""

    mean: float
    half: float | None
    p: float | None  # two-sided, against a mean of zero
    pairs: int

    @property
    def excludes_zero(self) -> bool | None:
        """Whether the interval leaves zero out; None where there is no interval."""
        return None if self.half is None else abs(self.mean) > self.half


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """Estimate a mean from one value per seed, None or NaN where a seed has none; None when no seed has one.

    >>> found = estimate([1.0, 2.0, 3.0, None])
    >>> found.mean, round(found.half, 3), found.n, found.asked
    (2.0, 2.484, 3, 4)
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    mean = math.fsum(known) / len(known)
    return Estimate(mean, _half_width(known, mean), len(known), len(values))


def paired_difference(pairs: Sequence[tuple[float | None, float | None]]) -> Difference | None:
    """Compare two methods over the seeds that both have: the first minus the second."""
    known = [a - b for a, b in pairs if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)]
    if not known:
        return None
    mean = math.fsum(known) / len(known)
    half = _half_width(known, mean)
    return Difference(mean, half, None if half is None else _p_value(mean, half, len(known) - 1), len(known))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for the number of comparisons, by Holm's step-down method.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = largest
    return adjusted


@lru_cache(maxsize=256)
def t_quantile(probability: float, degrees: int) -> float:
    """Invert Student's t distribution for a probability of at least one half."""
    tail = 2 * (1 - probability)
    low, high = 0.0, 1.0
    while t_tails(high, degrees) > tail:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tails(middle, degrees) > tail else (low, middle)
    return (low + high) / 2


def t_tails(t: float, degrees: int) -> float:
    """Give the probability that Student's t lies further from zero than `t`, on either side."""
    return _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)


def _half_width(values: Sequence[float], mean: float) -> float | None:
    if len(values) < 2:
        return None
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return t_quantile((1 + LEVEL) / 2, len(values) - 1) * deviation / math.sqrt(len(values))


def _p_value(mean: float, half: float, degrees: int) -> float:
    error = half / t_quantile((1 + LEVEL) / 2, degrees)
    if error <= 1e-12 * max(abs(mean), 1e-12):  # all differences are equal, up to rounding
        return 1.0 if abs(mean) <= 1e-12 else 0.0
    return t_tails(mean / error, degrees)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only on this side
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    return front * _beta_fraction(x, a, b) / a


def _beta_fraction(x: float, a: float, b: float) -> float:
    tiny = 1e-300  # Lentz's method: stands for a zero that would be divided by
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for numerator in (even, odd):
            d = 1 / _away_from_zero(1 + numerator * d, tiny)
            c = _away_from_zero(1 + numerator / c, tiny)
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return fraction


def _away_from_zero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny

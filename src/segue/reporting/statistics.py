"""Statistics: what a handful of seeds or examples says about a mean, with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from scipy.special import ndtri, stdtr, stdtrit

if TYPE_CHECKING:
    from torch import Tensor

LEVEL = 0.95
UPPER = (1 + LEVEL) / 2  # the quantile at the upper end of a two-sided interval
NORMAL = float(ndtri(UPPER))

Interval: TypeAlias = dict[str, Any]  # mean, low and high (None for a single example) and n, as saved in JSON


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with the half width of its 95 % interval; one seed has a mean but no interval."""

    mean: float
    half: float | None
    n: int  # seeds that gave a value
    asked: int  # seeds that were run

    @property
    def complete(self) -> bool:
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
        """Whether the interval excludes zero; None where there is no interval."""
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


def mean_interval(values: Tensor) -> Interval:
    """Estimate a mean from one value per example, by Student's t.

    >>> from torch import tensor
    >>> found = mean_interval(tensor([1.0, 2.0, 3.0]))
    >>> found["mean"], round(found["high"], 3), found["n"]
    (2.0, 4.484, 3)
    """
    found = estimate(values.double().tolist())
    if found is None:
        return {"mean": math.nan, "low": None, "high": None, "n": 0}
    if found.half is None:
        return {"mean": found.mean, "low": None, "high": None, "n": 1}
    return {"mean": found.mean, "low": found.mean - found.half, "high": found.mean + found.half, "n": found.n}


def proportion_interval(hits: Tensor) -> Interval:
    """Estimate a proportion from one value per example, 0 or 1, by Wilson's interval: ten of ten does not prove 100 %.

    Values between 0 and 1, such as the fraction of a text's tokens, have a spread of their own: by Student's t, within 0 to 1.

    >>> from torch import ones
    >>> found = proportion_interval(ones(10))
    >>> found["mean"], round(found["low"], 3), found["high"]
    (1.0, 0.722, 1.0)
    """
    if not bool(((hits == 0) | (hits == 1)).all()):
        found = mean_interval(hits)
        low, high = found["low"], found["high"]
        return found if low is None else {**found, "low": max(0.0, low), "high": min(1.0, high)}
    n, p, z = hits.numel(), hits.double().mean().item(), NORMAL
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return {"mean": p, "low": max(0.0, min(p, middle - half)), "high": min(1.0, max(p, middle + half)), "n": n}


def transform(function: Callable[[float], float], found: Interval) -> Interval:
    """Apply an increasing function to an interval, such as a loss to a perplexity."""
    scaled = {key: None if found[key] is None else function(found[key]) for key in ("mean", "low", "high")}
    return {**scaled, "n": found["n"]}


def exponential(value: float) -> float:
    """Return e to a power, or infinity."""
    return math.exp(value) if value < 700 else math.inf


def _half_width(values: Sequence[float], mean: float) -> float | None:
    if len(values) < 2:
        return None
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return float(stdtrit(len(values) - 1, UPPER)) * deviation / math.sqrt(len(values))


def _p_value(mean: float, half: float, degrees: int) -> float:
    error = half / float(stdtrit(degrees, UPPER))
    if error <= 1e-12 * max(abs(mean), 1e-12):  # all differences are equal, up to rounding
        return 1.0 if abs(mean) <= 1e-12 else 0.0
    return 2 * float(stdtr(degrees, -abs(mean) / error))

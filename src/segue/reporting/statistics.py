"""Statistics: what a handful of seeds, runs or settings says about methods, with 95 % intervals and tests at 5 %."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from scipy.special import ndtri, stdtr, stdtrit

if TYPE_CHECKING:
    from torch import Tensor

LEVEL = 0.95
ALPHA = 0.05  # the error rate of every test
FEWEST = 5  # seeds before a difference may be called significant
NO_SPREAD = 1e-9  # a standard deviation of the differences that is rounding, as a fraction of the values
EXACT = 12  # pairs up to which every choice of signs is tried; more are sampled
UPPER = (1 + LEVEL) / 2  # the quantile at the upper end of a two-sided interval
NORMAL = float(ndtri(UPPER))

Key = TypeVar("Key", bound=Hashable)
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
    """A mean of paired differences over seeds; one pair, or equal differences, have neither interval nor p-value."""

    mean: float
    half: float | None
    p: float | None  # two-sided, against a mean of zero, by Student's t
    pairs: int
    exact: float | None = None  # the same by flipping signs, which assumes no normal distribution; at least 2 / 2**pairs

    @property
    def untested(self) -> str:
        """Why no test can call this difference significant; empty if one can."""
        if self.pairs < 2:
            return "one common seed: cannot be tested"
        if self.p is None:
            return "no spread: cannot be tested"
        return f"{self.pairs} common seeds: too few, {FEWEST} are needed" if self.pairs < FEWEST else ""


@dataclass(frozen=True)
class TimeTo:
    """When runs reach a target, in any unit of time or work; runs that never do are censored at their end."""

    median: float | None  # by Kaplan and Meier; None if half of the runs or fewer reach the target
    restricted_mean: float  # the mean of what was spent until the target or the limit, whichever is first
    limit: float
    reached: int
    runs: int


@dataclass(frozen=True)
class Ranks:
    """Average ranks of methods over settings, 1 is best, and by how much two must differ."""

    average: dict[str, float]  # best first
    settings: int
    friedman: float  # the p-value of the hypothesis that all methods are equal
    critical_difference: float  # Nemenyi's

    def apart(self) -> list[tuple[str, str]]:
        """List the pairs that differ by the critical difference, the better method first."""
        ranked = list(self.average.items())
        far = self.critical_difference - 1e-9
        return [(a, b) for i, (a, first) in enumerate(ranked) for b, second in ranked[i + 1 :] if second - first >= far]


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
    """Compare two methods over the seeds that both have: the first minus the second.

    >>> found = paired_difference([(0.9, 0.8), (0.9, 0.7), (0.8, 0.8)])
    >>> round(found.mean, 3), round(found.p, 3), found.exact
    (0.1, 0.225, 0.5)
    """
    both = [(a, b) for a, b in pairs if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)]
    known = [a - b for a, b in both]
    if not known:
        return None
    mean, degrees = math.fsum(known) / len(known), len(known) - 1
    half = _half_width(known, mean)
    if half is None:
        return Difference(mean, None, None, 1)
    error = half / float(stdtrit(degrees, UPPER))
    if error * math.sqrt(len(known)) <= NO_SPREAD * max(abs(value) for pair in both for value in pair):
        return Difference(mean, None, None, len(known))
    return Difference(mean, half, 2 * float(stdtr(degrees, -abs(mean) / error)), len(known), _flipped_p(known))


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """Estimate how many times as much the first of each pair is: the geometric mean, by Student's t for its logarithm.

    >>> found = paired_ratio([(1.0, 2.0), (1.0, 4.0), (1.0, 2.0)])
    >>> round(found["mean"], 3), round(found["low"], 3), round(found["high"], 3), found["n"]
    (0.397, 0.147, 1.072, 3)
    """
    found = estimate([math.log(a / b) if a > 0 and b > 0 else None for a, b in pairs])
    if found is None:
        return None
    low, high = (None if found.half is None else found.mean + side * found.half for side in (-1, 1))
    return transform(math.exp, {"mean": found.mean, "low": low, "high": high, "n": found.n})


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


def holm_selected(p_values: Mapping[Key, float | None], shown: Sequence[Key]) -> list[float | None]:
    """Adjust the p-values of the shown comparisons for every one that the data could have selected.

    Whichever method comes out best, its comparisons are among those adjusted for, so choosing it costs nothing more.

    >>> holm_selected({("a", "b"): 0.01, ("a", "c"): 0.02, ("b", "c"): 0.9}, [("a", "b")])
    [0.03]
    """
    known = {pair: p for pair, p in p_values.items() if p is not None}
    adjusted = dict(zip(known, holm(list(known.values())), strict=True))
    return [adjusted.get(pair) for pair in shown]


def time_to(times: Sequence[float], reached: Sequence[bool], *, limit: float | None = None) -> TimeTo:
    """Estimate when runs reach a target from the time of each, and whether that is the target or the end of the run.

    >>> found = time_to([3.0, 1.0, 8.0, 2.0, 8.0], [True, True, False, True, False])
    >>> found.median, found.restricted_mean, found.reached
    (3.0, 4.4, 3)
    """
    from scipy.stats import CensoredData, ecdf  # here: importing scipy.stats takes half a second

    hits = np.asarray(reached, dtype=bool)
    values = np.asarray(times, dtype=float)
    survival = ecdf(CensoredData(uncensored=values[hits], right=values[~hits])).sf
    left, steps = [float(x) for x in survival.probabilities], [float(x) for x in survival.quantiles]
    below = [time for time, share in zip(steps, left, strict=True) if share < 0.5 - 1e-12]
    half = [time for time, share in zip(steps, left, strict=True) if abs(share - 0.5) <= 1e-12]
    median = (half[0] + below[0]) / 2 if half and below else below[0] if below else None
    end = float(values.max()) if limit is None else limit
    edges = [0.0, *(min(time, end) for time in steps), end]
    mean = math.fsum(share * (high - low) for share, (low, high) in zip([1.0, *left], pairwise(edges), strict=True))
    return TimeTo(median, mean, end, int(hits.sum()), len(values))


def average_ranks(scores: Mapping[str, Sequence[float]]) -> Ranks | None:
    """Rank methods by their scores in the same settings, higher is better; None for fewer than 3 methods or 2 settings.

    Two methods have no critical difference here: with few settings Nemenyi's is too small for them (12 % error with 4).

    >>> found = average_ranks({"a": [0.7, 0.8], "b": [0.9, 0.9], "c": [0.8, 0.9]})
    >>> found.average, round(found.critical_difference, 2)
    ({'b': 1.25, 'c': 1.75, 'a': 3.0}, 2.34)
    """
    from scipy.stats import friedmanchisquare, rankdata

    table = np.array([list(values) for values in scores.values()], dtype=float)
    if len(scores) < 3 or table.shape[1] < 2:
        return None
    methods, settings = table.shape
    found = rankdata(-table, axis=0).mean(axis=1)
    average = dict(sorted(zip(scores, (float(rank) for rank in found), strict=True), key=lambda pair: pair[1]))
    equal = bool((table == table[0]).all())  # all tied: the statistic is 0 / 0
    friedman = 1.0 if equal else float(friedmanchisquare(*table).pvalue)
    return Ranks(average, settings, friedman, _nemenyi(methods) * math.sqrt(methods * (methods + 1) / (6 * settings)))


def mean_interval(values: Tensor) -> Interval:
    """Estimate a mean from one value per example, by Student's t; inf or NaN makes it inf or NaN.

    >>> from torch import tensor
    >>> found = mean_interval(tensor([1.0, 2.0, 3.0]))
    >>> found["mean"], round(found["high"], 3), found["n"]
    (2.0, 4.484, 3)
    """
    found = estimate(values.double().tolist())
    if found is None or found.n < values.numel():
        return {"mean": values.double().mean().item(), "low": None, "high": None, "n": values.numel()}
    if found.half is None:
        return {"mean": found.mean, "low": None, "high": None, "n": 1}
    return {"mean": found.mean, "low": found.mean - found.half, "high": found.mean + found.half, "n": found.n}


def positive_interval(values: Tensor) -> Interval:
    """Estimate the mean of values that are at least 0, such as losses: by Student's t for its logarithm, so never below 0.

    >>> from torch import tensor
    >>> found = positive_interval(tensor([0.1, 0.2, 0.9]))
    >>> round(found["mean"], 3), round(found["low"], 3), round(found["high"], 3)
    (0.4, 0.027, 5.994)
    """
    found = mean_interval(values)
    mean = found["mean"]
    if found["low"] is None or mean <= 0:
        return found
    factor = exponential((found["high"] - mean) / mean)  # the error of a logarithm is the relative one
    return {**found, "low": mean / factor, "high": mean * factor}


def bounded_interval(values: Tensor, least: float = 0.0, most: float = 1.0) -> Interval:
    """Estimate the mean of values in a range: by Student's t for the logarithm of the odds, so never outside of it.

    >>> from torch import tensor
    >>> found = bounded_interval(tensor([0.5, 0.9, 1.0]))
    >>> round(found["mean"], 3), round(found["low"], 3), round(found["high"], 3)
    (0.8, 0.062, 0.996)
    """
    found = mean_interval(values)
    inside = (found["mean"] - least) / (most - least)
    if found["low"] is None or not 0 < inside < 1:
        return found
    half = (found["high"] - found["mean"]) / (most - least) / (inside * (1 - inside))  # of the logarithm of the odds
    ends = (least + (most - least) * inside / (inside + (1 - inside) * exponential(side)) for side in (half, -half))
    return {**found, **dict(zip(("low", "high"), ends, strict=True))}


def proportion_interval(hits: Tensor) -> Interval:
    """Estimate a proportion from one value per example, 0 or 1, by Wilson's interval: ten of ten does not prove 100 %.

    Values between 0 and 1, such as the fraction of a text's tokens, have a spread of their own: by Student's t for the
    logarithm of the odds.

    >>> from torch import ones
    >>> found = proportion_interval(ones(10))
    >>> found["mean"], round(found["low"], 3), found["high"]
    (1.0, 0.722, 1.0)
    """
    if not bool(((hits == 0) | (hits == 1)).all()):
        return bounded_interval(hits)
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


@cache
def _nemenyi(methods: int) -> float:
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(LEVEL, methods, np.inf)) / math.sqrt(2)


def _flipped_p(differences: Sequence[float]) -> float:
    """Return the share of all choices of signs, or of a fixed sample, whose mean is at least as far from zero."""
    totals = np.abs(_signs(len(differences)) @ np.asarray(differences))
    return float((totals >= totals[0] * (1 - 1e-9)).mean())


@cache
def _signs(n: int) -> Any:
    """List choices of signs, the observed one first."""
    if n <= EXACT:
        return 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    sample = np.random.default_rng(0).choice([-1.0, 1.0], size=(2**EXACT, n))
    sample[0] = 1.0
    return sample

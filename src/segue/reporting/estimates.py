"""Estimates: means and shares over held-out examples, with 95 % intervals, as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from segue.reporting import statistics as intervals

Estimate: TypeAlias = dict[str, Any]  # mean, low and high (None where one example says nothing), n

Z = 1.959964  # of the normal distribution, for 95 %


def mean(values: Tensor) -> Estimate:
    """Estimate a mean from one value per example, by Student's t.

    >>> from torch import tensor
    >>> found = mean(tensor([1.0, 2.0, 3.0]))
    >>> found["mean"], round(found["high"], 3), found["n"]
    (2.0, 4.484, 3)
    """
    found = intervals.estimate(values.double().tolist())
    if found is None:
        return {"mean": math.nan, "low": None, "high": None, "n": 0}
    if found.half is None:
        return {"mean": found.mean, "low": None, "high": None, "n": 1}
    return {"mean": found.mean, "low": found.mean - found.half, "high": found.mean + found.half, "n": found.n}


def share(hits: Tensor) -> Estimate:
    """Estimate a share from one value per example, 0 to 1; by Wilson's interval: all of ten is not yet all of all.

    Where the values are shares themselves, of the tokens of a text, their spread tells more: by Student's t, kept in 0 to 1.

    >>> from torch import ones
    >>> found = share(ones(10))
    >>> found["mean"], round(found["low"], 3), found["high"]
    (1.0, 0.722, 1.0)
    """
    if not bool(((hits == 0) | (hits == 1)).all()):
        found = mean(hits)
        low, high = found["low"], found["high"]
        return found if low is None else {**found, "low": max(0.0, low), "high": min(1.0, high)}
    n, p = hits.numel(), hits.double().mean().item()
    middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return {"mean": p, "low": max(0.0, min(p, middle - half)), "high": min(1.0, max(p, middle + half)), "n": n}


def through(function: Callable[[float], float], found: Estimate) -> Estimate:
    """Read an estimate on another scale, such as a loss as a perplexity."""
    scaled = {key: None if found[key] is None else function(found[key]) for key in ("mean", "low", "high")}
    return {**scaled, "n": found["n"]}


def exponential(value: float) -> float:
    """Return e to a power, or infinity."""
    return math.exp(value) if value < 700 else math.inf

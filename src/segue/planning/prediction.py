"""Prediction: the quadratic form as far as it explains what options damage alone, leave one out for the rest; an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segue.planning.candidates import Option

FOLDS = 5
COVERAGE = 0.9  # of the intervals
LEAST = 8  # subsets: fewer tell nothing about the error
FLOOR = 0.05  # of the mean damage: errors of smaller numbers are judged as if they were this large


@dataclass(frozen=True)
class Prediction:
    """The damage of any subset: a sum over its options and over its pairs."""

    options: tuple[Option, ...]
    singles: Tensor  # (options)
    pairs: Tensor  # (options, options), above the diagonal
    relative_error: float  # of held-out subsets: 90 % of them are closer than this
    floor: float
    r2: float | None  # of held-out subsets; None without any
    measured: int  # subsets
    alone: tuple[float, ...] = ()  # the real damage of each option

    def of(self, subset: Sequence[Option]) -> float:
        """Return the predicted damage."""
        chosen = [self.options.index(option) for option in subset]
        return max(0.0, float(self.singles[chosen].sum() + self.pairs[chosen][:, chosen].sum()))

    def interval(self, subset: Sequence[Option]) -> tuple[float, float]:
        """Return the interval that holds the damage of nine subsets in ten, before training."""
        if not subset:
            return 0.0, 0.0
        middle = self.of(subset)
        half = self.relative_error * (middle + self.floor)
        return max(0.0, middle - half), middle + half


def quadratic(options: Sequence[Option], matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the terms of 1/2 x' H x for 0 and 1: those of single options, and of pairs at different sites."""
    apart = torch.tensor([[a[0] != b[0] for b in options] for a in options])
    return matrix.diagonal().double() / 2, torch.where(apart, matrix.double(), 0.0).triu(1)


def predicted(
    options: Sequence[Option],
    alone: Sequence[float],
    matrix: Tensor,
    subsets: Sequence[Sequence[Option]],
    damages: Sequence[float],
) -> Prediction:
    """Predict by a mean of the quadratic form, which has interactions, and of the real damage of each option alone, added up.

    The weight of the form is the part of the damage alone that it explains: it is exact for small steps, and says nothing about
    large ones. Real subsets, measured on different inputs, give one factor to both, and errors, which are relative.
    """
    singles, pairs = quadratic(options, matrix)
    real = torch.tensor(alone, dtype=torch.float64)
    trust = min(1.0, float(singles.sum() / real.sum())) if float(real.sum()) > 0 else 0.0
    singles, pairs = trust * singles + (1 - trust) * real, trust * pairs
    place = {option: i for i, option in enumerate(options)}
    inside = torch.zeros(len(subsets), len(options), dtype=torch.float64)
    for row, subset in enumerate(subsets):
        inside[row, [place[option] for option in subset]] = 1.0
    x = (inside @ singles + torch.einsum("ni,ij,nj->n", inside, pairs, inside)).clamp_min(0)
    y = torch.tensor(damages, dtype=torch.float64)
    floor = FLOOR * float(y.mean()) if len(y) else 0.0
    noise = (y.clamp_min(0) + floor).clamp_min(1e-30)
    factor = _factor(x, y, noise)
    sure, r2 = _held_out(x, y, noise, floor) if len(y) >= LEAST else (math.inf, None)
    return Prediction(tuple(options), factor * singles, factor * pairs, sure, floor, r2, len(y), tuple(alone))


def _factor(x: Tensor, y: Tensor, noise: Tensor) -> float:
    x, y = x / noise, y / noise
    return float(x @ y / (x @ x)) if float(x @ x) > 0 else 1.0


def _held_out(x: Tensor, y: Tensor, noise: Tensor, floor: float) -> tuple[float, float | None]:
    """Return the relative error that nine held-out subsets of ten stay below, and R2."""
    found = torch.zeros_like(y)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    for fold in range(FOLDS):
        out = torch.zeros(len(y), dtype=torch.bool)
        out[order[fold::FOLDS]] = True
        found[out] = x[out] * _factor(x[~out], y[~out], noise[~out])
    relative = ((y - found).abs() / (found + floor).clamp_min(1e-30)).sort().values
    place = min(len(y) - 1, math.ceil(COVERAGE * (len(y) + 1)) - 1)  # as in split conformal prediction
    spread = float(((y - y.mean()) ** 2).sum())
    return float(relative[place]), 1 - float(((y - found) ** 2).sum()) / spread if spread > 0 else None

"""Prediction: what options damage alone, and their interactions as far as real subsets show them, with an interval."""

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
SURE = 2.0  # standard errors that the weight of interactions is away from 0; else they count nothing
MOST = 2.0  # the largest weight of interactions, in that of single options


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
    """Predict by the real damage of each option alone, and by how alike the quadratic form says that two of them are.

    Two numbers are fitted to the damage of real subsets, which are measured on different inputs: the weight of the sum of
    single options, and that of their interactions. Errors are relative, because damage grows over orders of magnitude.
    """
    singles, pairs = torch.tensor(alone, dtype=torch.float64), _interactions(options, alone, matrix)
    place = {option: i for i, option in enumerate(options)}
    inside = torch.zeros(len(subsets), len(options), dtype=torch.float64)
    for row, subset in enumerate(subsets):
        inside[row, [place[option] for option in subset]] = 1.0
    x = torch.stack([inside @ singles, torch.einsum("ni,ij,nj->n", inside, pairs, inside)], dim=1)
    y = torch.tensor(damages, dtype=torch.float64)
    floor = FLOOR * float(y.mean()) if len(y) else 0.0
    noise = (y.clamp_min(0) + floor).clamp_min(1e-30)
    single, pair = _weights(x, y, noise)
    sure, r2 = _held_out(x, y, noise, floor) if len(y) >= LEAST else (math.inf, None)
    return Prediction(tuple(options), single * singles, pair * pairs, sure, floor, r2, len(y))


def _interactions(options: Sequence[Option], alone: Sequence[float], matrix: Tensor) -> Tensor:
    """Return what pairs add: the correlation of two options in the quadratic form, in units of their real damage."""
    _, pairs = quadratic(options, matrix)
    size = matrix.diagonal().double().clamp_min(0).sqrt()
    units = torch.tensor(alone, dtype=torch.float64).clamp_min(0).sqrt()
    each = torch.where(size > 0, units / size, 0.0)
    return 2 * pairs * each[:, None] * each


def _weights(x: Tensor, y: Tensor, noise: Tensor) -> tuple[float, float]:
    """Fit the weights of single options and of interactions; that of interactions is shrunk by its standard error."""
    (one, two), y = (x / noise[:, None]).T, y / noise
    square, other, mixed = float(one @ one), float(two @ two), float(one @ two)
    if square == 0:
        return 1.0, 0.0
    pair, determinant = 0.0, square * other - mixed**2
    if len(y) > 2 and determinant > 1e-12 * square * other:
        pair = (square * float(two @ y) - mixed * float(one @ y)) / determinant
        single = (float(one @ y) - pair * mixed) / square
        error = float(((y - single * one - pair * two) ** 2).sum()) / (len(y) - 2) * square / determinant
        pair = pair * max(0.0, 1 - SURE**2 * error / pair**2) if pair > 0 else 0.0
    single = max(0.0, (float(one @ y) - pair * mixed) / square)
    return single, min(pair, MOST * single)


def _held_out(x: Tensor, y: Tensor, noise: Tensor, floor: float) -> tuple[float, float | None]:
    """Return the relative error that nine held-out subsets of ten stay below, and R2."""
    found = torch.zeros_like(y)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    for fold in range(FOLDS):
        out = torch.zeros(len(y), dtype=torch.bool)
        out[order[fold::FOLDS]] = True
        weights = torch.tensor(_weights(x[~out], y[~out], noise[~out]), dtype=torch.float64)
        found[out] = (x[out] @ weights).clamp_min(0)
    relative = ((y - found).abs() / (found + floor).clamp_min(1e-30)).sort().values
    place = min(len(y) - 1, math.ceil(COVERAGE * (len(y) + 1)) - 1)  # as in split conformal prediction
    spread = float(((y - y.mean()) ** 2).sum())
    return float(relative[place]), 1 - float(((y - found) ** 2).sum()) / spread if spread > 0 else None

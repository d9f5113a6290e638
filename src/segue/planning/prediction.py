"""Prediction: the quadratic form, corrected for large steps by real subsets, with an interval for every number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segue.planning.candidates import Option

PENALTIES = tuple(10.0**power for power in range(-3, 5))  # of the ridge regression, relative to the noise
FOLDS = 5
COVERAGE = 0.9  # of the intervals
LEAST = 8  # subsets: fewer correct the form, and tell nothing about the error
FLOOR = 0.02  # of the mean damage: errors of smaller numbers are judged as if they were this large
BASIC = 1e-3  # of the mean of the diagonal: what is not seen in the quadratic form may still be this large


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


def uncorrected(options: Sequence[Option], matrix: Tensor) -> Prediction:
    """Predict by the quadratic form alone."""
    singles, pairs = quadratic(options, matrix)
    return Prediction(tuple(options), singles, pairs, math.inf, 0.0, None, 0)


def corrected(
    options: Sequence[Option], matrix: Tensor, subsets: Sequence[Sequence[Option]], damages: Sequence[float]
) -> Prediction:
    """Correct the quadratic form by the damage of real subsets: ridge regression on [quadratic form, singles, pairs].

    A correction may be as large as what it corrects, so every single and pair is measured in units of its own term; errors are
    relative, because damage grows over orders of magnitude.
    """
    singles, pairs = quadratic(options, matrix)
    x, units = _design(options, singles, pairs, subsets)
    y = torch.tensor(damages, dtype=torch.float64)
    floor = FLOOR * float(y.mean())
    noise = y.clamp_min(0) + floor
    held_out = torch.full_like(y, math.nan)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    for fold in range(FOLDS):
        out = torch.zeros(len(y), dtype=torch.bool)
        out[order[fold::FOLDS]] = True
        held_out[out] = x[out] @ _ridge(x[~out], y[~out], noise[~out])
    held_out = held_out.clamp_min(0)
    spread = float(((y - y.mean()) ** 2).sum())
    r2 = 1 - float(((y - held_out) ** 2).sum()) / spread if spread > 0 else None
    relative = ((y - held_out).abs() / (held_out + floor)).sort().values
    place = min(len(y) - 1, math.ceil(COVERAGE * (len(y) + 1)) - 1)  # as in split conformal prediction
    sure = float(relative[place]) if len(y) >= LEAST else math.inf
    weights = _ridge(x, y, noise)
    count, (rows, columns) = len(options), _places(options)
    final = weights[0] * pairs
    final[rows, columns] += weights[1 + count :] * units[1 + count :]
    return Prediction(
        tuple(options), weights[0] * singles + weights[1 : 1 + count] * units[1 : 1 + count], final,
        sure, floor, r2 if len(y) >= LEAST else None, len(y),
    )  # fmt: skip


def _places(options: Sequence[Option]) -> tuple[list[int], list[int]]:
    pairs = [(i, j) for i, a in enumerate(options) for j, b in enumerate(options) if i < j and a[0] != b[0]]
    return [i for i, _ in pairs], [j for _, j in pairs]


def _design(
    options: Sequence[Option], singles: Tensor, pairs: Tensor, subsets: Sequence[Sequence[Option]]
) -> tuple[Tensor, Tensor]:
    """Return the features of subsets, each in units of its term, and the units."""
    place = {option: i for i, option in enumerate(options)}
    inside = torch.zeros(len(subsets), len(options), dtype=torch.float64)
    for row, subset in enumerate(subsets):
        inside[row, [place[option] for option in subset]] = 1.0
    rows, columns = _places(options)
    form = inside @ singles + torch.einsum("ni,ij,nj->n", inside, pairs, inside)
    least = BASIC * float(singles.abs().mean()) or 1.0
    units = torch.cat([torch.ones(1, dtype=torch.float64), singles.abs() + least, pairs[rows, columns].abs() + least])
    return torch.cat([form[:, None], inside, inside[:, rows] * inside[:, columns]], dim=1) * units, units


def _ridge(x: Tensor, y: Tensor, noise: Tensor) -> Tensor:
    """Regress with relative errors; the penalty, which spares the quadratic form, is the best of a leave-one-out."""
    x, y = x / noise[:, None], y / noise
    spared = torch.ones(x.shape[1], dtype=torch.float64)
    spared[0] = 1e-9
    best: tuple[float, Tensor] | None = None
    for penalty in PENALTIES:
        inverse = torch.linalg.pinv(x.T @ x + penalty * torch.diag(spared), hermitian=True)
        weights = inverse @ (x.T @ y)
        leverage = torch.einsum("ni,ij,nj->n", x, inverse, x).clamp_max(1 - 1e-9)
        error = float((((y - x @ weights) / (1 - leverage)) ** 2).sum())
        if best is None or error < best[0]:
            best = error, weights
    assert best is not None
    return best[1]

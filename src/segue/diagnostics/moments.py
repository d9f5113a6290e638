"""Moments: means and variances of gradients, vector by vector, and how sure they are."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor


class Moments:
    """The mean of weighted vectors and their squared distance from it, vector by vector."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.spread = 0.0
        self._mean: Tensor | None = None

    def add(self, vector: Tensor, weight: float = 1.0) -> None:
        self.weight += weight
        if self._mean is None:
            self._mean = vector.clone()
            return
        off = vector - self._mean
        self._mean += off * (weight / self.weight)
        self.spread += weight * torch.dot(off, vector - self._mean).item()

    @property
    def mean(self) -> Tensor:
        assert self._mean is not None
        return self._mean

    @property
    def variance(self) -> float:
        """Of the population: 0 exactly where all vectors are one."""
        return self.spread / self.weight


class Estimate:
    """The two parts of a gradient's variance at one site, minibatch by minibatch."""

    def __init__(self) -> None:
        self.gates: list[float] = []
        self.coarse: list[float] = []  # by a quadrature with half the nodes
        self.blocks: list[list[float]] = []  # by the draws of each block
        self.draws = math.inf
        self.over_data = Moments()

    def enumerated(self, whole: Moments, coarse: Moments | None) -> None:
        """Add a minibatch whose outcomes are all known, or the nodes of a quadrature with those of a coarser one."""
        self.gates.append(whole.variance)
        self.coarse.append((coarse or whole).variance)
        self.over_data.add(whole.mean)

    def drawn(self, whole: Moments, blocks: list[Moments]) -> None:
        """Add a minibatch whose gates were drawn, in blocks."""
        self.gates.append(whole.spread / (whole.weight - 1))
        self.blocks.append([block.spread / (block.weight - 1) for block in blocks])
        self.draws = whole.weight
        self.over_data.add(whole.mean)

    @property
    def gate(self) -> float:
        """The variance by the gates, mean over the minibatches."""
        return math.fsum(self.gates) / len(self.gates)

    @property
    def data(self) -> float:
        """The variance over the minibatches; the means over draws vary too, which is not the data's doing."""
        return self.over_data.variance - (1 - 1 / len(self.gates)) * self.gate / self.draws


def standard_error(estimates: list[Estimate]) -> float:
    """Return the error of the sum of estimates that come from the same minibatches and draws."""
    count = len(estimates[0].gates)
    if estimates[0].blocks:
        batches = zip(*(one.blocks for one in estimates), strict=True)
        sums = [[math.fsum(sites) for sites in zip(*blocks, strict=True)] for blocks in batches]
        return math.sqrt(math.fsum(statistics.variance(blocks) / len(blocks) for blocks in sums)) / count
    pairs = [pair for one in estimates for pair in zip(one.gates, one.coarse, strict=True)]
    return math.sqrt(math.fsum((fine - coarse) ** 2 for fine, coarse in pairs)) / count

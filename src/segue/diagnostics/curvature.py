"""The bias of random mixing before a curved loss (proposition 3).

A random weight r puts the output at Y = T + r D with D = S - T. Its mean is mu = T + E[r] D, but the mean loss there is not the
loss at the mean: |E psi(Y) - psi(mu)| <= M/2 Var(r) |D|^2, with M the largest curvature of psi on the segment. For a coin
Var(r) = p(1 - p), as in the paper; for a blend both sides are 0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segue.border import PositiveInt, Seed, Unit, checked
from segue.core.handover import Handover
from segue.diagnostics.gate_distribution import GateDistribution, fixed_batches, select_sites, site_distributions
from segue.diagnostics.loss_path import Tail, tails
from segue.gates import Gate
from segue.reporting.formatting import significant
from segue.training.tasks import LossFn


@dataclass(frozen=True, kw_only=True)
class Curvature:
    """The largest absolute eigenvalue of a Hessian, by Lanczos' method."""

    value: float
    error: float  # an eigenvalue is within this distance of `value` or its negative


@dataclass(frozen=True, kw_only=True)
class SiteBias:
    """The bias at one site: means over the minibatches, unless a comment says otherwise."""

    bias: float  # |E psi(Y) - psi(mu)|
    bound: float  # M/2 Var(r) |D|^2
    along_bound: float  # the same with the curvature along D alone: a sharper bound
    ratio: float  # bias / bound, the largest of all minibatches; 0 where the bound is 0
    curvature: float  # M, the largest of all minibatches and points of the segment
    curvature_error: float  # of that estimate
    along: float  # the largest |D' H D| / |D|^2
    distance: float  # |D|


@dataclass(frozen=True, kw_only=True)
class CurvatureBias:
    """What `curvature_bias` found."""

    sites: dict[str, SiteBias]
    points: int  # measured on each segment
    iterations: int  # of Lanczos' method, at most
    batches: int

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw bias and bounds site by site; needs matplotlib."""
        from segue.diagnostics.figures import draw_curvature

        return draw_curvature(self, Path(path))

    def __str__(self) -> str:
        """Write a Markdown table, one line per site."""
        rows = ["| site | bias | bound | ratio | curvature M | its error | distance |", "|---|---|---|---|---|---|---|"]
        for name, site in self.sites.items():
            numbers = (site.bias, site.bound, site.ratio, site.curvature, site.curvature_error, site.distance)
            rows.append(f"| {name} | {' | '.join(map(significant, numbers))} |")
        return "\n".join(rows)

    _repr_markdown_ = __str__  # what a notebook shows


@checked
def curvature_bias(
    handover: Handover,
    batches: Iterable[Any],
    loss_fn: LossFn,
    alpha: Unit | None = 0.5,
    sites: str | Sequence[str] | None = None,
    *,
    gate: Gate | None = None,
    points: PositiveInt = 9,
    iterations: PositiveInt = 24,
    seed: Seed = 0,
) -> CurvatureBias:
    """Measure how far random mixing at a site moves the expected loss, and the paper's bound.

    The curvature is measured on the segment from teacher to student, by Lanczos' method; the other gates stay at their means.

    >>> import torch
    >>> import segue
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    >>> handover = segue.replace_(model, segue.methods.dcr_dfg("0"), total_steps=10)
    >>> batches = [(torch.randn(8, 4), torch.randint(2, (8,)))]
    >>> gate, loss_fn = segue.gates.Bernoulli(), segue.Classification()
    >>> segue.diagnostics.curvature_bias(handover, batches, loss_fn, points=3, gate=gate).sites.keys()
    dict_keys(['0'])

    Args:
        handover: A running handover whose teachers are still there.
        batches: The population of minibatches, as `loss_fn` takes them.
        loss_fn: (model, batch) -> scalar, the loss of the task; guidance is not part of it, as in the paper.
        alpha: The teacher's share at every site; None means the present alphas.
        sites: Names of the sites to measure; all by default.
        gate: Another gate than the plan's.
        points: Points of the segment.
        iterations: Hessian-vector products at each point, at most.
        seed: Of the first vector.
    """
    handover.require_teachers("curvature_bias()")
    distributions = site_distributions(handover, alpha, gate)
    population = fixed_batches(batches, handover)
    found = {}
    with tails(handover, {name: one.mean for name, one in distributions.items()}) as tail:
        for name in select_sites(handover, sites):
            each = [_bias(tail(name, batch, loss_fn), distributions[name], points, iterations, seed) for batch in population]
            found[name] = _joined(each)
    return CurvatureBias(sites=found, points=points, iterations=iterations, batches=len(population))


def _bias(tail: Tail, weights: GateDistribution, points: int, iterations: int, seed: int) -> SiteBias:
    expected = math.fsum(probability * tail.value(weight) for weight, probability in weights.outcomes)
    bias = 0.0 if weights.variance == 0.0 else abs(expected - tail.value(weights.mean))
    across = tail.student - tail.teacher
    square = tail.distance**2
    curvature, along = Curvature(value=0.0, error=0.0), 0.0
    for point in range(points):
        product = tail.curvature(point / max(1, points - 1))
        here = largest_curvature(product, across, iterations=iterations, seed=seed)
        curvature = max(curvature, here, key=lambda one: one.value)
        if square > 0:
            along = max(along, abs(float((across.double() * product(across).double()).sum())) / square)
    bound = curvature.value / 2 * weights.variance * square
    return SiteBias(
        bias=bias,
        bound=bound,
        along_bound=along / 2 * weights.variance * square,
        ratio=bias / bound if bound > 0 else 0.0,
        curvature=curvature.value,
        curvature_error=curvature.error,
        along=along,
        distance=tail.distance,
    )


def _joined(each: list[SiteBias]) -> SiteBias:
    def mean(name: str) -> float:
        return math.fsum(getattr(one, name) for one in each) / len(each)

    steepest = max(each, key=lambda one: one.curvature)
    return SiteBias(
        bias=mean("bias"),
        bound=mean("bound"),
        along_bound=mean("along_bound"),
        ratio=max(one.ratio for one in each),
        curvature=steepest.curvature,
        curvature_error=steepest.curvature_error,
        along=max(one.along for one in each),
        distance=mean("distance"),
    )


def largest_curvature(
    product: Callable[[Tensor], Tensor], like: Tensor, *, iterations: int = 24, seed: int = 0, tolerance: float = 1e-6
) -> Curvature:
    """Find the largest absolute eigenvalue of a symmetric operator, given by its products with vectors.

    >>> matrix = torch.diag(torch.tensor([1.0, -5.0, 2.0]))
    >>> found = largest_curvature(lambda v: matrix @ v, torch.zeros(3))
    >>> round(found.value, 4), found.error < 1e-4
    (5.0, True)

    Lanczos' method with full reorthogonalisation, from a seeded random start. The residual of the best Ritz pair bounds the
    distance to an eigenvalue; that it finds the largest one is likely, not certain.
    """
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(like.numel(), generator=generator, dtype=torch.float64)
    vector /= vector.norm()
    basis: list[Tensor] = []
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    best = Curvature(value=0.0, error=math.inf)
    for _ in range(min(iterations, like.numel())):
        basis.append(vector)
        image = product(vector.reshape(like.shape).to(like)).double().cpu().reshape(-1)
        diagonal.append(float(image @ vector))
        for _ in range(2):  # twice, because of rounding
            for one in basis:
                image = image - (image @ one) * one
        rest = float(image.norm())
        best = _ritz(diagonal, off_diagonal, rest)
        if rest <= tolerance * max(best.value, 1e-300) or best.error <= tolerance * best.value:
            break
        off_diagonal.append(rest)
        vector = image / rest
    return best


def _ritz(diagonal: list[float], off_diagonal: list[float], rest: float) -> Curvature:
    """Return the largest eigenvalue of the tridiagonal matrix, and the residual of its vector."""
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if off_diagonal:
        off = torch.tensor(off_diagonal, dtype=torch.float64)
        matrix = matrix + torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(matrix)
    index = int(values.abs().argmax())
    return Curvature(value=float(values[index].abs()), error=abs(rest * float(vectors[-1, index])))

"""How much of a gradient's variance the gates cause (propositions 1 and 2, and the remark on soft gates).

Each student's gradient g depends on the minibatch X and on the gates. By the law of total variance,

    Var[g] = E[Var(g | X)] + Var(E[g | X])
              .gate            .data

The variance of a vector is the sum over its entries. The minibatches given are the population.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from segue.border import Count, PositiveInt, Seed, Unit, at_least, checked
from segue.core.handover import Handover
from segue.core.modes import View
from segue.core.views import gradients, isolated
from segue.diagnostics.gate_distribution import GateDistribution, fixed_batches, select_sites, site_distributions
from segue.gates import Gate, Noise
from segue.reporting.formatting import significant
from segue.similarity import as_real
from segue.training.tasks import LossFn, scalar

MOST_OUTCOMES = 4096  # twelve coins
EXACT = "exact"
BLOCKS = 8  # of draws, whose spread gives the standard error

Weights = Mapping[str, float]
Vectors = dict[str, Tensor]  # a student's gradient as one vector, by site


@dataclass(frozen=True, kw_only=True)
class Variance:
    """The variance of a gradient in its two parts, and what the paper's formula gives for the gates' part."""

    gate: float  # E[Var(g | X)], caused by the gates
    data: float  # Var(E[g | X]), over the minibatches
    predicted: float  # Var(r) E|a|^2 for the student's weight r: p(1 - p) E|a|^2 for a coin, 0 for a blend
    standard_error: float  # of `gate`: 0 where it is exact

    @property
    def total(self) -> float:
        return self.gate + self.data


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The variances when one gate varies at a time, or all do."""

    sites: dict[str, Variance]
    how: str  # exact, quadrature or the number of draws
    error: float  # of the total: the errors of sites that share their draws are not independent

    @property
    def total(self) -> Variance:
        """The variance of all students' gradients together, as one vector."""
        found = self.sites.values()
        return Variance(
            gate=sum(site.gate for site in found),
            data=sum(site.data for site in found),
            predicted=sum(site.predicted for site in found),
            standard_error=self.error,
        )


@dataclass(frozen=True, kw_only=True)
class Slope:
    """The paper's a: a student's gradient per unit of its weight, over the minibatches, the other gates at their means."""

    variance: float  # Var[a]
    mean_square: float  # |E[a]|^2
    square: float  # E|a|^2

    def coin(self, p: float) -> float:
        """Return proposition 1: Var[z a] for a coin z that chooses the student with probability p."""
        return p * self.variance + p * (1 - p) * self.mean_square

    def coin_bound(self, p: float) -> float:
        """Return the bound of proposition 1."""
        return p * self.variance + p * (1 - p) * self.square

    def soft(self, mean: float, variance: float) -> float:
        """Return the remark: Var[r a] for a soft gate r that a does not depend on."""
        return mean**2 * self.variance + variance * self.square


NO_SLOPE = Slope(variance=0.0, mean_square=0.0, square=0.0)


@dataclass(frozen=True, kw_only=True)
class GateGradientVariance:
    """What `gate_gradient_variance` found."""

    alone: (
        Setting | None
    )  # one gate varies at a time, the others stay at their means: the paper's setting; None if not requested
    together: Setting  # all gates vary, as in training
    slopes: dict[str, Slope]  # measured at deterministic gates only with `alone`
    distributions: dict[str, GateDistribution] = field(repr=False)
    batches: int

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw both settings site by site, with the paper's formula; needs matplotlib."""
        from segue.diagnostics.figures import draw_variance

        return draw_variance(self, Path(path))

    def __str__(self) -> str:
        """Write a Markdown table, one line per site and the total."""
        settings = {"alone": self.alone, "together": self.together}
        rows = [
            "| site | gates that vary | by the gates | standard error | the paper's formula | over data |",
            "|---|---|---|---|---|---|",
        ]
        for name, setting in settings.items():
            for site, found in ({**setting.sites, "all": setting.total} if setting else {}).items():
                numbers = (found.gate, found.standard_error, found.predicted, found.data)
                rows.append(f"| {site} | {name} ({setting.how if setting else ''}) | {' | '.join(map(significant, numbers))} |")
        return "\n".join(rows)

    _repr_markdown_ = __str__  # what a notebook shows


@checked
def gate_gradient_variance(
    handover: Handover,
    batches: Iterable[Any],
    loss_fn: LossFn,
    alpha: Unit | None = 0.5,
    sites: str | Sequence[str] | None = None,
    draws: Annotated[Count, at_least(4)] = 64,  # a variance and its error need 4
    *,
    gate: Gate | None = None,
    alone: bool = True,
    most_outcomes: PositiveInt = MOST_OUTCOMES,
    seed: Seed = 0,
) -> GateGradientVariance:
    """Measure how much of the variance of the students' gradients the gates cause, and how much the data.

    Exact by enumeration where the gates have few outcomes (one site; up to twelve coins), by quadrature for one soft gate, and
    by draws with a standard error otherwise. The model runs in eval mode, so that dropout adds nothing; the run is not changed.

    >>> import torch
    >>> import segue
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    >>> handover = segue.replace_(model, segue.methods.dcr_dfg("0"), total_steps=10)
    >>> batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(2)]
    >>> loss_fn = segue.Classification()
    >>> found = segue.diagnostics.gate_gradient_variance(handover, batches, loss_fn, gate=segue.gates.Bernoulli())
    >>> list(found.distributions)
    ['0']

    Args:
        handover: A running handover whose teachers are still there.
        batches: The population of minibatches, as `loss_fn` takes them.
        loss_fn: (model, batch) -> scalar, the loss of the task; guidance is not part of it, as in the paper.
        alpha: The teacher's share at every site; None means the present alphas.
        sites: Names of the sites to measure; all by default.
        draws: Seeded draws per minibatch, where nothing is exact.
        gate: Another gate than the plan's, with the same students.
        alone: Measure each site alone too.
        most_outcomes: The most outcomes that are enumerated.
        seed: Of the draws.
    """
    handover.require_teachers("gate_gradient_variance()")
    distributions = site_distributions(handover, alpha, gate)
    names = select_sites(handover, sites)
    population = fixed_batches(batches, handover)
    with isolated(handover):
        measure = _Measurement(handover, population, loss_fn, distributions, draws, most_outcomes, seed)
        slopes: dict[str, Slope] = {}
        apart: dict[str, Variance] = {}
        for name in names:
            slopes[name] = measure.slope(name) if alone or distributions[name].variance > 0 else NO_SLOPE
            if alone or len(distributions) == 1:
                apart[name] = measure.alone(name, slopes[name])
            measure.forget()
        error = math.sqrt(math.fsum(site.standard_error**2 for site in apart.values()))
        one_by_one = Setting(sites=apart, how=measure.how_alone(names), error=error) if apart else None
        together = one_by_one if one_by_one and len(distributions) == 1 else measure.together(slopes)
    return GateGradientVariance(
        alone=one_by_one,
        together=together,
        slopes=slopes,
        distributions={name: distributions[name] for name in names},
        batches=len(population),
    )


class _Measurement:
    """One call of gate_gradient_variance, inside `isolated(handover)`."""

    def __init__(
        self,
        handover: Handover,
        batches: list[Any],
        loss_fn: LossFn,
        distributions: dict[str, GateDistribution],
        draws: int,
        most_outcomes: int,
        seed: int,
    ) -> None:
        self.handover, self.batches, self.loss_fn, self.distributions = handover, batches, loss_fn, distributions
        self.most_outcomes, self.seed = most_outcomes, seed
        self.blocks = min(BLOCKS, draws // 2)
        self.draws = draws // self.blocks * self.blocks
        self.means = {name: distribution.mean for name, distribution in distributions.items()}
        self._known: dict[tuple[int, str, float], Tensor] = {}
        for seam in handover.seams.values():
            seam.configure(view=View.BLEND, hold=False)

    def slope(self, name: str) -> Slope:
        """Return the moments of a at one site."""
        at = self.distributions[name].mean_above_zero
        if at == 0.0:
            return NO_SLOPE
        over_data = _Moments()
        for index in range(len(self.batches)):
            over_data.add(self._one(index, name, at) / at)
        mean_square = over_data.mean.square().sum().item()
        return Slope(variance=over_data.variance, mean_square=mean_square, square=over_data.variance + mean_square)

    def alone(self, name: str, slope: Slope) -> Variance:
        """Vary the gate of one site."""
        distribution = self.distributions[name]
        known = self._is_known(distribution)

        def gradient(index: int, weights: Weights) -> Vectors:
            return {name: self._one(index, name, weights[name])}

        outcomes = [({name: weight}, probability) for weight, probability in distribution.outcomes] if known else None
        found = self._estimates([name], gradient, outcomes, integrated=not distribution.exact)
        return _variance(found[name], distribution.variance * slope.square)

    def together(self, slopes: dict[str, Slope]) -> Setting:
        """Vary the gates of all sites independently."""
        every = self.distributions.values()
        few = all(one.exact for one in every) and math.prod(len(one.outcomes) for one in every) <= self.most_outcomes

        def gradient(index: int, weights: Weights) -> Vectors:
            return self._gradients(index, list(slopes), weights)

        found = self._estimates(list(slopes), gradient, list(_product(self.distributions)) if few else None)
        return Setting(
            sites={n: _variance(one, self.distributions[n].variance * slopes[n].square) for n, one in found.items()},
            how=EXACT if few else f"{self.draws} draws",
            error=_standard_error(list(found.values())),
        )

    def how_alone(self, names: list[str]) -> str:
        """Say how the gates vary one by one."""
        hows = {
            f"{self.draws} draws" if not self._is_known(one) else EXACT if one.exact else "quadrature"
            for one in (self.distributions[name] for name in names)
        }
        return ", ".join(sorted(hows))

    def forget(self) -> None:
        """Free the gradients of a site that is done."""
        self._known.clear()

    def _is_known(self, distribution: GateDistribution) -> bool:
        return not distribution.drawn and len(distribution.outcomes) <= self.most_outcomes

    def _estimates(
        self,
        names: list[str],
        gradient: Callable[[int, Weights], Vectors],
        outcomes: list[tuple[dict[str, float], float]] | None,
        integrated: bool = False,
    ) -> dict[str, _VarianceParts]:
        found = {name: _VarianceParts() for name in names}
        for index in range(len(self.batches)):
            total = {name: _Moments() for name in names}
            if outcomes is not None:
                coarse = {name: _Moments() for name in names}
                for node, (weights, probability) in enumerate(outcomes):
                    for name, vector in gradient(index, weights).items():
                        total[name].add(vector, probability)
                        if integrated and node % 2 == 0:
                            coarse[name].add(vector, probability)
                for name in names:
                    found[name].enumerated(total[name], coarse[name] if integrated else None)
                continue
            blocks = {name: [_Moments() for _ in range(self.blocks)] for name in names}
            for draw in range(self.draws):
                for name, vector in gradient(index, self._drawn(index, draw)).items():
                    total[name].add(vector)
                    blocks[name][draw % self.blocks].add(vector)
            for name in names:
                found[name].drawn(total[name], blocks[name])
        return found

    def _drawn(self, index: int, draw: int) -> dict[str, float]:
        step = index * self.draws + draw
        return {name: one.draw(Noise(self.seed, step, f"measured/{name}")) for name, one in self.distributions.items()}

    def _one(self, index: int, name: str, weight: float) -> Tensor:
        """Return the gradient at one site with the other gates at their means; the slope's is kept for an equal outcome."""
        key = index, name, weight
        found = self._known.get(key)
        if found is None:
            found = self._gradients(index, [name], {**self.means, name: weight})[name]
            if weight == self.distributions[name].mean_above_zero:
                self._known[key] = found
        return found

    def _gradients(self, index: int, names: list[str], weights: Weights) -> Vectors:
        """Return the gradients of students as vectors; nothing is computed for a student of weight 0."""
        seams = self.handover.seams
        for name, seam in seams.items():
            seam.set_weight(weights[name], weights[name])
        active = [name for name in names if weights[name] > 0.0]
        parameters = {name: [p for p in seams[name].student.parameters() if p.requires_grad] for name in names}
        flat = [p for name in active for p in parameters[name]]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            outputs = [scalar(self.loss_fn(self.handover.model, self.batches[index]))] if flat else []
            taken = iter(gradients(self.handover.model, [x for x in outputs if x.requires_grad], flat))
        return {name: _vector(parameters[name], taken if name in active else itertools.repeat(None)) for name in names}


class _Moments:
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
        """Of the population: exactly 0 if all vectors are equal."""
        return self.spread / self.weight


class _VarianceParts:
    """The two parts of a gradient's variance at one site, minibatch by minibatch."""

    def __init__(self) -> None:
        self.gates: list[float] = []
        self.coarse: list[float] = []  # by a quadrature with half the nodes
        self.blocks: list[list[float]] = []  # by the draws of each block
        self.draws = math.inf
        self.over_data = _Moments()

    def enumerated(self, total: _Moments, coarse: _Moments | None) -> None:
        """Add a minibatch whose outcomes are all known, or the nodes of a quadrature with those of a coarser one."""
        self.gates.append(total.variance)
        self.coarse.append((coarse or total).variance)
        self.over_data.add(total.mean)

    def drawn(self, total: _Moments, blocks: list[_Moments]) -> None:
        """Add a minibatch whose gates were drawn, in blocks."""
        self.gates.append(total.spread / (total.weight - 1))
        self.blocks.append([block.spread / (block.weight - 1) for block in blocks])
        self.draws = total.weight
        self.over_data.add(total.mean)

    @property
    def gate(self) -> float:
        """The variance by the gates, mean over the minibatches."""
        return math.fsum(self.gates) / len(self.gates)

    @property
    def data(self) -> float:
        """The variance over the minibatches, corrected for the variance of the means over draws."""
        return self.over_data.variance - (1 - 1 / len(self.gates)) * self.gate / self.draws


def _standard_error(sites: list[_VarianceParts]) -> float:
    """Return the error of the sum over sites that share their minibatches and draws."""
    count = len(sites[0].gates)
    if sites[0].blocks:
        batches = zip(*(one.blocks for one in sites), strict=True)
        sums = [[math.fsum(each) for each in zip(*blocks, strict=True)] for blocks in batches]
        return math.sqrt(math.fsum(statistics.variance(blocks) / len(blocks) for blocks in sums)) / count
    pairs = [pair for one in sites for pair in zip(one.gates, one.coarse, strict=True)]
    return math.sqrt(math.fsum((fine - coarse) ** 2 for fine, coarse in pairs)) / count


def _variance(found: _VarianceParts, predicted: float) -> Variance:
    return Variance(gate=found.gate, data=found.data, predicted=predicted, standard_error=_standard_error([found]))


def _vector(parameters: list[nn.Parameter], gradients: Iterator[Tensor | None]) -> Tensor:
    """Join the gradients of parameters into one real vector in double precision."""
    pieces = [
        as_real(torch.zeros(p.shape, dtype=p.dtype, device=p.device) if gradient is None else gradient).double()
        for p, gradient in zip(parameters, gradients, strict=False)
    ]
    return torch.cat([piece.reshape(-1) for piece in pieces]) if pieces else torch.zeros(0, dtype=torch.float64)


def _product(distributions: dict[str, GateDistribution]) -> Iterator[tuple[dict[str, float], float]]:
    """Combine the outcomes of independent gates."""
    for combined in itertools.product(*(one.outcomes for one in distributions.values())):
        weights = {name: weight for name, (weight, _) in zip(distributions, combined, strict=True)}
        yield weights, math.prod(probability for _, probability in combined)

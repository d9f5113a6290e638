"""How much of a gradient's variance the gates cause (propositions 1 and 2, and the remark on soft gates).

Each student's gradient g depends on the minibatch X and on the gates. The law of total variance parts its variance in two:

    Var[g] = E[Var(g | X)] + Var(E[g | X])
              .gate            .data

The variance of a vector is the sum over its entries. The minibatches given are the whole population.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue.core.handover import Handover
from segue.core.seam import View
from segue.core.views import gradients, isolated
from segue.diagnostics.gate_distribution import Law, law_of
from segue.diagnostics.moments import Estimate, Moments, standard_error
from segue.diagnostics.population import chosen_sites, fixed_batches, shares
from segue.errors import PlanError
from segue.gates import Gate, Noise
from segue.reporting.formatting import significant
from segue.training.tasks import LossFn

MOST_OUTCOMES = 4096  # twelve coins
EXACT = "exact"
BLOCKS = 8  # draws are cut into so many blocks, whose spread gives the standard error

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
    def whole(self) -> float:
        return self.gate + self.data


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The variances with a certain choice of gates that move."""

    sites: dict[str, Variance]
    how: str
    error: float  # of the total: sites that share their draws do not err independently

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

    alone: Setting | None  # one gate moves at a time, the others stay at their means: the paper's setting; or not asked for
    together: Setting  # all gates move, as they do in training
    slopes: dict[str, Slope]  # not measured at a site without chance unless `alone` was asked for
    laws: dict[str, Law] = field(repr=False)
    batches: int

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw both settings site by site, beside the paper's formula; needs matplotlib."""
        from segue.diagnostics.figures import draw_variance

        return draw_variance(self, Path(path))

    def __str__(self) -> str:
        """Write a Markdown table, one line per site and the total."""
        settings = {"alone": self.alone, "together": self.together}
        rows = [
            "| site | gates that move | by the gates | standard error | the paper's formula | over data |",
            "|---|---|---|---|---|---|",
        ]
        for name, setting in settings.items():
            for site, found in ({**setting.sites, "all": setting.total} if setting else {}).items():
                numbers = (found.gate, found.standard_error, found.predicted, found.data)
                rows.append(f"| {site} | {name} ({setting.how if setting else ''}) | {' | '.join(map(significant, numbers))} |")
        return "\n".join(rows)


def gate_gradient_variance(
    handover: Handover,
    batches: Iterable[Any],
    loss_fn: LossFn,
    alpha: float | None = 0.5,
    sites: str | Sequence[str] | None = None,
    draws: int = 64,
    *,
    gate: Gate | None = None,
    alone: bool = True,
    most_outcomes: int = MOST_OUTCOMES,
    seed: int = 0,
) -> GateGradientVariance:
    """Measure how much of the variance of the students' gradients the gates cause, and how much the data.

    Exact by enumeration where the gates have few outcomes (one site; up to twelve coins), by quadrature for one soft gate, and
    by `draws` seeded draws per minibatch with a standard error otherwise. `alpha` is the teacher's share at every site; None
    takes the shares as they are now. `gate` asks what another gate would do with the same weights. `batches` is the population
    of minibatches, `loss_fn(model, batch)` the task's loss: guidance is left out, as in the paper. Everything runs in
    evaluation, so that dropout adds nothing; the run is not touched.
    """
    if draws < 4:
        raise PlanError(f"draws={draws} was asked for.", "A variance and its error need at least 4.", "64 is the default.")
    handover.require_teachers("gate_gradient_variance()")
    laws = {name: law_of(gate or handover.plan.gate, share) for name, share in shares(handover, alpha).items()}
    names = chosen_sites(handover, sites)
    population = fixed_batches(batches, handover)
    with isolated(handover):
        measure = _Measurement(handover, population, loss_fn, laws, draws, most_outcomes, seed)
        slopes: dict[str, Slope] = {}
        apart: dict[str, Variance] = {}
        for name in names:
            slopes[name] = measure.slope(name) if alone or laws[name].variance > 0 else NO_SLOPE
            if alone or len(laws) == 1:
                apart[name] = measure.alone(name, slopes[name])
            measure.forget()
        error = math.sqrt(math.fsum(site.standard_error**2 for site in apart.values()))
        one_by_one = Setting(sites=apart, how=measure.how_alone(names), error=error) if apart else None
        together = one_by_one if one_by_one and len(laws) == 1 else measure.together(slopes)
    return GateGradientVariance(
        alone=one_by_one, together=together, slopes=slopes, laws={name: laws[name] for name in names}, batches=len(population)
    )


class _Measurement:
    """One call of gate_gradient_variance, the handover being set aside."""

    def __init__(
        self,
        handover: Handover,
        batches: list[Any],
        loss_fn: LossFn,
        laws: dict[str, Law],
        draws: int,
        most_outcomes: int,
        seed: int,
    ) -> None:
        self.handover, self.batches, self.loss_fn, self.laws = handover, batches, loss_fn, laws
        self.most_outcomes, self.seed = most_outcomes, seed
        self.blocks = min(BLOCKS, draws // 2)
        self.draws = draws // self.blocks * self.blocks
        self.means = {name: law.mean for name, law in laws.items()}
        self._known: dict[tuple[int, str, float], Tensor] = {}
        for seam in handover.seams.values():
            seam.configure(view=View.BLEND, hold=False)

    def slope(self, name: str) -> Slope:
        """Return the moments of a at one site."""
        at = self.laws[name].heard
        if at == 0.0:
            return NO_SLOPE
        over_data = Moments()
        for index in range(len(self.batches)):
            over_data.add(self._one(index, name, at) / at)
        mean_square = over_data.mean.square().sum().item()
        return Slope(variance=over_data.variance, mean_square=mean_square, square=over_data.variance + mean_square)

    def alone(self, name: str, slope: Slope) -> Variance:
        """Let the gate of one site move."""
        law = self.laws[name]
        known = self._is_known(law)

        def gradient(index: int, weights: Weights) -> Vectors:
            return {name: self._one(index, name, weights[name])}

        outcomes = [({name: weight}, chance) for weight, chance in law.outcomes] if known else None
        found = self._estimates([name], gradient, outcomes, integrated=not law.exact)
        return _variance(found[name], law.variance * slope.square)

    def together(self, slopes: dict[str, Slope]) -> Setting:
        """Let the gates of all sites move, independently."""
        finite = all(law.exact for law in self.laws.values())
        few = finite and math.prod(len(law.outcomes) for law in self.laws.values()) <= self.most_outcomes

        def gradient(index: int, weights: Weights) -> Vectors:
            return self._gradients(index, list(slopes), weights)

        found = self._estimates(list(slopes), gradient, list(_product(self.laws)) if few else None)
        return Setting(
            sites={name: _variance(one, self.laws[name].variance * slopes[name].square) for name, one in found.items()},
            how=EXACT if few else f"{self.draws} draws",
            error=standard_error(list(found.values())),
        )

    def how_alone(self, names: list[str]) -> str:
        """Say how the gates were moved one by one."""
        hows = {
            f"{self.draws} draws" if not self._is_known(law) else EXACT if law.exact else "quadrature"
            for law in (self.laws[name] for name in names)
        }
        return ", ".join(sorted(hows))

    def forget(self) -> None:
        """Let go of the gradients of a site that is done."""
        self._known.clear()

    def _is_known(self, law: Law) -> bool:
        return not law.drawn and len(law.outcomes) <= self.most_outcomes

    def _estimates(
        self,
        names: list[str],
        gradient: Callable[[int, Weights], Vectors],
        outcomes: list[tuple[dict[str, float], float]] | None,
        integrated: bool = False,
    ) -> dict[str, Estimate]:
        found = {name: Estimate() for name in names}
        for index in range(len(self.batches)):
            whole = {name: Moments() for name in names}
            if outcomes is not None:
                coarse = {name: Moments() for name in names}
                for node, (weights, chance) in enumerate(outcomes):
                    for name, vector in gradient(index, weights).items():
                        whole[name].add(vector, chance)
                        if integrated and node % 2 == 0:
                            coarse[name].add(vector, chance)
                for name in names:
                    found[name].enumerated(whole[name], coarse[name] if integrated else None)
                continue
            blocks = {name: [Moments() for _ in range(self.blocks)] for name in names}
            for draw in range(self.draws):
                for name, vector in gradient(index, self._drawn(index, draw)).items():
                    whole[name].add(vector)
                    blocks[name][draw % self.blocks].add(vector)
            for name in names:
                found[name].drawn(whole[name], blocks[name])
        return found

    def _drawn(self, index: int, draw: int) -> dict[str, float]:
        step = index * self.draws + draw
        return {name: law.draw(Noise(self.seed, step, f"measured/{name}")) for name, law in self.laws.items()}

    def _one(self, index: int, name: str, weight: float) -> Tensor:
        """Return the gradient at one site with the other gates at their means; the slope's is kept for an outcome like it."""
        key = index, name, weight
        found = self._known.get(key)
        if found is None:
            found = self._gradients(index, [name], {**self.means, name: weight})[name]
            if weight == self.laws[name].heard:
                self._known[key] = found
        return found

    def _gradients(self, index: int, names: list[str], weights: Weights) -> Vectors:
        """Return the gradients of students as vectors; one that is not heard has none, so nothing is computed for it."""
        seams = self.handover.seams
        for name, seam in seams.items():
            seam.set_weight(weights[name], weights[name])
        heard = [name for name in names if weights[name] > 0.0]
        parameters = {name: [p for p in seams[name].student.parameters() if p.requires_grad] for name in names}
        flat = [p for name in heard for p in parameters[name]]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            outputs = [self.loss_fn(self.handover.model, self.batches[index])] if flat else []
            taken = iter(gradients(self.handover.model, [x for x in outputs if x.requires_grad], flat))
        return {name: _vector(parameters[name], taken if name in heard else itertools.repeat(None)) for name in names}


def _variance(found: Estimate, predicted: float) -> Variance:
    return Variance(gate=found.gate, data=found.data, predicted=predicted, standard_error=standard_error([found]))


def _vector(parameters: list[nn.Parameter], gradients: Iterator[Tensor | None]) -> Tensor:
    """Join the gradients of parameters into one vector of double precision."""
    pieces = [
        torch.zeros(parameter.shape, dtype=torch.float64, device=parameter.device) if gradient is None else gradient.double()
        for parameter, gradient in zip(parameters, gradients, strict=False)
    ]
    return torch.cat([piece.reshape(-1) for piece in pieces]) if pieces else torch.zeros(0, dtype=torch.float64)


def _product(laws: dict[str, Law]) -> Iterator[tuple[dict[str, float], float]]:
    """Combine the outcomes of independent gates."""
    for combined in itertools.product(*(law.outcomes for law in laws.values())):
        weights = {name: weight for name, (weight, _) in zip(laws, combined, strict=True)}
        yield weights, math.prod(chance for _, chance in combined)

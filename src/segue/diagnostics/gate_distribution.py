"""What a diagnostic measures on: the distribution of each gate's weight, the selected sites, a fixed set of minibatches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from segue.border import Unit, checked
from segue.core.handover import Handover
from segue.core.step_state import gate_weight
from segue.errors import DataError, PlanError, SiteError, nearest
from segue.gates import Gate, Noise, Outcomes
from segue.sites import Site, name_matches
from segue.training.batches import mapped

DRAWS = 4096  # of the weight alone, for a gate that does not state its distribution
GROUPS = 64  # that the draws are reduced to


@dataclass(frozen=True)
class GateDistribution:
    """The distribution of the student's weight at one site."""

    gate: Gate
    alpha: float
    outcomes: Outcomes  # weights with their probabilities: all of them, the nodes of a quadrature, or draws
    exact: bool  # these are all of them
    drawn: bool = False  # the gate does not state its distribution

    @property
    def mean(self) -> float:
        return math.fsum(probability * weight for weight, probability in self.outcomes)

    @property
    def variance(self) -> float:
        mean = self.mean
        return math.fsum(probability * (weight - mean) ** 2 for weight, probability in self.outcomes)

    @property
    def mean_above_zero(self) -> float:
        """The mean of the weights above 0: 1 for a coin, the plain mean for a soft gate."""
        above = [(weight, probability) for weight, probability in self.outcomes if weight > 0]
        return math.fsum(w * p for w, p in above) / math.fsum(p for _, p in above) if above else 0.0

    def draw(self, noise: Noise) -> float:
        """Draw a weight."""
        return float(self.gate(self.alpha, noise))


@checked
def distribution_of(gate: Gate, alpha: Unit) -> GateDistribution:
    """Return the distribution that a gate states, or draw from a gate that states none.

    >>> from segue.gates import Bernoulli, GumbelSoftmax
    >>> distribution_of(Bernoulli(), 0.25).variance
    0.1875
    >>> round(distribution_of(GumbelSoftmax(), 0.9).mean, 3)  # not 0.1
    0.184

    Args:
        gate: A gate of `segue.gates`, or a function (alpha, noise) -> weight.
        alpha: The teacher's share.
    """
    for name in ("outcomes", "nodes"):
        if (stated := getattr(gate, name, None)) is not None:
            found: Outcomes = tuple((weight, probability) for weight, probability in stated(alpha) if probability != 0.0)
            _check(gate, name, alpha, found)
            return GateDistribution(gate, alpha, found, exact=name == "outcomes" or len(found) == 1)
    return GateDistribution(gate, alpha, _drawn(gate, alpha), exact=False, drawn=True)


def site_distributions(handover: Handover, alpha: float | None, gate: Gate | None = None) -> dict[str, GateDistribution]:
    """Return the distribution at every site, at one alpha or (None) at the present ones, for the plan's gate or another."""
    alphas = handover.alphas if alpha is None else dict.fromkeys(handover.seams, float(alpha))
    return {name: distribution_of(gate or handover.plan.gate, at) for name, at in alphas.items()}


def select_sites(handover: Handover, patterns: str | Sequence[str] | None) -> list[str]:
    """Return the names of a handover's sites that match a pattern, or one of several; all of them without a pattern."""
    if patterns is None:
        return list(handover.seams)
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    if not wanted:
        found = f"The handover has {len(handover.seams)} sites."
        raise SiteError("the list of sites is empty.", found, "name at least one pattern, or leave it out.")
    for pattern in wanted:
        if not any(name_matches(pattern, name) for name in handover.seams):
            raise SiteError(
                f"{pattern!r} matches none of the {len(handover.seams)} sites of the handover.",
                nearest(pattern, list(handover.seams)),
                "name sites of the running handover.",
            )
    return [name for name in handover.seams if any(name_matches(pattern, name) for pattern in wanted)]


def fixed_batches(batches: Iterable[Any], handover: Handover) -> list[Any]:
    """Read the minibatches once, onto the model's device."""
    device = next(iter(handover.seams.values())).student_weight.device
    found = [mapped(lambda tensor: tensor.to(device), batch) for batch in batches]
    if not found:
        raise DataError("a diagnostic needs minibatches.", "`batches` is empty.", "give a list of at least two.")
    return found


def _check(gate: Gate, name: str, alpha: float, found: Outcomes) -> None:
    total = math.fsum(probability for _, probability in found)
    if abs(total - 1.0) > 1e-6 or any(p < 0.0 or not 0.0 <= weight <= 1.0 for weight, p in found):
        raise PlanError(
            f"{type(gate).__name__}.{name}({alpha}) is not a distribution.",
            f"It returns {found!r}, whose probabilities add up to {total:.4g}.",
            "return pairs (weight, probability), weights from 0 to 1, probabilities that add up to 1.",
        )


def _drawn(gate: Gate, alpha: float) -> Outcomes:
    """Draw weights and reduce them: to the distinct values if these are few, else to the means of equal groups."""
    weights = sorted(gate_weight(gate, alpha, Noise(0, draw, "its law"), Site("any")) for draw in range(DRAWS))
    if len(counts := Counter(weights)) <= GROUPS:
        return tuple((weight, count / DRAWS) for weight, count in counts.items())
    size = DRAWS // GROUPS
    return tuple((math.fsum(weights[i : i + size]) / size, 1.0 / GROUPS) for i in range(0, DRAWS, size))

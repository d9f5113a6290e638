"""Chance: the law of a gate's weight at one alpha, known or drawn."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from segue.errors import PlanError
from segue.gates import Gate, Noise, Outcomes

DRAWS = 4096  # of the weight alone, where a gate does not say its law
GROUPS = 64  # to which they are summed up


@dataclass(frozen=True)
class Law:
    """The distribution of the student's weight at one site."""

    gate: Gate
    alpha: float
    outcomes: Outcomes  # the weights with their probabilities: all, or nodes of a quadrature, or draws
    exact: bool  # these are all of them
    drawn: bool = False  # the gate does not say its law

    @property
    def mean(self) -> float:
        return math.fsum(chance * weight for weight, chance in self.outcomes)

    @property
    def variance(self) -> float:
        mean = self.mean
        return math.fsum(chance * (weight - mean) ** 2 for weight, chance in self.outcomes)

    @property
    def heard(self) -> float:
        """The mean weight where the student is heard at all: 1 for a coin, the plain mean for a soft gate."""
        heard = [(weight, chance) for weight, chance in self.outcomes if weight > 0]
        return math.fsum(w * c for w, c in heard) / math.fsum(c for _, c in heard) if heard else 0.0

    def draw(self, noise: Noise) -> float:
        """Draw a weight."""
        return float(self.gate(self.alpha, noise))


def law_of(gate: Gate, alpha: float) -> Law:
    """Ask a gate for its law, or draw from it where it has none to tell.

    >>> from segue.gates import Bernoulli, GumbelSoftmax
    >>> law_of(Bernoulli(), 0.25).variance
    0.1875
    >>> round(law_of(GumbelSoftmax(), 0.9).mean, 3)  # not 0.1
    0.184
    """
    if not 0.0 <= alpha <= 1.0:
        raise PlanError(
            f"the gate's law was asked for at alpha={alpha!r}.", "alpha is the teacher's share.", "give a number from 0 to 1."
        )
    for name in ("outcomes", "nodes"):
        if (tell := getattr(gate, name, None)) is not None:
            found: Outcomes = tuple((weight, chance) for weight, chance in tell(alpha) if chance != 0.0)
            _refuse_no_law(gate, name, alpha, found)
            return Law(gate, alpha, found, exact=name == "outcomes" or len(found) == 1)
    return Law(gate, alpha, _drawn(gate, alpha), exact=False, drawn=True)


def _refuse_no_law(gate: Gate, name: str, alpha: float, found: Outcomes) -> None:
    whole = math.fsum(chance for _, chance in found)
    if abs(whole - 1.0) > 1e-6 or any(chance < 0.0 or not 0.0 <= weight <= 1.0 for weight, chance in found):
        raise PlanError(
            f"the gate's law was asked for: {type(gate).__name__}.{name}({alpha}).",
            f"It returned {found!r}, whose probabilities add up to {whole:.4g}.",
            "return pairs (weight, probability), weights from 0 to 1, probabilities that add up to 1.",
        )


def _drawn(gate: Gate, alpha: float) -> Outcomes:
    """Draw weights and sum them up: as they are where they repeat, else by the means of equal groups."""
    weights = sorted(float(gate(alpha, Noise(0, draw, "its law"))) for draw in range(DRAWS))
    if len(counts := Counter(weights)) <= GROUPS:
        return tuple((weight, count / DRAWS) for weight, count in counts.items())
    size = DRAWS // GROUPS
    return tuple((math.fsum(weights[i : i + size]) / size, 1.0 / GROUPS) for i in range(0, DRAWS, size))

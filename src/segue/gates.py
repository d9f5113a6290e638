"""Gates: from alpha, the teacher's share, to the student's weight for one step.

A gate is any function (alpha, noise) -> weight in [0, 1]. `noise=None` asks for the mean, which `eval()` uses. A gate whose
distribution is known may also have `outcomes(alpha)`, all of its weights with their probabilities, or, if the distribution is
continuous, `nodes(alpha)`, a quadrature of the same form: the diagnostics then compute what they would otherwise estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TypeAlias

from segue.errors import PlanError

__all__ = ["Bernoulli", "Blend", "Gate", "GumbelSoftmax", "Noise", "Outcomes"]


@dataclass(frozen=True)
class Noise:
    """Random numbers from a counter: the same on every rank, after a resume, and in a recomputed forward."""

    seed: int
    step: int
    site: str

    def uniform(self, draw: int = 0) -> float:
        """Return the draw-th number of this step and site, strictly between 0 and 1."""
        key = f"{self.seed}/{self.step}/{draw}/{self.site}".encode()
        bits = int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 11
        return (bits + 0.5) * 2.0**-53


Gate: TypeAlias = Callable[[float, "Noise | None"], float]  # (alpha, noise) -> the student's weight; None asks for its mean
Outcomes: TypeAlias = tuple[tuple[float, float], ...]  # (weight, probability)


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Give the student the deterministic weight 1 - alpha: the gate of DCR."""

    def __call__(self, alpha: float, noise: Noise | None) -> float:
        return 1.0 - alpha

    def outcomes(self, alpha: float) -> Outcomes:
        """Return its one weight."""
        return ((1.0 - alpha, 1.0),)


@dataclass(frozen=True, kw_only=True)
class Bernoulli:
    """Let a coin choose the student with probability 1 - alpha: the gate of BERT-of-Theseus."""

    def __call__(self, alpha: float, noise: Noise | None) -> float:
        p = 1.0 - alpha
        if noise is None:
            return p
        return 1.0 if noise.uniform() < p else 0.0

    def outcomes(self, alpha: float) -> Outcomes:
        """Return teacher and student with their probabilities, without those of probability 0."""
        return tuple((weight, p) for weight, p in ((0.0, alpha), (1.0, 1.0 - alpha)) if p > 0.0)


@dataclass(frozen=True, kw_only=True)
class GumbelSoftmax:
    """Draw a soft coin: the student's entry of a two-class Gumbel-softmax on p = 1 - alpha.

    The difference of two Gumbel variables is logistic, so one uniform number u is enough:
    r = sigmoid((logit p + logit u) / temperature). Its mean is not p (0.184 for p = 0.1 at temperature 1).
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise PlanError(
                f"GumbelSoftmax(temperature=...) must be positive and finite, got {self.temperature}.",
                "The logits are divided by it.",
                "the paper uses 1.0.",
            )

    def __call__(self, alpha: float, noise: Noise | None) -> float:
        p = 1.0 - alpha
        if p in (0.0, 1.0):
            return p
        if noise is None:
            return _gumbel_mean(self, p)
        return self._at(p, _logit(noise.uniform()))

    def nodes(self, alpha: float) -> Outcomes:
        """Return a quadrature over the noise: the trapezoid rule, which converges exponentially here."""
        p = 1.0 - alpha
        if p in (0.0, 1.0):
            return ((p, 1.0),)
        return tuple((self._at(p, x), mass) for x, mass in _logistic(0.75 * min(1.0, self.temperature)))

    def _at(self, p: float, logistic: float) -> float:
        return _sigmoid((_logit(p) + logistic) / self.temperature)


def _logit(p: float) -> float:
    return math.log(p) - math.log1p(-p)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _logistic(step: float, reach: float = 20.0) -> tuple[tuple[float, float], ...]:
    """Return points on the line with the logistic distribution's probability at them; less than 1e-8 is beyond the reach."""
    points = [k * step for k in range(-math.ceil(reach / step), math.ceil(reach / step) + 1)]
    density = [_sigmoid(x) * _sigmoid(-x) for x in points]
    total = math.fsum(density)
    return tuple((x, one / total) for x, one in zip(points, density, strict=True))


@lru_cache(maxsize=4096)
def _gumbel_mean(gate: GumbelSoftmax, p: float) -> float:
    """Integrate with a finer rule than the diagnostics need: this mean is what evaluation uses."""
    return min(1.0, math.fsum(mass * gate._at(p, x) for x, mass in _logistic(0.2 * min(1.0, gate.temperature), 38.0)))

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
from typing import Annotated, TypeAlias

from segue.border import PositiveFloat, Rule, checked

STEP = 0.75  # of the trapezoid rule over a logistic variable; its error is below exp(-26)

__all__ = ["Bernoulli", "Blend", "Gate", "GumbelSoftmax", "Noise", "Outcomes"]


def __dir__() -> list[str]:
    return sorted(__all__)


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
        return min((bits + 0.5) * 2.0**-53, 1.0 - 2.0**-53)  # the largest bits + 0.5 rounds to 2**53


# (alpha, noise) -> the student's weight; None asks for its mean
Gate: TypeAlias = Annotated[
    Callable[[float, Noise | None], float],
    Rule("a function (alpha, noise) -> weight", hint="give segue.gates.Blend(), another gate, or a function of your own."),
]
Outcomes: TypeAlias = tuple[tuple[float, float], ...]  # (weight, probability)


@checked
@dataclass(frozen=True, kw_only=True)
class Blend:
    """Give the student the deterministic weight 1 - alpha: the gate of DCR."""

    def __call__(self, alpha: float, noise: Noise | None) -> float:
        return 1.0 - alpha

    def outcomes(self, alpha: float) -> Outcomes:
        """Return its one weight."""
        return ((1.0 - alpha, 1.0),)


@checked
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


@checked
@dataclass(frozen=True, kw_only=True)
class GumbelSoftmax:
    """Draw a soft coin: the student's entry of a two-class Gumbel-softmax on p = 1 - alpha.

    The difference of two Gumbel variables is logistic, so one uniform number u is enough:
    r = sigmoid((logit p + logit u) / temperature). Its mean is not p (0.184 for p = 0.1 at temperature 1).

    >>> 0 < GumbelSoftmax()(0.5, Noise(seed=0, step=1, site="blocks.0")) < 1
    True

    Args:
        temperature: The logits are divided by it: a smaller one is nearer to a coin.
    """

    temperature: PositiveFloat = 1.0

    def __call__(self, alpha: float, noise: Noise | None) -> float:
        p = 1.0 - alpha
        if p in (0.0, 1.0):
            return p
        if noise is None:
            return _gumbel_mean(self, p)
        return self._at(p, _logit(noise.uniform()))

    def nodes(self, alpha: float) -> Outcomes:
        """Return a quadrature over the noise, of 55 or 57 nodes: the trapezoid rule, which converges exponentially here.

        Below temperature 1 the weight's own logit is the variable. Beyond +-20 the weight is 0 or 1 to 2e-9: these ends have
        the probability and the mean that are left, and are listed twice, so that every second node is a quadrature too.
        """
        p = 1.0 - alpha
        if p in (0.0, 1.0):
            return ((p, 1.0),)
        if self.temperature >= 1.0:
            return tuple((self._at(p, x), mass) for x, mass in _logistic(STEP))
        logits = [STEP * k for k in range(-26, 27)]
        inner = [(_sigmoid(y), STEP * self.temperature * _density(self.temperature * y - _logit(p))) for y in logits]
        student = max(0.0, _gumbel_mean(self, p) - math.fsum(weight * mass for weight, mass in inner))
        teacher = max(0.0, 1.0 - student - math.fsum(mass for _, mass in inner))
        low, high = (_sigmoid(-40.0), teacher / 2), (_sigmoid(40.0), student / 2)
        return (low, low, *inner, high, high)

    def _at(self, p: float, logistic: float) -> float:
        return _sigmoid((_logit(p) + logistic) / self.temperature)


def _logit(p: float) -> float:
    return math.log(p) - math.log1p(-p)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _density(x: float) -> float:
    return _sigmoid(x) * _sigmoid(-x)


@lru_cache
def _logistic(step: float, reach: float = 20.0) -> tuple[tuple[float, float], ...]:
    """Return points on the line with the logistic distribution's probability at them; less than 1e-8 is beyond the reach."""
    points = [k * step for k in range(-math.ceil(reach / step), math.ceil(reach / step) + 1)]
    density = [_density(x) for x in points]
    total = math.fsum(density)
    return tuple((x, one / total) for x, one in zip(points, density, strict=True))


@lru_cache(maxsize=4096)
def _gumbel_mean(gate: GumbelSoftmax, p: float) -> float:
    """Integrate with a finer rule than the diagnostics need, of 381 points at every temperature: evaluation uses this mean.

    With a = logit p and logistic X and Y, E sigmoid((a + X) / t) = P(X + t Y < a) = E sigmoid(a + t X). Above temperature 1 the
    first form is the smooth one, below it the last. Both are analytic for |Im X| < pi, so the rule's error is below exp(-90),
    and what is beyond the reach is below exp(-37).
    """
    t, points = gate.temperature, _logistic(0.2, 38.0)
    values = (gate._at(p, x) if t >= 1.0 else _sigmoid(_logit(p) + t * x) for x, _ in points)
    return min(1.0, math.fsum(mass * value for value, (_, mass) in zip(values, points, strict=True)))

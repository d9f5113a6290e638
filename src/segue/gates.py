"""Gates: from the teacher's share to the student's weight for one step.

A gate is any function (alpha, noise) -> weight in [0, 1]. `noise=None` asks for the mean, which is what `eval()` uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TypeAlias

from segue.errors import PlanError


@dataclass(frozen=True)
class Noise:
    """Random numbers from a counter: the same on every rank, after a resume, and when a forward is recomputed."""

    seed: int
    step: int
    site: str

    def uniform(self, draw: int = 0) -> float:
        """Return the draw-th number of this step and site, strictly between 0 and 1."""
        key = f"{self.seed}/{self.step}/{draw}/{self.site}".encode()
        bits = int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 11
        return (bits + 0.5) * 2.0**-53


Gate: TypeAlias = Callable[[float, "Noise | None"], float]


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Give the student the deterministic share 1 - alpha: the gate of DCR."""

    def __call__(self, alpha: float, noise: Noise | None) -> float:
        return 1.0 - alpha


@dataclass(frozen=True, kw_only=True)
class Bernoulli:
    """Let a coin choose the student with probability 1 - alpha: the gate of BERT-of-Theseus."""

    def __call__(self, alpha: float, noise: Noise | None) -> float:
        p = 1.0 - alpha
        if noise is None:
            return p
        return 1.0 if noise.uniform() < p else 0.0


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
                f"GumbelSoftmax(temperature={self.temperature}) was asked for.",
                "A temperature divides, so it must be positive and finite.",
                "the paper uses 1.0.",
            )

    def __call__(self, alpha: float, noise: Noise | None) -> float:
        p = 1.0 - alpha
        if p in (0.0, 1.0):
            return p
        if noise is None:
            return _gumbel_mean(p, self.temperature)
        return _sigmoid((_logit(p) + _logit(noise.uniform())) / self.temperature)


def _logit(p: float) -> float:
    return math.log(p) - math.log1p(-p)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


@lru_cache(maxsize=4096)
def _gumbel_mean(p: float, temperature: float) -> float:
    """Integrate over the logistic noise by the trapezoid rule, which converges exponentially here."""
    step = 0.2 * min(1.0, temperature)
    count = math.ceil(38.0 / step)
    centre = _logit(p)
    total = 0.0
    for k in range(-count, count + 1):
        x = k * step
        density = _sigmoid(x) * _sigmoid(-x)
        total += density * _sigmoid((centre + x) / temperature)
    return min(1.0, total * step)

"""Raised alphas: what teachers get back for some steps, as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

MOST_STEPS = 10**12


@dataclass(frozen=True)
class Raised:
    """The alpha that a site has at least at one step, and from which it falls back to its schedule until another."""

    alpha: float
    since: int
    until: int

    def at(self, step: int, alpha: float) -> float:
        """Return the alpha of a step at which the schedule says `alpha`.

        >>> [Raised(0.5, since=10, until=20).at(step, 0.0) for step in (10, 15, 20, 99)]
        [0.5, 0.25, 0.0, 0.0]
        """
        left = min(1.0, max(0.0, (self.until - step) / (self.until - self.since)))
        return alpha + max(0.0, self.alpha - alpha) * left

    def to_list(self) -> list[Any]:
        """Describe it as plain data."""
        return [self.alpha, self.since, self.until]

    @classmethod
    def from_list(cls, data: Any) -> Raised:
        """Rebuild what a file holds, and refuse what cannot be right."""
        alpha, since, until = data
        steps = type(since) is int and type(until) is int and 0 <= since < until <= MOST_STEPS
        if not (steps and type(alpha) is float and math.isfinite(alpha) and 0.0 <= alpha <= 1.0):
            raise ValueError(f"alpha is raised to {alpha!r:.20} from step {since!r:.20} to {until!r:.20}")
        return cls(alpha, since, until)

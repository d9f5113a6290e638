"""Raised alphas: what teachers get back for some steps, as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from segue.errors import HandoverError, nearest

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


def raised_at(
    step: int, alphas: Mapping[str, float], before: Mapping[str, Raised], over: int, sites: list[str]
) -> dict[str, Raised]:
    """Raise alpha at some sites from a step on, to at least what it is raised to already; no steps left change nothing."""
    for name in alphas:
        if name not in sites:
            raise HandoverError(f"there is no site {name!r}.", nearest(name, sites), "give the name of a site.")
    if over <= 0:
        return {}
    already = {name: before[name].at(step, 0.0) if name in before else 0.0 for name in alphas}
    return {name: Raised(float(max(alpha, already[name])), step, step + over) for name, alpha in alphas.items()}

"""The step state: what one step of a plan means at every site, as plain numbers.

schedule(progress, site) -> alpha -> gate(alpha, noise) -> weight
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from types import MappingProxyType
from typing import Any

from segue.core.raised import Raised
from segue.errors import PlanError
from segue.gates import Gate, Noise
from segue.phases import adaptive_of, alpha_of, distill_of, guidance_of, holds
from segue.plan import Plan
from segue.sites import Site

CLOSING_GROUPS = 2  # takeovers in compiled code: with evaluation and guidance that stays below torch's limit of 8 graphs
LOOK_AHEAD = 10_000  # at most this many later steps are asked whether they need a teacher


@dataclass(frozen=True)
class SiteState:
    """One site at one step."""

    alpha: float  # the teacher's share
    weight: float  # the student's, drawn by the gate
    mean: float  # the mean of that draw, for evaluation
    guidance: float  # lambda
    hold: bool

    @property
    def closed(self) -> bool:
        """The student has taken over."""
        return self.alpha == 0.0 and self.weight == 1.0 and self.mean == 1.0

    @property
    def needs_teacher(self) -> bool:
        return not self.closed or self.guidance > 0


@dataclass(frozen=True)
class StepState:
    """All sites at one step, by name, and the strength of the distillation."""

    sites: dict[str, SiteState]
    distill: float


NOTHING: Mapping[str, Any] = MappingProxyType({})


def step_state(
    plan: Plan,
    sites: list[Site],
    step: int,
    total: int | None,
    adapted: Mapping[str, float] = NOTHING,
    raised: Mapping[str, Raised] = NOTHING,
) -> StepState:
    """Ask schedule, gate and losses about a step; change nothing, and refuse values that make no sense.

    `adapted` has the alphas that a closed loop has reached, by site; without them an adaptive schedule takes its slowest way.
    `raised` has the sites whose alpha a guard has raised for a while, at most until the run ends.
    """
    progress = progress_at(step, total)
    raised = raised if progress < 1 else NOTHING
    states = {site.name: _at(plan, site, step, progress, adapted, raised.get(site.name)) for site in sites}
    return StepState(states, distill_of(plan, progress, sites[0]))


def progress_at(step: int, total: int | None) -> float:
    """Return the fraction of the run that is done; 0 while its length is not known, 1 past its end."""
    return 0.0 if total is None else min(1.0, step / total)


def checked_total(total: int) -> int:
    """Refuse a run without a positive number of steps."""
    if isinstance(total, bool) or not isinstance(total, Integral) or total < 1:
        raise PlanError(
            f"total_steps must be a positive integer, got {total!r}.",
            "It is the number of optimizer steps of the run.",
            "count them: epochs * len(loader) // accumulation.",
        )
    return int(total)  # also of a number of NumPy


def closed_in_graphs(closed: set[str], before: set[str], sites: int) -> set[str]:
    """Return the sites whose teachers compiled code leaves out: they close in few groups, because each is a recompile.

    >>> closed_in_graphs({"a"}, set(), sites=4), sorted(closed_in_graphs({"a", "b"}, set(), sites=4))
    (set(), ['a', 'b'])
    """
    seen = before & closed
    full_group = len(closed) - len(seen) >= math.ceil(sites / CLOSING_GROUPS)
    return closed if full_group or len(closed) == sites else seen


def closed_for_good(plan: Plan, site: Site, step: int, total: int, adapted: Mapping[str, float] = NOTHING) -> bool:
    """Return whether no later step needs the teacher of a site; what a closed loop has brought to 0 stays there."""
    if hasattr(plan.schedule, "observe") and step < total:
        return False  # a user's schedule that adapts cannot be asked about the future
    return not any(_at(plan, site, later, progress_at(later, total), adapted).needs_teacher for later in _ahead(step, total))


def _ahead(step: int, total: int) -> Iterator[int]:
    stride = max(1, (total - step) // LOOK_AHEAD)
    yield from range(step, total, stride)
    yield total


def _at(
    plan: Plan, site: Site, step: int, progress: float, adapted: Mapping[str, float], raised: Raised | None = None
) -> SiteState:
    alpha = alpha_of(plan, progress, site)
    if adaptive_of(plan, progress, site) is not None:
        alpha = min(alpha, adapted.get(site.name, 1.0))
    alpha = alpha if raised is None else raised.at(step, alpha)
    return SiteState(
        alpha=alpha,
        weight=gate_weight(plan.gate, alpha, Noise(plan.seed, step, site.name), site),
        mean=gate_weight(plan.gate, alpha, None, site),
        guidance=guidance_of(plan, progress, site, alpha),
        hold=alpha == 1.0 and holds(plan, progress, site),
    )


def gate_weight(gate: Gate, alpha: float, noise: Noise | None, site: Site) -> float:
    """Return the student's weight that a gate gives, and refuse what is not a number from 0 to 1."""
    weight = gate(alpha, noise)
    if not (isinstance(weight, int | float) and 0.0 <= weight <= 1.0):
        raise PlanError(
            f"the gate must return a number from 0 to 1, got {weight!r}.",
            f"It was called with alpha {alpha:.4g} for site {site.name!r}.",
            "return the student's weight: 0 is the teacher alone, 1 the student alone.",
        )
    return float(weight)

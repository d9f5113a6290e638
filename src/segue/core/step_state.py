"""The moment: what one step of a plan looks like at every site, as plain numbers.

schedule(progress, site) -> alpha -> gate(alpha, noise) -> weight
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from segue.errors import PlanError
from segue.gates import Noise
from segue.losses import strength
from segue.plan import Plan
from segue.schedules import is_hold, share
from segue.sites import Site

LOOK_AHEAD = 10_000  # at most so many steps are asked whether a teacher will be needed again


@dataclass(frozen=True)
class SiteMoment:
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
class Moment:
    """All sites at one step, by name, and the strength of the distillation."""

    sites: dict[str, SiteMoment]
    distill: float


def moment(plan: Plan, sites: list[Site], step: int, total: int | None) -> Moment:
    """Ask schedule, gate and losses what a step looks like; changes nothing and refuses what makes no sense."""
    progress = progress_at(step, total)
    distill = 0.0 if plan.distill is None else strength(plan.distill, progress, sites[0])
    return Moment({site.name: _at(plan, site, step, progress) for site in sites}, distill)


def progress_at(step: int, total: int | None) -> float:
    """Return the share of the run that is done; 0 while its length is not known, 1 past its end."""
    return 0.0 if total is None else min(1.0, step / total)


def closed_for_good(plan: Plan, site: Site, step: int, total: int) -> bool:
    """Tell whether no later step needs the teacher of a site."""
    if hasattr(plan.schedule, "observe") and step < total:
        return False  # a schedule that adapts cannot be asked about the future
    return not any(_at(plan, site, later, progress_at(later, total)).needs_teacher for later in _ahead(step, total))


def _ahead(step: int, total: int) -> Iterator[int]:
    stride = max(1, (total - step) // LOOK_AHEAD)
    yield from range(step, total, stride)
    yield total


def _at(plan: Plan, site: Site, step: int, progress: float) -> SiteMoment:
    alpha = share(plan.schedule, progress, site)
    return SiteMoment(
        alpha=alpha,
        weight=_weight(plan, alpha, Noise(plan.seed, step, site.name), site),
        mean=_weight(plan, alpha, None, site),
        guidance=0.0 if plan.guidance is None else strength(plan.guidance, progress, site),
        hold=alpha == 1.0 and is_hold(plan.schedule, progress, site),
    )


def _weight(plan: Plan, alpha: float, noise: Noise | None, site: Site) -> float:
    weight = plan.gate(alpha, noise)
    if not (isinstance(weight, int | float) and 0.0 <= weight <= 1.0):
        raise PlanError(
            f"the gate was asked for the student's weight at site {site.name!r}, alpha {alpha:.4g}.",
            f"It returned {weight!r}.",
            "return a number from 0 to 1.",
        )
    return float(weight)

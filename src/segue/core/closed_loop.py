"""The closed loop: what `schedules.Adaptive` has measured at every site, and how alpha follows from it.

`advance` is a pure function of the settings, the state of a site and one reading. All of the state is plain numbers on the
host, equal in all processes, because readings are averaged over them.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segue.core.step_state import progress_at
from segue.errors import PlanError
from segue.losses import weight_of
from segue.phases import adaptive_of, adapts, alpha_of
from segue.plan import Plan
from segue.schedules import Adaptive, is_adaptive
from segue.sites import Site

LEAST = 0.05  # alpha: a smaller one is not worth the forward of a teacher
LOSSES = ("guidance", "distill")
RISING = 1.1  # times the running mean of the error: noise of a batch is mostly below


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was measured at a site in one step; None where nothing was."""

    error: float | None = None  # squared error of the student, relative to its teacher's output
    divergence: float | None = None  # of the model's logits from the original's


@dataclass(frozen=True, kw_only=True)
class SiteLoop:
    """Where a site stands, and the running means that decide where it goes."""

    alpha: float = 1.0
    pace: float = 1.0  # in fractions of the fastest one
    progress: float = 0.0  # of its schedule, at the latest reading
    error: float | None = None
    divergence: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            most = math.inf if name in ("error", "divergence") else 1.0
            unknown = value is None and most == math.inf
            if not unknown and not (type(value) is float and 0.0 <= value <= most and value < math.inf):
                raise ValueError(f"{name} of an adaptive schedule is {value!r:.40}")


def advance(adaptive: Adaptive, loop: SiteLoop, reading: Reading, progress: float, latest: float) -> SiteLoop:
    """Return where a site goes after a reading at this progress; `latest` is the most that alpha may be.

    >>> waits = advance(Adaptive(budget=0.1), SiteLoop(alpha=0.5), Reading(error=1.0), progress=0.01, latest=1.0)
    >>> falls = advance(Adaptive(budget=0.1), SiteLoop(alpha=0.5), Reading(error=0.01), progress=0.01, latest=1.0)
    >>> waits.alpha, round(falls.alpha, 3)
    (0.5, 0.3)
    """
    moved = max(0.0, progress - loop.progress)  # below 0 where the run was lengthened
    error = _mean(adaptive, loop.error, reading.error, moved)
    divergence = _mean(adaptive, loop.divergence, reading.divergence, moved)
    worst = math.sqrt(_worse(error, reading.error))
    off = max((1.0 - loop.alpha) * worst / adaptive.budget, _worse(divergence, reading.divergence) / adaptive.divergence)
    jump = max(_ratio(reading.error, loop.error), _ratio(reading.divergence, loop.divergence))
    alpha, pace = loop.alpha, loop.pace
    if alpha > 0.0 and off > 1.0 and jump > adaptive.spike:
        alpha, pace = alpha + adaptive.back, pace / 2
    elif off <= 1.0 and error is not None and (worst <= adaptive.budget or _ratio(reading.error, loop.error) <= RISING):
        allowed = max(0.0, 1.0 - adaptive.budget / worst) if worst > 0 else 0.0
        alpha = min(alpha, max(allowed, alpha - pace * moved / adaptive.fastest))
        pace = min(1.0, pace * (1.0 + moved / adaptive.fastest))
    alpha = min(alpha, latest) if alpha > LEAST else 0.0
    return SiteLoop(alpha=alpha, pace=pace, progress=progress, error=error, divergence=divergence)


def _mean(adaptive: Adaptive, mean: float | None, value: float | None, moved: float) -> float | None:
    """Move a running mean towards a value, by how much progress there was; a value that is not finite is left out."""
    if value is None or not math.isfinite(value):
        return mean
    return value if mean is None else mean + (value - mean) * moved / (moved + adaptive.memory)


def _worse(mean: float | None, value: float | None) -> float:
    return max(0.0 if known is None else math.inf if math.isnan(known) else known for known in (mean, value))


def _ratio(value: float | None, mean: float | None) -> float:
    """Return how many times its running mean a value is, in the size of the deviation, not its square."""
    if value is None or mean is None:
        return 0.0
    if not math.isfinite(value):
        return math.inf
    return math.sqrt(value / mean) if mean > 0 else math.inf if value > 0 else 1.0


class ClosedLoop:
    """The sites of a running handover whose schedule is adaptive, by name."""

    def __init__(self, plan: Plan, sites: Sequence[Site]) -> None:
        self._plan = plan
        self._sites = sites
        self.sites = {site.name: SiteLoop() for site in sites} if adapts(plan) else {}

    @property
    def alphas(self) -> dict[str, float]:
        """The least alpha that each site has reached, with what it has taken back."""
        return {name: loop.alpha for name, loop in self.sites.items()}

    def due(self, step: int, total: int | None) -> list[str]:
        """Name the sites that are read after this step: nothing is measured where alpha has reached 0."""
        return [
            site.name
            for site in self._sites
            if self.sites
            and self.sites[site.name].alpha > 0
            and (found := adaptive_of(self._plan, progress_at(step, total), site))
            and (step + 1) % found[0].every == 0
        ]

    def after(self, step: int, total: int | None, readings: Mapping[str, Reading]) -> ClosedLoop:
        """Return the loop at a step, given what was read in the step before it."""
        later = copy.copy(self)
        later.sites = {site.name: self._at(site, step, total, readings.get(site.name)) for site in self._sites if self.sites}
        return later

    def _at(self, site: Site, step: int, total: int | None, reading: Reading | None) -> SiteLoop:
        loop, run = self.sites[site.name], progress_at(step, total)
        found = adaptive_of(self._plan, run, site)
        if found is None:
            return dataclasses.replace(loop, alpha=alpha_of(self._plan, run, site))  # where an adaptive phase will start
        adaptive, progress = found
        latest = adaptive(progress, site)
        if reading is not None:
            return advance(adaptive, loop, reading, progress, latest)
        return dataclasses.replace(loop, alpha=min(loop.alpha, latest))  # at once: 0 stays 0 in a run that is lengthened later

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {name: dict(vars(loop)) for name, loop in self.sites.items()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue where an earlier process stopped; what no run can have written is refused."""
        if not isinstance(state, dict) or set(state) != set(self.sites):
            raise ValueError(f"the state of an adaptive schedule is {state!r:.40}")
        fields = {field.name for field in dataclasses.fields(SiteLoop)}
        for name, loop in state.items():
            if not isinstance(loop, dict) or set(loop) != fields:
                raise ValueError(f"the state of an adaptive schedule at {name!r} is {loop!r:.40}")
        self.sites = {name: SiteLoop(**state[name]) for name in self.sites}


def refuse_without_signal(plan: Plan) -> None:
    """Refuse an adaptive schedule that could never measure anything, and one of what is not alpha."""
    strengths = {f"Phase({phase.name!r}, {part}=...)": getattr(phase, part) for phase in plan.phases for part in LOSSES}
    strengths |= {part: getattr(getattr(plan, part), "schedule", None) for part in LOSSES}
    for place, schedule in strengths.items():
        if is_adaptive(schedule):
            raise PlanError(
                f"Adaptive cannot be the schedule of {place}.",
                "It decides alpha, by the error at each site; a loss has a weight.",
                "give the loss another schedule. Nothing was changed.",
            )
    if not adapts(plan):
        return
    silent = [phase.name for phase in plan.phases if is_adaptive(phase.schedule) and phase.guidance == 0]
    if plan.guidance is None or weight_of(plan.guidance) == 0 or silent:
        where = f"That of the phase {silent[0]!r} is 0." if silent else "The plan has none, or one with the weight 0."
        raise PlanError(
            "Adaptive needs guidance.",
            f"{where} Its signal is the error of the outputs that a guidance compares.",
            "add guidance=segue.losses.FeatureGuidance() to the plan. Nothing was changed.",
        )

"""Schedules: from progress to alpha, the teacher's share.

A schedule is any pure function (progress in [0, 1], site) -> alpha in [0, 1]; a resumed run therefore needs no schedule
state. `Adaptive` is such a function too, its slowest course; what a run measures lets it fall faster, and that state lives in
the handover. A schedule of your own that adapts may also have `observe(progress, similarity)`, `state_dict()` and
`load_state_dict(state)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from segue.border import Fraction, PositiveFloat, PositiveInt, Rule, Unit, checked
from segue.errors import PlanError, nearest
from segue.sites import Site, name_matches

__all__ = [
    "Adaptive",
    "Constant",
    "Cosine",
    "Hold",
    "Linear",
    "PerSite",
    "Piecewise",
    "Schedule",
    "Staggered",
    "aggr20",
    "alpha_at",
    "is_hold",
    "mean_of",
]


def __dir__() -> list[str]:
    return sorted(__all__)


# (progress, where) -> alpha, the teacher's share
Schedule: TypeAlias = Annotated[
    Callable[[float, Site], float],
    Rule(
        "a function (progress, site) -> alpha",
        hint="give segue.schedules.aggr20(), another schedule, or a function of your own.",
    ),
]


@checked
@dataclass(frozen=True, kw_only=True)
class Constant:
    """Keep alpha where it is.

    >>> Constant(alpha=0.5)(0.9, Site("blocks.0"))
    0.5

    Args:
        alpha: The teacher's share, all along.
    """

    alpha: Unit = 0.0

    def __call__(self, progress: float, site: Site) -> float:
        return self.alpha


@dataclass(frozen=True, kw_only=True)
class _Ramp:
    start: Unit = 1.0
    end: Unit = 0.0
    until: Fraction = 1.0


@checked
@dataclass(frozen=True, kw_only=True)
class Linear(_Ramp):
    """Go from `start` to `end` in a straight line until the given progress, then stay.

    >>> Linear(until=0.5)(0.25, Site("blocks.0"))
    0.5

    Args:
        start: The first alpha.
        end: The last alpha.
        until: The progress at which the last is reached.
    """

    def __call__(self, progress: float, site: Site) -> float:
        return _between(self.start, self.end, progress / self.until)


@checked
@dataclass(frozen=True, kw_only=True)
class Cosine(_Ramp):
    """Go from `start` to `end` along half a cosine until the given progress, then stay.

    >>> round(Cosine(until=0.5)(0.125, Site("blocks.0")), 2)
    0.85

    Args:
        start: The first alpha.
        end: The last alpha.
        until: The progress at which the last is reached.
    """

    def __call__(self, progress: float, site: Site) -> float:
        if progress >= self.until:
            return self.end
        return _between(self.start, self.end, 0.5 - 0.5 * math.cos(math.pi * progress / self.until))


Points: TypeAlias = Annotated[tuple[tuple[float, Unit], ...], Rule("a sequence of pairs (progress, alpha) from 0 to 1")]


@checked
@dataclass(frozen=True, kw_only=True)
class Piecewise:
    """Join points (progress, alpha) by straight lines; two points at the same progress are a jump to the second.

    >>> Piecewise(points=((0.0, 1.0), (0.2, 0.0)))(0.1, Site("blocks.0"))
    0.5

    Args:
        points: Pairs (progress, alpha) in the order of progress.
    """

    points: Points

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple((float(x), float(y)) for x, y in self.points))
        times = [progress for progress, _ in self.points]
        if not times or times != sorted(times) or times[0] < 0 or times[-1] > 1:
            raise PlanError(
                "Piecewise(points=...) must be in the order of progress, from 0 to 1.",
                f"The progress of its points is {times}.",
                "give rising numbers in [0, 1], for example ((0.0, 1.0), (0.2, 0.0)).",
            )

    def __call__(self, progress: float, site: Site) -> float:
        if progress < self.points[0][0]:
            return self.points[0][1]
        for (x0, y0), (x1, y1) in zip(self.points, self.points[1:], strict=False):
            if progress < x1:
                return _between(y0, y1, (progress - x0) / (x1 - x0))
        return self.points[-1][1]


@checked
def aggr20(start: Unit = 1.0) -> Piecewise:
    """Return the paper's schedule: `start` to 0.3 in the first tenth, to 0 in the second, then 0.

    >>> [aggr20()(progress, Site("x")) for progress in (0.0, 0.1, 0.2, 1.0)]
    [1.0, 0.3, 0.0, 0.0]

    Args:
        start: The first alpha. Theseus' inverse (its replacing rate goes 0.1, 0.7, 1.0) is `aggr20(start=0.9)`.
    """
    return Piecewise(points=((0.0, start), (0.1, 0.3), (0.2, 0.0)))


@checked
@dataclass(frozen=True, kw_only=True)
class Hold:
    """Hold alpha at 1 for a fraction of the run, then follow another schedule over the rest.

    While it holds, the student's input is detached: students learn from the guidance alone, locally.

    >>> Hold(fraction=0.5, then=Linear())(0.75, Site("blocks.0"))
    0.5

    Args:
        fraction: The part of the run in which alpha is 1.
        then: The schedule of the rest, which has a progress of its own.
    """

    fraction: Fraction
    then: Schedule = field(default_factory=aggr20)

    def __call__(self, progress: float, site: Site) -> float:
        then, local = self._at(progress, site)
        return then(local, site)

    def _at(self, progress: float, site: Site) -> tuple[Schedule, float]:
        if self.is_hold(progress, site):
            return Constant(alpha=1.0), 0.0
        return self.then, 1.0 if self.fraction == 1 else (progress - self.fraction) / (1 - self.fraction)

    def is_hold(self, progress: float, site: Site) -> bool:
        return progress < self.fraction


@checked
@dataclass(frozen=True, kw_only=True)
class Staggered:
    """Let the sites run through a schedule one after the other.
    >>> Staggered(order="back", overlap=0.0)(0.5, Site("blocks.3", index=3, count=4))
    0.0

    Args:
        then: The schedule of a site within its window.
        order: "front" (first site first), "back", or the sites' indices in the order in which they start.
        overlap: The part of its window that a site has in common with the next one: 0 is strictly one by one, 1 is all at once.
        until: The progress at which the last site is through.
    """

    then: Schedule = field(default_factory=Linear)
    order: Literal["front", "back"] | tuple[int, ...] = "front"
    overlap: Unit = 0.5
    until: Fraction = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.order, str):
            object.__setattr__(self, "order", tuple(self.order))

    def __call__(self, progress: float, site: Site) -> float:
        return self.then(self._local(progress, site), site)

    def _at(self, progress: float, site: Site) -> tuple[Schedule, float]:
        return self.then, self._local(progress, site)

    def is_hold(self, progress: float, site: Site) -> bool:
        return is_hold(self.then, self._local(progress, site), site)

    def _local(self, progress: float, site: Site) -> float:
        lag = 1.0 - self.overlap
        windows = 1.0 + (site.count - 1) * lag  # all sites together, in windows of one site
        local = progress / self.until * windows - self._turn(site) * lag
        if progress >= self.until:
            return 1.0
        return min(1.0, max(0.0, local))

    def _turn(self, site: Site) -> int:
        if isinstance(self.order, str):
            return site.index if self.order == "front" else site.count - 1 - site.index
        if sorted(self.order) != list(range(site.count)):
            raise PlanError(
                f"Staggered(order={self.order}) does not fit {site.count} sites.",
                f"It must name each index from 0 to {site.count - 1} once.",
                "count the sites with segue.select(model, sites).",
            )
        return self.order.index(site.index)


@checked
@dataclass(frozen=True, kw_only=True)
class PerSite:
    """Give each site its own schedule, by pattern; the first pattern that matches wins.

    >>> PerSite(schedules={"blocks.0.*": Linear()})(0.5, Site("blocks.0.attn"))
    0.5

    Args:
        schedules: A schedule for each pattern of names; the first that matches wins.
        otherwise: The schedule of the other sites.
    """

    schedules: Mapping[str, Schedule]
    otherwise: Schedule = field(default_factory=aggr20)

    def __call__(self, progress: float, site: Site) -> float:
        return self._of(site)(progress, site)

    def _at(self, progress: float, site: Site) -> tuple[Schedule, float]:
        return self._of(site), progress

    def is_hold(self, progress: float, site: Site) -> bool:
        return is_hold(self._of(site), progress, site)

    def _of(self, site: Site) -> Schedule:
        for pattern, schedule in self.schedules.items():
            if any(name_matches(pattern, name) for name in site.names):
                return schedule
        return self.otherwise


Spike: TypeAlias = Annotated[float, Rule("a number above 1 and at most 1000", lambda value: 1 < value <= 1000)]


@checked
@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """Lower each site's alpha as fast as its measured interface allows, in time for the deadline.

    The signal is the relative error of the student at the site, from the outputs that the guidance compares anyway. The blend
    is off its teacher by (1 - alpha) of it, and alpha falls while that is within `budget` and the error does not rise; above
    the budget it waits; after a spike it takes `back` and goes on at half the pace. Called without measurements, as by
    `segue.cost`, it is its slowest course: 1 for half of `until`, then a straight line to 0, and alpha is never above it.

    >>> Adaptive(until=0.5)(0.375, Site("blocks.0"))  # without measurements
    0.5

    Args:
        until: The deadline: alpha is 0 from here, whatever is measured.
        budget: Relative error of the blend at a site (as `relative_error` of an evaluation).
        divergence: With LogitDistillation: no site falls while its value is above this.
        fastest: The part of the run from 1 to 0, at full pace.
        spike: A value so many times its running mean is a spike.
        back: Added to alpha after a spike.
        memory: How far back the running means reach, as a part of the run.
        every: Steps from one reading of the device to the next.
    """

    until: Fraction = 0.3
    budget: PositiveFloat = 0.5
    divergence: PositiveFloat = 1.0
    fastest: Fraction = 0.05
    spike: Spike = 1.5
    back: Unit = 0.05
    memory: Fraction = 0.01
    every: PositiveInt = 4

    def __call__(self, progress: float, site: Site) -> float:
        return _between(1.0, 0.0, max(0.0, 2 * progress / self.until - 1))


def adaptive_at(schedule: Schedule, progress: float, site: Site) -> tuple[Adaptive, float] | None:
    """Return the Adaptive that decides alpha at a site now, also inside another schedule, with its own progress."""
    while isinstance(schedule, Hold | Staggered | PerSite):
        schedule, progress = schedule._at(progress, site)
    return (schedule, progress) if isinstance(schedule, Adaptive) else None


@checked
def mean_of(history: Sequence[Mapping[str, Any]]) -> Piecewise:
    """Return the mean alpha of a finished run as an open-loop schedule, equal at all sites: the control of an adaptive one.

        plan = dataclasses.replace(plan, schedule=segue.schedules.mean_of(done.history))

    Args:
        history: That of `segue.fit` (or the lines of its metrics.jsonl), from the first evaluation to the last step.
    """
    try:
        steps, alphas = ([float(metrics[name]) for metrics in history] for name in ("step", "alpha"))
        return Piecewise(points=tuple((step / steps[-1], alpha) for step, alpha in zip(steps, alphas, strict=True)))
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise PlanError(
            "mean_of(history) needs the evaluations of a finished run.",
            f"Reading their 'step' and 'alpha' ends with {type(error).__name__}: {error}.",
            "give the history of segue.fit, of a run with a handover and at least one step.",
        ) from None


def is_hold(schedule: Schedule, progress: float, site: Site) -> bool:
    """Tell whether a schedule holds alpha at 1 on purpose, so that students train locally.

    >>> is_hold(Hold(fraction=0.5), 0.2, Site("x"))
    True

    Args:
        schedule: Any schedule.
        progress: The fraction of the run that is done.
        site: Where.
    """
    asks: Callable[[float, Site], bool] | None = getattr(schedule, "is_hold", None)
    return asks is not None and bool(asks(progress, site))


def refuse_unmatched(schedule: object, sites: Sequence[Site]) -> None:
    """Refuse a PerSite, also inside another schedule, with a pattern that matches none of the sites."""
    own = schedule.schedules if isinstance(schedule, PerSite) else {}
    for pattern in own:
        if not any(name_matches(pattern, name) for site in sites for name in site.names):
            raise PlanError(
                f"the pattern {pattern!r} of PerSite matches none of the {len(sites)} sites.",
                nearest(pattern.strip("*."), [site.name for site in sites]),
                "correct the pattern, or leave it out. Nothing was changed.",
            )
    for inner in (*own.values(), getattr(schedule, "otherwise", None), getattr(schedule, "then", None)):
        if inner is not None:
            refuse_unmatched(inner, sites)


def is_adaptive(schedule: object) -> bool:
    """Tell whether a schedule is an Adaptive, or has one inside."""
    inside = (
        getattr(schedule, "then", None),
        getattr(schedule, "otherwise", None),
        *getattr(schedule, "schedules", {}).values(),
    )
    return isinstance(schedule, Adaptive) or (
        isinstance(schedule, Hold | Staggered | PerSite) and any(is_adaptive(inner) for inner in inside)
    )


def alpha_at(schedule: Schedule, progress: float, site: Site) -> float:
    """Return the alpha of a schedule, which may be a user's own, and refuse what is not a number from 0 to 1.

    >>> alpha_at(lambda progress, site: 1 - progress, 0.25, Site("x"))
    0.75

    Args:
        schedule: Any function (progress, site) -> alpha.
        progress: The fraction of the run that is done.
        site: Where.
    """
    alpha = schedule(progress, site)
    try:
        value = float(alpha)
    except (TypeError, ValueError):
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise PlanError(
            f"a schedule must return a number from 0 to 1, got {alpha!r}.",
            f"It is asked for site {site.name!r} at progress {progress:.4g}.",
            "return alpha, the teacher's share: 1 is the teacher alone, 0 the student alone.",
        )
    return value


def _between(start: float, end: float, x: float) -> float:
    if x >= 1.0:
        return end
    return min(max(start + (end - start) * x, min(start, end)), max(start, end))

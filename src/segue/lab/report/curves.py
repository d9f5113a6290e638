"""Curves: the evaluations of several seeds on common steps, as a mean with its interval."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segue.reporting.records import Point, Result
from segue.reporting.statistics import estimate

BY_SITE = ("alphas", "weights", "cosine", "relative_error", "gradient_norm", "drift_blend", "drift_students")
SCORES = ("students", "blend")
SUMMED = ("gate_variance", "data_variance")  # variances of independent parts add up over the sites
OVERALL = (*SCORES, "alpha", "loss", "lr", *SUMMED)
ADDED = ("guidance", "distill")  # the fields of a plan that add to the loss of the task
AXES = ("step", "progress", "epoch", "seconds", "flops")
EARLY = 0.2  # the fraction of the training in which aggr20 hands over, used for every method

Values = list[tuple[float, float | None]]  # (step, value); None where the value is not finite


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One quantity over evaluations or over sites: mean over seeds, half width of the interval."""

    mean: list[float | None]
    half: list[float | None]

    @property
    def known(self) -> bool:
        """Whether there is any value."""
        return any(value is not None for value in self.mean)


@dataclass(frozen=True, kw_only=True)
class Seed:
    """The scores of one run, at its own steps."""

    seed: int
    step: list[float]
    progress: list[float]
    epoch: list[float]
    seconds: list[float]
    flops: list[float]
    scores: dict[str, list[float | None]]  # by quantity of SCORES


@dataclass(frozen=True, kw_only=True)
class Line:
    """All curves of one method in one group, at common steps."""

    step: list[float]
    progress: list[float]
    epoch: list[float]
    seconds: list[float]  # mean over the seeds at that step, like FLOPs
    flops: list[float]
    overall: dict[str, Curve]  # by quantity of OVERALL
    losses: dict[str, Curve]  # the parts of the loss by name: of the task, of guidance, of distillation
    by_site: dict[str, dict[str, Curve]]  # by quantity of BY_SITE, then by site
    seeds: list[Seed]
    interpolated: bool  # the seeds were evaluated at different steps
    restores: list[float]  # the steps, of all seeds, that the guard has undone

    def marks(self, along: Sequence[float]) -> list[float]:
        """Return the places of the restores on an axis, on which the steps are at these places."""
        places: Values = list(zip(self.step, along, strict=True))
        return [place for place in on_steps(places, self.restores) if place is not None]


def finite(value: float | None) -> float | None:
    """Return a number, or None if it is missing, infinite or NaN."""
    return float(value) if value is not None and math.isfinite(value) else None


def gather(runs: Sequence[Result], sites: Sequence[str]) -> Line:
    """Collect the curves of one method over its seeds."""
    steps = sorted({float(point.step) for run in runs for point in run.train_info.points})
    own = [{float(point.step) for point in run.train_info.points} for run in runs]

    def axis(read: Callable[[Point], float]) -> list[float]:
        values = [on_steps(_values(run, read), steps) for run in runs]
        return [mean([column[i] for column in values]) or 0.0 for i in range(len(steps))]

    def curve(read: Callable[[Result], Values]) -> Curve:
        return _curve([on_steps(read(run), steps, without=evaluated) for run, evaluated in zip(runs, own, strict=True)])

    return Line(
        step=steps,
        progress=[step / max(1, *(run.train_info.total_steps for run in runs)) for step in steps],
        epoch=axis(lambda point: point.epoch),
        seconds=axis(lambda point: point.seconds),
        flops=axis(lambda point: point.flops),
        overall={quantity: curve(lambda run, q=quantity: overall_values(run, q)) for quantity in OVERALL},  # type: ignore[misc]
        losses={name: curve(lambda run, n=name: loss_values(run, n)) for name in loss_names(runs)},  # type: ignore[misc]
        seeds=[_seed(run) for run in runs],
        by_site={
            quantity: {
                site: curve(lambda run, q=quantity, s=site: site_values(run, q, s))  # type: ignore[misc]
                for site in sites
            }
            for quantity in BY_SITE
        },
        interpolated=any(evaluated != set(steps) for evaluated in own),
        restores=sorted(float(event["step"]) for run in runs for point in run.train_info.points for event in point.events),
    )


def overall_values(run: Result, quantity: str) -> Values:
    """Read one quantity of the model from the points that measured it."""
    if quantity in ("students", "blend"):
        score = run.train_info.score
        return _values_by_key(run, lambda point: getattr(point, quantity), score)
    if quantity in SUMMED:
        return _values(run, lambda point: over_sites(getattr(point, quantity)))
    return _values(run, lambda point: getattr(point, quantity))


def loss_names(runs: Sequence[Result]) -> list[str]:
    """Name the parts of the loss that any of the runs has; the task is all of it where none is recorded."""
    found = dict.fromkeys(name for run in runs for point in run.train_info.points for name in point.losses)
    return ["task", *(name for name in found if name != "task")]


def loss_values(run: Result, name: str) -> Values:
    """Read one part of the training loss; without parts, the task's is the whole where it has no other."""
    if any(point.losses for point in run.train_info.points):
        return _values_by_key(run, lambda point: point.losses, name)
    alone = matched_by(run.run_info.config) == []
    return overall_values(run, "loss") if name == "task" and alone else []


def matched_by(config: Mapping[str, Any]) -> list[str] | None:
    """Name the losses that the plan of a saved configuration adds to the task's; None if it has no plan."""
    plan = config.get("plan")
    return [part for part in ADDED if plan.get(part) is not None] if isinstance(plan, Mapping) else None


def site_values(run: Result, quantity: str, site: str) -> Values:
    """Read one quantity at one site from the points that measured it."""
    return _values_by_key(run, lambda point: getattr(point, quantity), site)


def over_sites(values: Mapping[str, float | None]) -> float | None:
    """Sum over the sites; None if nothing was measured, NaN if a value is not finite."""
    found = [math.nan if value is None else value for value in values.values()]
    return math.fsum(found) if found and all(map(math.isfinite, found)) else math.nan if found else None


def handover_points(run: Result) -> list[Point]:
    """Select the points at which alpha is above 0; all points of a run in which it never is."""
    points = run.train_info.points
    return [point for point in points if (finite(point.alpha) or 0.0) > 0] or points


def on_steps(points: Values, steps: Sequence[float], without: Collection[float] = ()) -> list[float | None]:
    """Return the values at given steps: as measured where they were, interpolated between, None outside.

    A step in `without` is not interpolated: the run was evaluated there and did not measure this.
    """
    own = [step for step, _ in points]
    values: list[float | None] = []
    for step in steps:
        right = bisect_left(own, step)
        if right < len(own) and own[right] == step:
            values.append(points[right][1])
        elif right in (0, len(own)) or step in without:
            values.append(None)
        else:
            values.append(_between(points[right - 1], points[right], step))
    return values


def early_mean(run: Result, quantity: str, site: str) -> float | None:
    """Average one quantity at one site over the first fifth of the training, without the start."""
    end = EARLY * run.train_info.total_steps
    return mean([value for step, value in site_values(run, quantity, site) if 0 < step <= end])


def last(run: Result, quantity: str, site: str) -> float | None:
    """Read one quantity at one site from the last evaluation that measured it."""
    values = site_values(run, quantity, site)
    return values[-1][1] if values else None


def profile(runs: Sequence[Result], sites: Sequence[str], read: Callable[[Result, str], float | None]) -> Curve:
    """Estimate one number per site over seeds."""
    return _curve([[read(run, site) for site in sites] for run in runs])


def _seed(run: Result) -> Seed:
    points = run.train_info.points
    score, total = run.train_info.score, max(1, run.train_info.total_steps)
    return Seed(
        seed=run.run_info.seed,
        step=[float(point.step) for point in points],
        progress=[point.step / total for point in points],
        epoch=[point.epoch for point in points],
        seconds=[point.seconds for point in points],
        flops=[point.flops for point in points],
        scores={quantity: [finite(getattr(point, quantity).get(score)) for point in points] for quantity in SCORES},
    )


def _values(run: Result, read: Callable[[Point], float | None]) -> Values:
    found = [(float(point.step), read(point)) for point in run.train_info.points]
    return [(step, finite(value)) for step, value in found if value is not None]


def _values_by_key(run: Result, read: Callable[[Point], Mapping[str, float | None]], key: str) -> Values:
    return [(float(point.step), finite(read(point)[key])) for point in run.train_info.points if key in read(point)]


def _between(left: tuple[float, float | None], right: tuple[float, float | None], step: float) -> float | None:
    if left[1] is None or right[1] is None:
        return None
    fraction = (step - left[0]) / (right[0] - left[0])
    return left[1] + fraction * (right[1] - left[1])


def _curve(columns: Sequence[Sequence[float | None]]) -> Curve:
    found = [estimate(values) for values in zip(*columns, strict=True)]
    return Curve(mean=[None if e is None else e.mean for e in found], half=[None if e is None else e.half for e in found])


def mean(values: Sequence[float | None]) -> float | None:
    """Average the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None

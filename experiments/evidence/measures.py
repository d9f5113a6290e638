"""Measures: what one run says, and what two arms say over their common seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from segue.lab.report.curves import early_mean, finite, last, mean, overall_values
from segue.lab.report.summary import held_from
from segue.lab.report.table_one import gate_fraction, over_handover, variance
from segue.reporting.records import Result
from segue.reporting.statistics import Interval, paired_ratio

Runs = dict[int, Result]  # of one arm, by seed


@dataclass(frozen=True)
class Work:
    """What a run spent until its students held a fraction of the teacher's score; all of it if they never did."""

    spent: float
    reached: bool


def work(run: Result, fraction: float, axis: str = "flops") -> Work:
    """Return the operations, epochs or seconds until the teacher-free students hold a fraction of the teacher's score."""
    begin = held_from(run, fraction)
    point = run.train_info.points[-1 if begin is None else begin]
    return Work(getattr(point, axis), begin is not None)


def work_ratio(ours: Runs, theirs: Runs, fraction: float, axis: str = "flops") -> Interval | None:
    """Estimate the work of one arm over that of another; None where ours does not get there in every common seed.

    A run of theirs that never gets there counts with all that it spent: the ratio is then an upper bound.
    """
    seeds = sorted(ours.keys() & theirs.keys())
    pairs = [(work(ours[seed], fraction, axis), work(theirs[seed], fraction, axis)) for seed in seeds]
    if not pairs or not all(mine.reached for mine, _ in pairs):
        return None
    return paired_ratio([(mine.spent, other.spent) for mine, other in pairs])


def final(run: Result) -> float | None:
    """Return the score of the students alone at the end."""
    return finite(run.final)


def swapped(run: Result) -> float | None:
    """Return the score of the students before any training, over the teacher's."""
    teacher = finite(run.train_info.teacher_eval.get(run.train_info.score))
    values = overall_values(run, "students")
    return values[0][1] / teacher if values and values[0][0] == 0 and values[0][1] is not None and teacher else None


def at_a_tenth(run: Result) -> float | None:
    """Return the score of the students alone after a tenth of the run."""
    steps = run.train_info.total_steps
    near = max(1.0, 0.01 * steps)
    return next((value for at, value in overall_values(run, "students") if abs(at - steps / 10) <= near), None)


def area_over_flops(run: Result, until: float = math.inf) -> float | None:
    """Average the score of the students alone over the operations of a run, at most `until`."""
    flops = {float(point.step): point.flops for point in run.train_info.points}
    points = [(flops[step], value) for step, value in overall_values(run, "students")]
    known = [(spent, value) for spent, value in points if value is not None]
    if len(known) < 2 or len(known) < len(points):
        return None
    total = 0.0
    for (left, a), (right, b) in pairwise(known):
        end = min(right, until)
        if end > left:
            at_end = a + (b - a) * (end - left) / (right - left)
            total += (end - left) * (a + at_end) / 2
    return total / (min(known[-1][0], until) - known[0][0])


def shown_sites(run: Result) -> tuple[str, str, str]:
    """Return the first site, the one at 7 / 11 of the depth and the last, as figure 1 of the paper: blocks 0, 7 and 11."""
    sites = run.train_info.sites
    end = len(sites) - 1
    return sites[0], sites[round(7 / 11 * end)], sites[end]


def cosine(run: Result, place: int | None = None) -> float | None:
    """Return the interface cosine at the end: the mean over all sites, or that of one of the three of figure 1."""
    sites: Sequence[str] = run.train_info.sites if place is None else [shown_sites(run)[place]]
    return mean([last(run, "cosine", site) for site in sites])


def late_minus_first_cosine(run: Result) -> float | None:
    """Return by how much the cosine at the last site is above that at the first."""
    first, end = cosine(run, 0), cosine(run, 2)
    return None if first is None or end is None else end - first


def early_gradient(run: Result) -> float | None:
    """Return the students' gradient norm over the first fifth of the run, mean over the sites: small means starved."""
    return mean([early_mean(run, "gradient_norm", site) for site in run.train_info.sites])


def early_drift(run: Result) -> float | None:
    """Return how far the residual stream of the blend is from the original's, in the first fifth, mean over the sites."""
    return mean([early_mean(run, "drift_blend", site) for site in run.train_info.sites])


def gate_part(run: Result) -> float | None:
    """Return the part of the gradients' variance that the gates cause, over the handover."""
    return over_handover(run, gate_fraction)


def total_variance(run: Result) -> float | None:
    """Return the variance of the students' gradients by gates and minibatches, over the handover."""
    return over_handover(run, variance)


@dataclass(frozen=True)
class Measure:
    """A number of a run, with its name; of scores and fractions differences are in points of a hundred."""

    name: str
    read: Callable[[Result], float | None]
    percent: bool = False


FINAL = Measure("final score", final, percent=True)
TENTH = Measure("score after a tenth of the run", at_a_tenth, percent=True)
SWAPPED = Measure("part of the teacher's score before training", swapped, percent=True)
COSINE = Measure("interface cosine at the end, mean over sites", cosine)
COSINES = tuple(
    Measure(f"interface cosine at the {name} site", lambda run, place=place: cosine(run, place))  # type: ignore[misc]
    for place, name in enumerate(("first", "middle", "last"))
)
DEEPER = Measure("interface cosine, last site minus first", late_minus_first_cosine)
GRADIENT = Measure("gradient norm in the first fifth", early_gradient)
DRIFT = Measure("drift of the stream in the first fifth", early_drift)
GATES = Measure("part of the gradients' variance by the gates", gate_part, percent=True)
VARIANCE = Measure("variance of the gradients", total_variance)

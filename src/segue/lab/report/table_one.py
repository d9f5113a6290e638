"""Table 1 of the paper, measured: what the gates add to the variance of gradients, what a method costs, what it matches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segue.diagnostics.costs import BLEND, Cost
from segue.lab.report.curves import annealed, finite, mean, over_sites, profile
from segue.reporting.records import Point, Result
from segue.reporting.statistics import Estimate, estimate

NO_MATCHING = "no"
MATCHING = {
    "guidance": "at the sites (guidance)",
    "distill": "of the whole model's output (distillation)",
}  # by the plan's part

COUNTED: dict[str, Callable[[Cost], float]] = {
    "to_student_only": lambda cost: cost.to_student_only,
    "to_distillation": lambda cost: cost.to_distillation,
    "blend_to_student_only": lambda cost: _blend_step(cost) / cost.student_only.flops,
    "bytes_to_student_only": lambda cost: cost.whole.saved_bytes / cost.student_only.saved_bytes,
    "extra_parameters": lambda cost: cost.whole.parameters - cost.student_only.parameters,
    "of_a_full_teacher": lambda cost: len(cost.teachers) / cost.break_even,  # what is added, over what a full teacher adds
    "break_even": lambda cost: cost.break_even,
    "break_even_blend": lambda cost: cost.break_even_blend,
    "replaced": lambda cost: len(cost.teachers),
}
BY_DEPTH: dict[str, Callable[[Point, str], float | None]] = {
    "gate_variance": lambda point, site: finite(point.gate_variance.get(site)),
    "curvature": lambda point, site: _size_over(point.curvature_bias.get(site), point.curvature_bound.get(site)),
    "path": lambda point, site: _size_over(point.path_rise.get(site), point.path_bound.get(site)),
}


@dataclass(frozen=True, kw_only=True)
class TableOne:
    """What all seeds of one method say about its row of Table 1; None is what was not measured."""

    gate_share: Estimate | None  # of the variance of the students' gradients, mean over the looks of the anneal
    exactly_zero: bool  # the gates cause none of it, and this is not an estimate
    variance: Estimate | None  # of the students' gradients, by gates and minibatches, mean over the same looks
    to_prediction: Estimate | None  # the gates' variance over the paper's formula for it, over the same looks
    counted: dict[str, Estimate | None]  # by the names of COUNTED
    matching: str | None  # what the plan asks of the students' features
    by_depth: dict[str, list[Estimate | None]]  # by the names of BY_DEPTH, then by site; mean over the looks of the anneal

    @property
    def varies(self) -> bool:
        """Whether the gates' variance was measured."""
        return self.gate_share is not None or self.to_prediction is not None

    @property
    def costs(self) -> bool:
        """Whether operations were counted."""
        return self.counted["to_student_only"] is not None


def table_one(runs: Sequence[Result], sites: Sequence[str]) -> TableOne:
    """Measure one method's row of Table 1 on its runs."""
    exact = _exactly_zero(runs)
    costs = [rebuilt(run.train_info.cost) for run in runs]
    found = [matching(run.run_info.config) for run in runs]
    return TableOne(
        gate_share=exact or estimate([over_anneal(run, gate_share) for run in runs]),
        exactly_zero=exact is not None,
        variance=estimate([over_anneal(run, variance) for run in runs]),
        to_prediction=estimate([to_prediction(run) for run in runs]),
        counted={name: estimate([_counted(cost, read) for cost in costs]) for name, read in COUNTED.items()},
        matching=" or ".join(dict.fromkeys(one for one in found if one is not None)) or None,
        by_depth={
            name: profile(runs, sites, lambda run, site, r=read: over_anneal(run, lambda point: r(point, site)))  # type: ignore[misc]
            for name, read in BY_DEPTH.items()
        },
    )


def over_anneal(run: Result, read: Callable[[Point], float | None]) -> float | None:
    """Average what the looks of the anneal measured; those that found no finite number are left out."""
    return mean([finite(read(point)) for point in annealed(run)])


def gate_share(point: Point) -> float | None:
    """Divide the variance that the gates cause by all variance, summed over the sites; None where nothing varies."""
    gates, data = _parts(point)
    return gates / (gates + data) if gates + data > 0 else None


def variance(point: Point) -> float | None:
    """Add the two parts of the gradients' variance, summed over the sites."""
    return finite(sum(_parts(point)))


def _parts(point: Point) -> tuple[float, float]:
    """Give the gates' part and the data's; an estimate of a small variance that came out below zero counts as zero."""
    gates, data = _at_common_sites(point.gate_variance, point.data_variance)
    if gates is None or data is None or math.isnan(gates + data):
        return math.nan, math.nan
    return max(0.0, gates), max(0.0, data)


def to_prediction(run: Result) -> float | None:
    """Divide the variance that the gates cause by the paper's formula for it, both summed over sites and looks of the anneal.

    Sums, and not a mean of ratios: where a gate hardly moves, the formula is close to zero and a ratio is mostly noise.
    """
    pairs = [_at_common_sites(point.gate_variance, point.predicted_variance) for point in annealed(run)]
    known = [(found, told) for found, told in pairs if found is not None and told is not None and math.isfinite(found + told)]
    told = math.fsum(told for _, told in known)
    return math.fsum(found for found, _ in known) / told if told else None


def matching(config: Mapping[str, Any]) -> str | None:
    """Say what the plan of a run matches; None if its configuration holds no plan."""
    plan = config.get("plan")
    if not isinstance(plan, Mapping):
        return None
    return " and ".join(words for part, words in MATCHING.items() if plan.get(part) is not None) or NO_MATCHING


def rebuilt(data: Mapping[str, Any]) -> Cost | None:
    """Rebuild a cost from what a run saved; None if it did not, or not all of it."""
    try:
        return Cost.from_dict(data)
    except (KeyError, TypeError):
        return None


def _at_common_sites(*measured: Mapping[str, float]) -> list[float | None]:
    common = set.intersection(*(set(one) for one in measured))
    return [over_sites({site: one[site] for site in common}) for one in measured]


def _counted(cost: Cost | None, read: Callable[[Cost], float]) -> float | None:
    try:
        return None if cost is None else read(cost)
    except (ZeroDivisionError, TypeError):  # no step, no operation, or a number that was not finite when it was saved
        return None


def _blend_step(cost: Cost) -> float:
    return next((phase.flops for phase in cost.phases if phase.name == BLEND), math.nan)


def _exactly_zero(runs: Sequence[Result]) -> Estimate | None:
    """Give a share of zero, without any doubt, where every look of the anneal found and did not estimate it."""
    looks = [[point for point in annealed(run) if point.gate_variance] for run in runs]
    exact = all(
        point.gate_variance_error.get(site) == 0 and value == 0
        for of_run in looks
        for point in of_run
        for site, value in point.gate_variance.items()
    )
    return Estimate(0.0, 0.0, sum(map(bool, looks)), len(runs)) if exact and any(looks) else None


def _size_over(value: float | None, bound: float | None) -> float | None:
    return None if value is None or not bound else abs(value) / bound

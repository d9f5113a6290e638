"""Table 1 of the paper, measured, and compared with what the paper says.

Its columns: the gradient variance that the gates cause, the compute that a method adds, the features that it matches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from segue.diagnostics.costs import BLEND, Cost
from segue.lab.report.curves import Curve, finite, handover_points, matched_by, mean, over_sites, profile
from segue.reporting.formatting import NOTHING, ScoreFormat, counted, seeds_behind, shortened, significant
from segue.reporting.records import Point, Result
from segue.reporting.statistics import Estimate, estimate

if TYPE_CHECKING:
    from segue.lab.report.summary import Group, Method

LOW, HIGH = 0.1, 0.5  # of all variance; of the operations that a full teacher adds
READING = (
    f"“Low” means below {100 * LOW:.0f} %, “High” above {100 * HIGH:.0f} %: of the variance of the students' gradients, and "
    "of the operations that a full teacher adds to student-only training. A claim is open if the 95 % interval over seeds "
    "contains the limit."
)

PERCENT, PLAIN = ScoreFormat(percent=True), ScoreFormat(percent=False)

Verdict = Literal["holds", "does not hold", "open", "not measured"]

NO_MATCHING = "no"
MATCHING = {
    "guidance": "at the sites (guidance)",
    "distill": "of the model's output (distillation)",
}  # by field of the plan

COUNTED: dict[str, Callable[[Cost], float]] = {
    "to_student_only": lambda cost: cost.to_student_only,
    "to_distillation": lambda cost: cost.to_distillation,
    "blend_to_student_only": lambda cost: _blend_step(cost) / cost.student_only.flops,
    "bytes_to_student_only": lambda cost: cost.total.saved_bytes / cost.student_only.saved_bytes,
    "extra_parameters": lambda cost: cost.total.parameters - cost.student_only.parameters,
    "of_a_full_teacher": lambda cost: len(cost.teachers) / cost.break_even,  # extra operations, over those of a full teacher
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
    """One method's row of Table 1 over its seeds; None for what was not measured."""

    gate_fraction: Estimate | None  # of the variance of the students' gradients, mean over the handover
    exactly_zero: bool  # the gates cause none of it, by computation and not by sampling
    variance: Estimate | None  # of the students' gradients, by gates and minibatches, likewise
    to_prediction: Estimate | None  # the gates' variance over the paper's formula for it, likewise
    counted: dict[str, Estimate | None]  # by the names of COUNTED
    matching: str | None  # which features the plan matches
    by_depth: dict[str, Curve]  # by the names of BY_DEPTH, over the sites

    @property
    def varies(self) -> bool:
        """Whether the variance by the gates was measured."""
        return self.gate_fraction is not None or self.to_prediction is not None

    @property
    def costs(self) -> bool:
        """Whether operations were counted."""
        return self.counted["to_student_only"] is not None


def measure(runs: Sequence[Result], sites: Sequence[str]) -> TableOne:
    """Measure one method's row of Table 1 on its runs."""
    exact = _exactly_zero(runs)
    costs = [rebuilt(run.train_info.cost) for run in runs]
    found = [matching(run.run_info.config) for run in runs]
    return TableOne(
        gate_fraction=exact or estimate([over_handover(run, gate_fraction) for run in runs]),
        exactly_zero=exact is not None,
        variance=estimate([over_handover(run, variance) for run in runs]),
        to_prediction=estimate([to_prediction(run) for run in runs]),
        counted={name: estimate([_counted(cost, read) for cost in costs]) for name, read in COUNTED.items()},
        matching=" or ".join(dict.fromkeys(one for one in found if one is not None)) or None,
        by_depth={
            name: profile(runs, sites, lambda run, site, r=read: over_handover(run, lambda point: r(point, site)))  # type: ignore[misc]
            for name, read in BY_DEPTH.items()
        },
    )


def over_handover(run: Result, read: Callable[[Point], float | None]) -> float | None:
    """Average the finite values that the evaluations of the handover measured."""
    return mean([finite(read(point)) for point in handover_points(run)])


def gate_fraction(point: Point) -> float | None:
    """Divide the variance that the gates cause by the total, both summed over the sites; None if that is zero."""
    gates, data = _parts(point)
    return gates / (gates + data) if gates + data > 0 else None


def variance(point: Point) -> float | None:
    """Add the two parts of the gradients' variance, summed over the sites."""
    return finite(sum(_parts(point)))


def _parts(point: Point) -> tuple[float, float]:
    """Return the gates' part and the data's; a negative estimate of a small variance counts as zero."""
    gates, data = _at_common_sites(point.gate_variance, point.data_variance)
    if gates is None or data is None or math.isnan(gates + data):
        return math.nan, math.nan
    return max(0.0, gates), max(0.0, data)


def to_prediction(run: Result) -> float | None:
    """Divide the variance that the gates cause by the paper's formula for it, both summed over sites and the handover.

    A ratio of sums and not a mean of ratios: where a gate hardly varies, the formula is near zero and its ratio is noise.
    """
    pairs = [_at_common_sites(point.gate_variance, point.predicted_variance) for point in handover_points(run)]
    known = [(a, b) for a, b in pairs if a is not None and b is not None and math.isfinite(a + b)]
    predicted = math.fsum(b for _, b in known)
    return math.fsum(a for a, _ in known) / predicted if predicted else None


def matching(config: Mapping[str, Any]) -> str | None:
    """Say which features the plan of a run matches; None if its configuration has no plan."""
    found = matched_by(config)
    return None if found is None else " and ".join(MATCHING[part] for part in found) or NO_MATCHING


def rebuilt(data: Mapping[str, Any]) -> Cost | None:
    """Rebuild a cost from a result; None if it is missing or incomplete."""
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
    except (ZeroDivisionError, TypeError):  # no step, no operation, or null for a value that was not finite
        return None


def _blend_step(cost: Cost) -> float:
    return next((phase.flops for phase in cost.phases if phase.name == BLEND), math.nan)


def _exactly_zero(runs: Sequence[Result]) -> Estimate | None:
    """Return an exact fraction of zero if every evaluation of the handover computed it and none sampled it."""
    points = [[point for point in handover_points(run) if point.gate_variance] for run in runs]
    exact = all(
        point.gate_variance_error.get(site) == 0 and value == 0
        for of_run in points
        for point in of_run
        for site, value in point.gate_variance.items()
    )
    return Estimate(0.0, 0.0, sum(map(bool, points)), len(runs)) if exact and any(points) else None


def _size_over(value: float | None, bound: float | None) -> float | None:
    return None if value is None or not bound else abs(value) / bound


@dataclass(frozen=True)
class Aspect:
    """One column of Table 1."""

    heading: str
    claims: dict[str, str]  # the paper's, by method
    measured: Callable[[TableOne], str]
    verdict: Callable[[TableOne, str], Verdict]


def level(found: Estimate | None, claim: str) -> Verdict:
    """Say whether a fraction is as low or as high as the paper says, over the interval of the seeds."""
    if found is None:
        return "not measured"
    low, high = found.mean - (found.half or 0.0), found.mean + (found.half or 0.0)
    inside, outside = (high < LOW, low >= LOW) if claim.startswith("Low") else (low > HIGH, high <= HIGH)
    return "holds" if inside else "does not hold" if outside else "open"


def gates(row: TableOne) -> str:
    """Format the fraction of the variance that the gates cause."""
    if row.exactly_zero:
        return "0 (exactly)" + seeds_behind(row.gate_fraction)
    return PERCENT.estimate(row.gate_fraction) + seeds_behind(row.gate_fraction)


def compute(row: TableOne) -> str:
    """Format the operations of a run, compared with student-only training and with a full teacher."""
    found, added = row.counted["to_student_only"], row.counted["of_a_full_teacher"]
    if found is None:
        return NOTHING
    share = "" if added is None else f", {PERCENT.value(added.mean)} of what a full teacher adds"
    return f"{found.mean:.3f} x student-only{share}{seeds_behind(found)}"


def _matched(row: TableOne, claim: str) -> Verdict:
    if row.matching is None:
        return "not measured"
    return "holds" if (row.matching == NO_MATCHING) == claim.startswith("No") else "does not hold"


ASPECTS = (
    Aspect(
        "Gradient variance caused by the gates",
        {"distillation": "Low", "theseus": "High (gate-induced)", "dcr": "Low (deterministic)"},
        gates,
        lambda row, claim: level(row.gate_fraction, claim),
    ),
    Aspect(
        "Extra compute of the run",
        {
            "distillation": "High (full teacher model forward)",
            "theseus": "Low (gate overhead only)",
            "dcr": "Low (branch-local teacher only at replaced layers)",
        },
        compute,
        lambda row, claim: level(row.counted["of_a_full_teacher"], claim),
    ),
    Aspect(
        "Needs feature matching",
        {"distillation": "Yes (rigid)", "theseus": "No", "dcr": "No (optional via DFG)"},
        lambda row: row.matching or NOTHING,
        _matched,
    ),
)


def against_paper(method: Method, aspect: Aspect) -> tuple[str, str, Verdict | None]:
    """Return what was measured, what the paper says and whether it holds; methods that the paper lacks have no claim."""
    row, claim = method.table_one, aspect.claims.get(method.method, "")
    return aspect.measured(row), claim, aspect.verdict(row, claim) if claim else None


def findings(group: Group) -> list[str]:
    """Say of every claim of the paper whether it holds, then what the formula and the counts add."""
    return [*_claims(group), *_variances(group), *_break_even(group)]


def _claims(group: Group) -> list[str]:
    found = []
    for aspect in ASPECTS:
        by_verdict: dict[str, list[str]] = {"holds": [], "does not hold": [], "open": []}
        for method in group.methods:
            measured, claim, verdict = against_paper(method, aspect)
            if verdict in by_verdict:
                by_verdict[verdict].append(f"{shortened(method.label)} (“{claim}”, here {measured})")
        parts = [f"{verdict}: {'; '.join(methods)}" for verdict, methods in by_verdict.items() if methods]
        if parts:
            found.append(f"{aspect.heading}, the paper's claim {', '.join(parts)}.")
    return found


def _variances(group: Group) -> list[str]:
    total = [(m.label, m.table_one.variance) for m in group.methods]
    formula = [(m.label, m.table_one.to_prediction) for m in group.methods]
    texts = {"The gates' variance relative to the paper's formula": (formula, " x")}
    if any(one is not None and one.mean > 0 for _, one in formula):  # some gate is random
        texts["The total variance, by gates and minibatches"] = (total, "")
    return [
        f"{what}: {', '.join(f'{PLAIN.estimate(one)}{unit} with {shortened(label)}' for label, one in found)}."
        for what, (numbers, unit) in texts.items()
        if (found := [(label, one) for label, one in numbers if one is not None])
    ]


def _break_even(group: Group) -> list[str]:
    for method in group.methods:
        even, replaced = (method.table_one.counted[name] for name in ("break_even_blend", "replaced"))
        if even is not None and replaced is not None:
            return [
                f"A blend step costs as much as one with a full teacher at {significant(even.mean)} modules like these; "
                f"{counted(round(replaced.mean), 'module')} replaced here."
            ]
    return []

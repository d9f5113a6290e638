"""Summary: what saved runs say about the methods, group by group."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from segue.lab.report import choices, findings, table_one
from segue.lab.report.comparisons import MEASURES, Comparison, Measure, Standing, check_reference, compare, rank, standings
from segue.lab.report.curves import Curve, Line, early_mean, finite, gather, last, mean, overall_values, profile
from segue.lab.report.table_one import TableOne
from segue.reporting.formatting import FALLING, ScoreFormat, counted, listed
from segue.reporting.palette import in_order
from segue.reporting.records import Result
from segue.reporting.statistics import Estimate, Ranks, TimeTo, estimate, time_to

FRACTIONS = (0.90, 0.95, 0.99)  # of the teacher's score, for the students alone to reach and hold
ROUNDING = 1e-9  # 0.9 * 0.8 is a little more than 0.72
AXES = ("epoch", "seconds", "flops")  # what a run spends until it reaches a fraction


@dataclass(frozen=True, kw_only=True)
class Held:
    """When the students alone reached a fraction of the teacher's score and never fell below it again."""

    fraction: float
    defined: bool  # the teacher's score is positive
    held: int  # the number of seeds that did
    seeds: int
    epochs: TimeTo | None  # the seeds that did not are censored at their end; None without evaluations
    seconds: TimeTo | None
    flops: TimeTo | None


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method in one group, over its seeds."""

    method: str
    label: str
    seeds: list[int]
    final: Estimate | None  # the score of the students alone on all held-out examples
    area: Estimate | None  # their mean score over the epochs of the run
    held: list[Held]  # one per fraction
    step_seconds: Estimate | None
    step_flops: Estimate | None
    seconds: Estimate | None
    flops: Estimate | None
    peak_memory: Estimate | None
    standing: dict[Measure, Standing]
    line: Line
    early_gradient: Curve  # by site, mean over the first fifth of the training
    early_drift: Curve  # of the blend, likewise
    last_drift: Curve  # of the students alone, at the last evaluation
    table_one: TableOne
    runs: list[Result] = field(repr=False)
    by_seed: dict[Measure, dict[int, float | None]] = field(repr=False)

    def of(self, measure: Measure) -> Estimate | None:
        """Return the estimate of one measure."""
        return self.final if measure == "final" else self.area


@dataclass(frozen=True, kw_only=True)
class Group:
    """The methods of one setting."""

    name: str
    score: str
    teacher: float | None  # the original model on all held-out examples, mean over the runs
    teacher_eval: float | None  # and on the examples of the evaluations during training
    sites: list[str]
    epochs: float
    methods: list[Method]
    comparisons: list[Comparison]
    notes: list[str]
    findings: list[str]

    @property
    def one_seed(self) -> bool:
        """Whether no method has two seeds: nothing can be said about differences."""
        return all(len(method.seeds) < 2 for method in self.methods)

    @property
    def shown_sites(self) -> list[int]:
        """Select the first, a middle and the last site, as the paper does with blocks 0, 7 and 11 of 12."""
        end = len(self.sites) - 1
        return sorted({0, round(7 / 11 * end), end}) if self.sites else []

    @property
    def anneal_end(self) -> float:
        """The progress at the last evaluation of any method with alpha above 0; 1 if there is none."""
        points = [
            (progress, alpha)
            for method in self.methods
            for progress, alpha in zip(method.line.progress, method.line.overall["alpha"].mean, strict=True)
        ]
        return max((progress for progress, alpha in points if alpha), default=1.0)

    def method(self, name: str) -> Method | None:
        """Find a method by its name."""
        return next((method for method in self.methods if method.method == name), None)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Everything that tables, figures and the page show."""

    experiments: list[str]
    runs: int
    score_format: ScoreFormat
    groups: list[Group]
    comparisons: int  # with a p-value, of one measure, over all groups, also those with a reference that was not chosen
    reference: str | None  # the method named beforehand; None: the best other method of each group
    ranks: Ranks | None  # of the methods that every group has
    notes: list[str]

    @property
    def methods(self) -> list[tuple[str, str]]:
        """Every method and its label once, in the order of the paper."""
        labels = {method.method: method.label for group in reversed(self.groups) for method in group.methods}
        return [(name, labels[name]) for name in in_order(labels)]


def summarize(results: list[Result], *, reference: str | None = None) -> Summary:
    """Summarize saved runs: methods are compared within a group, over seeds, with a reference or the best other method.

    Without `reference`, it is the one that the runs themselves name.

    >>> summarize([]).groups
    []
    """
    kept, notes = _without_duplicates(results)
    experiments = sorted({run.run_info.experiment for run in kept})
    named: dict[str, list[Result]] = {}
    for run in kept:
        info = run.run_info
        named.setdefault(f"{info.experiment}: {info.group}" if len(experiments) > 1 else info.group, []).append(run)
    score_format = _score_format(kept)
    groups = [_group(name, named[name]) for name in _group_order(list(named))]
    reference, said = choices.reference_of(kept, reference)
    check_reference(reference, groups)
    compared = compare(groups, reference)
    groups = [_with(group, [found for found in compared if found.group == group.name], score_format) for group in groups]
    return Summary(
        experiments=experiments,
        runs=len(kept),
        score_format=score_format,
        groups=groups,
        comparisons=max((found.family for found in compared if found.measure == "final"), default=0),
        reference=reference,
        ranks=rank(groups),
        notes=notes + said,
    )


def _without_duplicates(results: list[Result]) -> tuple[list[Result], list[str]]:
    kept: dict[tuple[str, str, str, int], Result] = {}
    duplicates = []
    for run in results:
        info = run.run_info
        if kept.setdefault((info.experiment, info.group, info.method, info.seed), run) is not run:
            duplicates.append(info.name)
    if not duplicates:
        return list(kept.values()), []
    return list(kept.values()), [
        f"{counted(len(duplicates), 'run')} ignored, with the method, group and seed of another: {listed(duplicates)}."
    ]


def _group_order(names: list[str]) -> list[str]:
    """Sort groups by the numbers in their names: percentages descend, everything else ascends."""

    def key(name: str) -> list[tuple[int, float, str]]:
        sign = -1 if "%" in name else 1
        parts = re.split(r"(\d+(?:\.\d+)?)", name)
        return [(0, sign * float(part), "") if i % 2 else (1, 0.0, part) for i, part in enumerate(parts)]

    return sorted(names, key=key)


def _score_format(runs: list[Result]) -> ScoreFormat:
    values = [
        value
        for run in runs
        for scores in (run.train_info.final, run.train_info.teacher)
        if (value := finite(scores.get(run.train_info.score))) is not None
    ]
    return ScoreFormat.of(runs[0].train_info.score if runs else "", values)


def _group(name: str, runs: list[Result]) -> Group:
    sites = max((run.train_info.sites for run in runs), key=len)
    by_method: dict[str, list[Result]] = {}
    for run in sorted(runs, key=lambda run: run.run_info.seed):
        by_method.setdefault(run.run_info.method, []).append(run)
    ends = [run.train_info.points[-1] for run in runs if run.train_info.points]
    limits = {axis: min((getattr(end, axis) for end in ends), default=None) for axis in AXES}
    methods = [_method(by_method[method], sites, limits) for method in in_order(by_method)]
    standing = {measure: standings(methods, measure) for measure in MEASURES}
    return Group(
        name=name,
        score=runs[0].train_info.score,
        teacher=mean([finite(run.train_info.teacher.get(run.train_info.score)) for run in runs]),
        teacher_eval=mean([finite(run.train_info.teacher_eval.get(run.train_info.score)) for run in runs]),
        sites=sites,
        epochs=max((point.epoch for run in runs for point in run.train_info.points), default=0.0),
        methods=[replace(one, standing={m: standing[m][one.method] for m in MEASURES}) for one in methods],
        comparisons=[],
        notes=findings.notes(by_method, methods),
        findings=[],
    )


def _method(runs: list[Result], sites: list[str], limits: dict[str, float | None]) -> Method:
    finals = {run.run_info.seed: finite(run.train_info.final.get(run.train_info.score)) for run in runs}
    areas = {run.run_info.seed: area(run) for run in runs}

    def per_step(read: Callable[[Result], float]) -> Estimate | None:
        return estimate([read(run) / run.train_info.total_steps if run.train_info.total_steps else None for run in runs])

    return Method(
        method=runs[0].run_info.method,
        label=runs[0].run_info.label,
        seeds=[run.run_info.seed for run in runs],
        final=estimate(list(finals.values())),
        area=estimate(list(areas.values())),
        held=[_held(runs, fraction, limits) for fraction in FRACTIONS],
        step_seconds=per_step(lambda run: run.train_info.seconds),
        step_flops=per_step(lambda run: run.train_info.flops),
        seconds=estimate([run.train_info.seconds for run in runs]),
        flops=estimate([run.train_info.flops for run in runs]),
        peak_memory=estimate([run.train_info.peak_memory for run in runs]),
        standing={},
        line=gather(runs, sites),
        early_gradient=profile(runs, sites, lambda run, site: early_mean(run, "gradient_norm", site)),
        early_drift=profile(runs, sites, lambda run, site: early_mean(run, "drift_blend", site)),
        last_drift=profile(runs, sites, lambda run, site: last(run, "drift_students", site)),
        table_one=table_one.measure(runs, sites),
        runs=runs,
        by_seed={"final": finals, "area": areas},
    )


def area(run: Result) -> float | None:
    """Average the students' score over the epochs of a run; None if an evaluation has no finite score."""
    epochs = {float(point.step): point.epoch for point in run.train_info.points}
    values = overall_values(run, "students")
    points = [(epochs[step], value) for step, value in values if value is not None]
    if not points or len(points) < len(values):
        return None
    length = points[-1][0] - points[0][0]
    if length <= 0:
        return points[-1][1]
    return sum((right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in pairwise(points)) / length


def held_from(run: Result, fraction: float) -> int | None:
    """Find the point from which on the students alone have a fraction of the teacher's score, at every later point too."""
    teacher = finite(run.train_info.teacher_eval.get(run.train_info.score))
    begin: int | None = None
    for index, point in enumerate(run.train_info.points):
        if run.train_info.score not in point.students:
            continue
        value = finite(point.students[run.train_info.score])
        enough = teacher is not None and value is not None and value >= fraction * teacher - ROUNDING
        begin = (index if begin is None else begin) if enough else None
    return begin


def _held(runs: list[Result], fraction: float, limits: dict[str, float | None]) -> Held:
    teachers = [finite(run.train_info.teacher_eval.get(run.train_info.score)) for run in runs]
    begins = [held_from(run, fraction) for run in runs]
    reached = [begin is not None for begin in begins]

    def until(axis: str) -> TimeTo | None:
        spent = [
            getattr(run.train_info.points[-1 if begin is None else begin], axis)
            for run, begin in zip(runs, begins, strict=True)
            if run.train_info.points
        ]
        return time_to(spent, reached, limit=limits[axis]) if len(spent) == len(runs) else None

    return Held(
        fraction=fraction,
        defined=all(teacher is not None and teacher > 0 for teacher in teachers) and runs[0].train_info.score not in FALLING,
        held=sum(reached),
        seeds=len(runs),
        epochs=until("epoch"),
        seconds=until("seconds"),
        flops=until("flops"),
    )


def _with(group: Group, comparisons: list[Comparison], score_format: ScoreFormat) -> Group:
    compared = replace(group, comparisons=comparisons)
    return replace(compared, findings=findings.of_group(compared, score_format))

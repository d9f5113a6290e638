"""Summary: what saved runs say about the methods, group by group."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from segue.lab.report import findings, table_one
from segue.lab.report.curves import Curve, Line, early_mean, finite, gather, last, mean, overall_values, profile
from segue.lab.report.table_one import TableOne
from segue.reporting.formatting import ScoreFormat, counted, listed
from segue.reporting.palette import in_order
from segue.reporting.records import Result
from segue.reporting.statistics import Difference, Estimate, estimate, holm, paired_difference

FRACTIONS = (0.90, 0.95, 0.99)  # of the teacher's score, for the students alone to reach and hold
ROUNDING = 1e-9  # 0.9 * 0.8 is a little more than 0.72

Measure = Literal["final", "area"]
MEASURES: tuple[Measure, ...] = ("final", "area")
Standing = Literal["best", "like the best", "worse", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Held:
    """When the students alone reached a fraction of the teacher's score and never fell below it again."""

    fraction: float
    defined: bool  # the teacher's score is positive
    held: int  # the number of seeds that did
    seeds: int
    epochs: Estimate | None  # all three only if every seed did
    seconds: Estimate | None
    flops: Estimate | None


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
class Comparison:
    """One method against the best baseline of its group, seed by seed."""

    group: str
    measure: Measure
    method: str
    label: str
    baseline: str
    baseline_label: str
    difference: Difference
    holm: float | None  # the p-value, adjusted for all comparisons of this measure


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
    comparisons: int  # with a p-value, of one measure, over all groups
    notes: list[str]

    @property
    def methods(self) -> list[tuple[str, str]]:
        """Every method and its label once, in the order of the paper."""
        labels = {method.method: method.label for group in reversed(self.groups) for method in group.methods}
        return [(name, labels[name]) for name in in_order(labels)]


def summarize(results: list[Result]) -> Summary:
    """Summarize saved runs: methods are compared within a group, over seeds.

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
    compared = _adjusted([_comparisons(group, measure) for measure in MEASURES for group in groups])
    groups = [_with(group, [found for found in compared if found.group == group.name], score_format) for group in groups]
    family = sum(found.measure == "final" and found.holm is not None for found in compared)
    return Summary(
        experiments=experiments, runs=len(kept), score_format=score_format, groups=groups, comparisons=family, notes=notes
    )


def is_baseline(method: str) -> bool:
    """Whether a method is a baseline, which is any but DCR and its variants."""
    return "dcr" not in method.lower()


def best(methods: Sequence[Method], measure: Measure) -> Method | None:
    """Select the method with the best mean; methods with a value for every seed precede the others."""
    known = [(found, method) for method in methods if (found := method.of(measure)) is not None]
    return max(known, key=lambda pair: (pair[0].complete, pair[0].mean))[1] if known else None


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
    methods = [_method(by_method[method], sites) for method in in_order(by_method)]
    return Group(
        name=name,
        score=runs[0].train_info.score,
        teacher=mean([finite(run.train_info.teacher.get(run.train_info.score)) for run in runs]),
        teacher_eval=mean([finite(run.train_info.teacher_eval.get(run.train_info.score)) for run in runs]),
        sites=sites,
        epochs=max((point.epoch for run in runs for point in run.train_info.points), default=0.0),
        methods=[replace(one, standing={m: _standing(one, methods, m) for m in MEASURES}) for one in methods],
        comparisons=[],
        notes=findings.notes(by_method, methods),
        findings=[],
    )


def _method(runs: list[Result], sites: list[str]) -> Method:
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
        held=[_held(runs, fraction) for fraction in FRACTIONS],
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


def _held(runs: list[Result], fraction: float) -> Held:
    teachers = [finite(run.train_info.teacher_eval.get(run.train_info.score)) for run in runs]
    found = [(run, begin) for run in runs if (begin := held_from(run, fraction)) is not None]
    points = [run.train_info.points[begin] for run, begin in found] if len(found) == len(runs) else []
    return Held(
        fraction=fraction,
        defined=all(teacher is not None and teacher > 0 for teacher in teachers),
        held=len(found),
        seeds=len(runs),
        epochs=estimate([point.epoch for point in points]),
        seconds=estimate([point.seconds for point in points]),
        flops=estimate([point.flops for point in points]),
    )


def _paired(a: Method, b: Method, measure: Measure) -> Difference | None:
    common = [seed for seed in a.seeds if seed in b.by_seed[measure]]
    return paired_difference([(a.by_seed[measure][seed], b.by_seed[measure][seed]) for seed in common])


def _standing(method: Method, methods: list[Method], measure: Measure) -> Standing:
    leader = best(methods, measure)
    if leader is None or len(methods) < 2:  # nothing to compare with
        return "unknown"
    if method is leader:
        return "best"
    difference = _paired(method, leader, measure)
    if difference is None or difference.excludes_zero is None:
        return "unknown"
    return "worse" if difference.excludes_zero else "like the best"


def _comparisons(group: Group, measure: Measure) -> list[Comparison]:
    baseline = best([method for method in group.methods if is_baseline(method.method)], measure)
    if baseline is None:
        return []
    found = [(method, _paired(method, baseline, measure)) for method in group.methods if method is not baseline]
    return [
        Comparison(
            group=group.name,
            measure=measure,
            method=method.method,
            label=method.label,
            baseline=baseline.method,
            baseline_label=baseline.label,
            difference=difference,
            holm=None,
        )
        for method, difference in found
        if difference is not None
    ]


def _adjusted(found: list[list[Comparison]]) -> list[Comparison]:
    flat = [comparison for comparisons in found for comparison in comparisons]
    adjusted: dict[int, float] = {}
    for measure in MEASURES:
        family = [
            (index, comparison.difference.p)
            for index, comparison in enumerate(flat)
            if comparison.measure == measure and comparison.difference.p is not None
        ]
        adjusted |= dict(zip((index for index, _ in family), holm([p for _, p in family]), strict=True))
    return [replace(comparison, holm=adjusted.get(index)) for index, comparison in enumerate(flat)]


def _with(group: Group, comparisons: list[Comparison], score_format: ScoreFormat) -> Group:
    compared = replace(group, comparisons=comparisons)
    return replace(compared, findings=findings.of_group(compared, score_format))

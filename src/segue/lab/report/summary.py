"""Summary: what saved runs say about the methods, group by group."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from segue.lab.report import findings, tables
from segue.lab.report.curves import Line, early_mean, finite, gather, last, mean, profile, whole_looks
from segue.lab.report.table_one import TableOne, table_one
from segue.reporting.formatting import ScoreFormat, counted, listed
from segue.reporting.palette import in_order
from segue.reporting.records import Result
from segue.reporting.statistics import Difference, Estimate, estimate, holm, paired_difference

SHARES = (0.90, 0.95, 0.99)  # of the teacher's score, to be held by the students alone
ROUNDING = 1e-9  # 0.9 * 0.8 is a little more than 0.72

Measure = Literal["final", "area"]
MEASURES: tuple[Measure, ...] = ("final", "area")
Standing = Literal["best", "like the best", "worse", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Held:
    """When the students alone held a share of the teacher's score: from then on no look found less."""

    share: float
    defined: bool  # a teacher without a positive score has no share to hold
    held: int  # in so many seeds
    seeds: int
    epochs: Estimate | None  # all three only where every seed held it
    seconds: Estimate | None
    flops: Estimate | None


@dataclass(frozen=True, kw_only=True)
class Method:
    """What all seeds of one method in one group say."""

    method: str
    label: str
    seeds: list[int]
    final: Estimate | None  # the score of the students alone on all examples held out
    area: Estimate | None  # their mean score over the epochs of the run
    held: list[Held]  # one per share
    step_seconds: Estimate | None
    step_flops: Estimate | None
    seconds: Estimate | None
    flops: Estimate | None
    peak_memory: Estimate | None
    standing: dict[Measure, Standing]
    line: Line
    early_gradient: list[Estimate | None]  # by site, mean over the first fifth of the training
    early_drift: list[Estimate | None]  # of the model as it trains, likewise
    last_drift: list[Estimate | None]  # of the students alone, at the last look
    table_one: TableOne
    runs: list[Result] = field(repr=False)
    by_seed: dict[Measure, dict[int, float | None]] = field(repr=False)

    def of(self, measure: Measure) -> Estimate | None:
        """Give the estimate of one measure."""
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
    teacher: float | None  # the untouched model on all examples held out, mean over the runs
    teacher_look: float | None  # and on the examples of the looks
    sites: list[str]
    epochs: float
    methods: list[Method]
    comparisons: list[Comparison]
    notes: list[str]
    findings: list[str]

    @property
    def shown_sites(self) -> list[int]:
        """Choose the first, a middle and the last site, as the paper does with blocks 0, 7 and 11 of 12."""
        end = len(self.sites) - 1
        return sorted({0, round(7 / 11 * end), end}) if self.sites else []

    @property
    def anneal_end(self) -> float:
        """The share of the training at the last look that found a teacher's share, of any method; 1 if none did."""
        looks = [
            (progress, alpha)
            for method in self.methods
            for progress, alpha in zip(method.line.progress, method.line.whole["alpha"].mean, strict=True)
        ]
        return max((progress for progress, alpha in looks if alpha), default=1.0)

    def method(self, name: str) -> Method | None:
        """Find a method by its name."""
        return next((method for method in self.methods if method.method == name), None)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Everything that tables, figures and the report need."""

    experiments: list[str]
    runs: int
    score_format: ScoreFormat
    groups: list[Group]
    comparisons: int  # of one measure, over all groups, with a p-value
    notes: list[str]

    @property
    def methods(self) -> list[tuple[str, str]]:
        """List every method and its label once, in the order of the paper."""
        labels = {method.method: method.label for group in reversed(self.groups) for method in group.methods}
        return [(name, labels[name]) for name in in_order(labels)]


def summarize(results: list[Result]) -> Summary:
    """Summarize saved runs: methods are compared within a group, over seeds.

    >>> summarize([]).groups
    []
    """
    kept, notes = _without_doubles(results)
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


def markdown(summary: Summary) -> str:
    """Write the tables as Markdown."""
    return tables.markdown(summary)


def csv(summary: Summary) -> str:
    """Write one row of plain numbers per group and method."""
    return tables.csv(summary)


def is_baseline(method: str) -> bool:
    """Say whether a method is one that DCR has to beat."""
    return "dcr" not in method.lower()


def best(methods: Sequence[Method], measure: Measure) -> Method | None:
    """Choose the method with the best mean; one whose every seed came through goes before any other."""
    known = [(found, method) for method in methods if (found := method.of(measure)) is not None]
    return max(known, key=lambda pair: (pair[0].complete, pair[0].mean))[1] if known else None


def _without_doubles(results: list[Result]) -> tuple[list[Result], list[str]]:
    kept: dict[tuple[str, str, str, int], Result] = {}
    doubles = []
    for run in results:
        info = run.run_info
        if kept.setdefault((info.experiment, info.group, info.method, info.seed), run) is not run:
            doubles.append(info.name)
    if not doubles:
        return list(kept.values()), []
    return list(kept.values()), [
        f"{counted(len(doubles), 'run')} left out, of the same method, group and seed as another: {listed(doubles)}."
    ]


def _group_order(names: list[str]) -> list[str]:
    """Order groups by the numbers in their names: shares in percent fall, everything else rises."""

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
        teacher_look=mean([finite(run.train_info.teacher_look.get(run.train_info.score)) for run in runs]),
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
        held=[_held(runs, share) for share in SHARES],
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
        table_one=table_one(runs, sites),
        runs=runs,
        by_seed={"final": finals, "area": areas},
    )


def area(run: Result) -> float | None:
    """Average the students' score over the epochs of a run; a look without a finite score leaves no area."""
    epochs = {float(point.step): point.epoch for point in run.train_info.points}
    looks = whole_looks(run, "students")
    points = [(epochs[step], value) for step, value in looks if value is not None]
    if not points or len(points) < len(looks):
        return None
    length = points[-1][0] - points[0][0]
    if length <= 0:
        return points[-1][1]
    return sum((right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in pairwise(points)) / length


def held_from(run: Result, share: float) -> int | None:
    """Find the point from which on the students alone hold a share of the teacher's score, at every later look too."""
    teacher = finite(run.train_info.teacher_look.get(run.train_info.score))
    begin: int | None = None
    for index, point in enumerate(run.train_info.points):
        if run.train_info.score not in point.students:
            continue
        value = finite(point.students[run.train_info.score])
        enough = teacher is not None and value is not None and value >= share * teacher - ROUNDING
        begin = (index if begin is None else begin) if enough else None
    return begin


def _held(runs: list[Result], share: float) -> Held:
    teachers = [finite(run.train_info.teacher_look.get(run.train_info.score)) for run in runs]
    found = [(run, begin) for run in runs if (begin := held_from(run, share)) is not None]
    points = [run.train_info.points[begin] for run, begin in found] if len(found) == len(runs) else []
    return Held(
        share=share,
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
    if leader is None or len(methods) < 2:  # nothing to stand against
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
    return replace(compared, findings=findings.sentences(compared, score_format))

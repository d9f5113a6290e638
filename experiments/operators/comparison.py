"""The comparison of operators: how much of the teacher each one recovers, by which method. Only from saved runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

from segue.lab.report.curves import finite, over_sites
from segue.lab.report.table_one import rebuilt
from segue.reporting.records import Result
from segue.reporting.statistics import Difference, Estimate, estimate, holm_selected, paired_difference

if TYPE_CHECKING:
    from segue.lab.report.summary import Group, Summary

Kind = Literal["recovered", "cosine"]
KINDS: tuple[Kind, ...] = ("recovered", "cosine")


@dataclass(frozen=True, kw_only=True)
class Lead:
    """The best method of an operator against the next, seed by seed."""

    best: str
    next: str
    difference: Difference
    holm: float | None = None  # the p-value, adjusted for all pairs of methods of all operators: the data chose this pair


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator under every method."""

    name: str
    student: str  # with its settings
    found: dict[Kind, dict[str, Estimate | None]]  # by method
    leads: dict[Kind, Lead | None]  # None where fewer than two methods have a value
    by_seed: dict[Kind, dict[str, dict[int, float | None]]]  # by method, then by seed
    parameters: list[float]  # what its runs counted, one value unless their plans differ
    step: list[float]
    teachers: list[float]

    def ranked(self, kind: Kind) -> list[str]:
        """List the methods that have a value, best mean first; methods with a value for every seed precede the others."""
        known = {method: one for method, one in self.found[kind].items() if one is not None}
        return sorted(known, key=lambda method: (known[method].complete, known[method].mean), reverse=True)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything the report says about operators, except their speed."""

    score: str
    methods: list[tuple[str, str]]  # names and labels
    operators: list[Operator]  # the one that recovers most comes first

    def label(self, method: str) -> str:
        """Return the label of a method."""
        return dict(self.methods)[method]

    def seeds(self, kind: Kind) -> list[int]:
        """List how many seeds the means are over, fewest first."""
        found = [one for operator in self.operators for one in operator.found[kind].values()]
        return sorted({one.n for one in found if one is not None})


def recovered(run: Result) -> float | None:
    """Divide the students' final score by the teacher's; None where the teacher's is not above zero."""
    train = run.train_info
    teacher, final = finite(train.teacher.get(train.score)), finite(train.final.get(train.score))
    return None if final is None or teacher is None or teacher <= 0 else final / teacher


def last_cosine(run: Result) -> float | None:
    """Average the interface cosine over the sites, at the last evaluation that measured it; None if a site's is not finite."""
    cosine = next((point.cosine for point in reversed(run.train_info.points) if point.cosine), {})
    total = finite(over_sites(cosine))
    return None if total is None else total / len(cosine)


def saved_students(runs: Sequence[Result]) -> list[Mapping[str, Any]]:
    """List the different students that the plans of runs name."""
    plans = [run.run_info.config.get("plan") for run in runs]
    students = [plan.get("student") for plan in plans if isinstance(plan, Mapping)]
    return list({_key(student): student for student in students if isinstance(student, Mapping)}.values())


def compare(summary: Summary) -> Comparison | None:
    """Compare operators: groups of one student each. None unless two of them have different students."""
    groups = [(group, students[0]) for group in summary.groups if len(students := saved_students(_runs(group))) == 1]
    if len({_key(student) for _, student in groups}) < 2:
        return None
    shared = _shared_parts([student for _, student in groups])
    operators = sorted((_operator(group, described(student, shared)) for group, student in groups), key=_order, reverse=True)
    present = {method.method for group, _ in groups for method in group.methods}
    methods = [(name, label) for name, label in summary.methods if name in present]
    return Comparison(score=groups[0][0].score, methods=methods, operators=_adjusted(operators))


def described(student: Mapping[str, Any], leave_out: Sequence[str] = ()) -> str:
    """Format a saved student as Python code.

    >>> described({"kind": "students.Linformer", "rank": 8, "tokens": None, "init": {"kind": "students.Kaiming"}}, ["init"])
    'Linformer(rank=8)'
    """
    name = str(student.get("kind", student.get("unsaved", "student"))).removeprefix("students.")
    settings = {k: v for k, v in student.items() if k not in ("kind", "unsaved", *leave_out) and v not in (None, [])}
    return f"{name}({', '.join(f'{key}={_formatted(value)}' for key, value in settings.items())})"


def across(a: Operator, b: Operator, kind: Kind) -> Difference | None:
    """Compare two operators by seed, each under its best method."""
    first, second = a.ranked(kind), b.ranked(kind)
    return compared_by_seed(a.by_seed[kind][first[0]], b.by_seed[kind][second[0]]) if first and second else None


def compared_by_seed(a: Mapping[int, float | None], b: Mapping[int, float | None]) -> Difference | None:
    """Compare by seed; without a p-value where there are too few seeds, or all differ by the same."""
    found = paired_difference([(a[seed], b[seed]) for seed in a if seed in b])
    return replace(found, p=None) if found is not None and found.untested else found


def _operator(group: Group, student: str) -> Operator:
    measured: dict[Kind, Callable[[Result], float | None]] = {"recovered": recovered, "cosine": last_cosine}
    by_seed = {
        kind: {method.method: {run.run_info.seed: read(run) for run in method.runs} for method in group.methods}
        for kind, read in measured.items()
    }
    costs = [cost for run in _runs(group) if (cost := rebuilt(run.train_info.cost)) is not None]
    bare = Operator(
        name=group.name,
        student=student,
        found={kind: {name: estimate(list(seeds.values())) for name, seeds in by_seed[kind].items()} for kind in KINDS},
        leads={},
        by_seed=by_seed,
        parameters=sorted({float(cost.student_only.parameters) for cost in costs}),
        step=sorted({float(cost.student_only.flops) for cost in costs}),
        teachers=sorted({float(sum(cost.teachers.values())) for cost in costs}),
    )
    return replace(bare, leads={kind: _lead(bare, kind) for kind in KINDS})


def _runs(group: Group) -> list[Result]:
    return [run for method in group.methods for run in method.runs]


def _order(operator: Operator) -> tuple[bool, float]:
    best = next((operator.found["recovered"][method] for method in operator.ranked("recovered")), None)
    return (False, float("-inf")) if best is None else (best.complete, best.mean)


def _lead(operator: Operator, kind: Kind) -> Lead | None:
    ranked = operator.ranked(kind)
    if len(ranked) < 2:
        return None
    difference = compared_by_seed(operator.by_seed[kind][ranked[0]], operator.by_seed[kind][ranked[1]])
    return None if difference is None else Lead(best=ranked[0], next=ranked[1], difference=difference)


def _adjusted(operators: list[Operator]) -> list[Operator]:
    """Adjust the p-values of the leads of one kind for every pair of methods that could have led, over all operators."""
    for kind in KINDS:
        p_values: dict[tuple[int, frozenset[str]], float | None] = {}
        for i, one in enumerate(operators):
            for a, b in combinations(one.by_seed[kind], 2):
                difference = compared_by_seed(one.by_seed[kind][a], one.by_seed[kind][b])
                p_values[i, frozenset((a, b))] = None if difference is None else difference.p
        leads = {i: lead for i, one in enumerate(operators) if (lead := one.leads[kind]) is not None}
        adjusted = holm_selected(p_values, [(i, frozenset((lead.best, lead.next))) for i, lead in leads.items()])
        for (i, lead), p in zip(leads.items(), adjusted, strict=True):
            operators[i] = replace(operators[i], leads=operators[i].leads | {kind: replace(lead, holm=p)})
    return operators


def _shared_parts(students: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the nested settings, such as the initialisation, that are the same in every student; plain ones are always shown."""
    first = students[0]
    parts = [name for name, value in first.items() if isinstance(value, Mapping)]
    return [name for name in parts if all(_key(other.get(name)) == _key(first[name]) for other in students)]


def _formatted(value: Any) -> str:
    if isinstance(value, Mapping):
        return described(value)
    return f"[{', '.join(map(_formatted, value))}]" if isinstance(value, list | tuple) else repr(value)


def _key(data: Any) -> str:
    return json.dumps(data, sort_keys=True, default=str)

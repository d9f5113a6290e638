"""The comparison of operators as text: findings, tables and what the page shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from experiments.operators.comparison import KINDS, Comparison, Kind, Lead, Operator, across
from experiments.operators.speed import Faster, Speed
from segue.lab.report import tables
from segue.reporting.formatting import NOTHING, ScoreFormat, counted, flops, listed, p_value, shortened, significant
from segue.reporting.palette import COLOURS, MARKERS, LineStyle
from segue.reporting.statistics import ALPHA, FEWEST, Estimate

SHARE = ScoreFormat(percent=True)
COSINE = ScoreFormat(percent=False)
SCALES = {"recovered": SHARE, "cosine": COSINE}
BEST = "best"
MEASURE = "python experiments/operators/speed.py --out FOLDER"
NOT_MEASURED = f"The folder of the runs has no speed.json, so this page has no speeds. To measure them: {MEASURE}."
COUNTED = (
    "Operations are those of matrix products, convolutions and attention; a Fourier transform is not counted. "
    "The runs save the counts of the complete model; speed.json has those of one module, at the sizes named there."
)


def title(kind: Kind, compared: Comparison) -> str:
    """Name a matrix."""
    return f"Share of the teacher's {compared.score} recovered" if kind == "recovered" else "Interface cosine at the end"


def reading(kind: Kind, compared: Comparison) -> str:
    """Say what the numbers of a matrix are and how to read them."""
    what = {
        "recovered": f"Final {compared.score} of the students alone, over the teacher's on the same examples",
        "cosine": "Mean over the sites, at the last evaluation, on the students' own activations; 1 is the same direction",
    }[kind]
    counts = compared.seeds(kind)
    if not counts:
        return f"{what}. Not measured in these runs."
    if counts == [1]:
        return f"{what}. One seed (n = 1): no intervals, no tests."
    n = f"n = {counts[-1]} seeds" + ("" if len(counts) == 1 else ", fewer where noted")
    return (
        f"{what}: mean ± half of the 95 % interval, {n}. “{BEST}” marks a row only where its best mean is significantly "
        f"above the next (paired by seed, p < {ALPHA} after Holm's adjustment over all pairs of methods of all rows)."
    )


def leads(lead: Lead | None) -> bool:
    """Whether the best method is above the next by more than the noise explains."""
    return lead is not None and lead.difference.mean > 0 and lead.holm is not None and lead.holm < ALPHA


def sentences(compared: Comparison, speed: Speed | None) -> list[str]:
    """Say what the numbers show, and what they do not."""
    found = [_most(compared), _methods(compared), "" if speed is None else _fastest(speed)]
    return [sentence for sentence in found if sentence]


def markdown(compared: Comparison, speed: Speed | None) -> str:
    """Write the compared as Markdown."""
    parts = ["# Operators", "", *tables.bullets(sentences(compared, speed))]
    for kind in KINDS:
        if compared.seeds(kind):
            parts += ["", f"## {tables.escaped(title(kind, compared))}", "", tables.escaped(reading(kind, compared)), ""]
            rows = [
                [operator.name, *(_with_mark(operator, kind, method, compared) for method, _ in compared.methods)]
                for operator in compared.operators
            ]
            parts += tables.as_table(["Operator", *(label for _, label in compared.methods)], rows)
    headings, costs = cost_table(compared, speed)
    parts += ["", "## Parameters and operations", "", COUNTED, "", *tables.as_table(headings, costs)]
    parts += ["", "## Inference speed-up over the teacher", ""]
    if speed is None:
        return "\n".join([*parts, NOT_MEASURED, ""])
    headings, times = speed_table(speed)
    return "\n".join([*parts, tables.escaped(speed_reading(speed)), "", *tables.as_table(headings, times), ""])


def csv(compared: Comparison) -> str:
    """Write one row of plain numbers per operator and method; what is unknown is empty."""
    return tables.as_csv(
        [
            {"operator": operator.name, "method": method, "student": operator.student}
            | tables.estimated("recovered", operator.found["recovered"].get(method))
            | tables.estimated("last_cosine", operator.found["cosine"].get(method))
            for operator in compared.operators
            for method in operator.by_seed["recovered"]
        ]
    )


def page_data(compared: Comparison, speed: Speed | None) -> dict[str, Any]:
    """Gather what the page shows."""
    return {
        "findings": sentences(compared, speed),
        "matrices": [_matrix(kind, compared) for kind in KINDS if compared.seeds(kind)],
        "counted": COUNTED,
        "costs": cost_table(compared, speed),
        "speed": None if speed is None else _page_speed(speed),
        "speed_hint": NOT_MEASURED if speed is None else speed_reading(speed),
    }


def operator_styles(names: Sequence[str]) -> dict[str, LineStyle]:
    """Give every operator a style of its own, in the order of the names."""
    many = len(COLOURS)
    return {name: LineStyle(*COLOURS[i % many], (), MARKERS[(i + i // many) % len(MARKERS)]) for i, name in enumerate(names)}


def cost_table(compared: Comparison, speed: Speed | None) -> tuple[list[str], list[list[str]]]:
    """Write what the runs counted for each operator, and the module compared with its teacher; empty columns are omitted."""
    longest = speed.tokens[-1] if speed and speed.tokens else 0
    at_longest = {n: points[-1] for n, points in (speed.timed if speed else {}).items() if points[-1].tokens == longest}
    compared_too = {operator.name for operator in compared.operators}
    only_timed = [name for name in at_longest if name not in compared_too]
    columns: list[tuple[str, Callable[[Operator], str]]] = [
        ("Student", lambda one: one.student),
        ("Parameters of the model, teachers gone", lambda one: _span(one.parameters, lambda value: f"{value:,.0f}")),
        ("A training step of the students", lambda one: _span(one.step, flops)),
        ("A forward of the teachers replaced", lambda one: _span(one.teachers, flops)),
    ]
    rows = [[operator.name, *(read(operator) for _, read in columns)] for operator in compared.operators]
    rows += [[name, speed.students.get(name, NOTHING) if speed else NOTHING, *[NOTHING] * 3] for name in only_timed]
    headings = ["Operator", *(heading for heading, _ in columns)]
    if at_longest:
        headings += [f"Module's parameters / teacher's, {longest} tokens", f"Module's operations / teacher's, {longest} tokens"]
        for row in rows:
            module = at_longest.get(row[0])
            row += [NOTHING] * 2 if module is None else [_times(module.parameters), _times(module.operations)]
    shown = [i for i in range(len(headings)) if i < 2 or any(row[i] != NOTHING for row in rows)]
    return [headings[i] for i in shown], [[row[i] for i in shown] for row in rows]


def speed_table(speed: Speed) -> tuple[list[str], list[list[str]]]:
    """Write how many times faster each operator is, by the length of the sequence."""
    rows = []
    for name, points in speed.timed.items():
        at = {one.tokens: one.faster for one in points}
        rows.append([name, speed.students.get(name, NOTHING), *(_faster(at.get(tokens)) for tokens in speed.tokens)])
    return ["Operator", "Student", *(f"{tokens} tokens" for tokens in speed.tokens)], rows


def speed_reading(speed: Speed) -> str:
    """Say what was measured, where and how."""
    rounds = sorted({one.faster.rounds for points in speed.timed.values() for one in points})
    many = f"{rounds[0]} to {rounds[-1]}" if rounds[0] != rounds[-1] else str(rounds[0])
    return (
        f"Forward time of one attention module over that of its student, {speed.setting}; {speed.where}. Sizes of the students "
        f"are fixed, the sequence grows. Median over {many} interleaved rounds, in brackets the middle half of the rounds."
    )


def _most(compared: Comparison) -> str:
    """Name the operator that recovers most, and say whether it recovers more than the next one."""
    ranked = [one for one in compared.operators if one.ranked("recovered")]
    if not ranked:
        return f"No run ended with a finite {compared.score} and a teacher's above zero: no share can be computed."
    text = f"The operator with the highest mean share of the teacher's {compared.score} is {_described(ranked[0], compared)}"
    if len(ranked) < 2:
        return f"{text}."
    difference = across(ranked[0], ranked[1], "recovered")
    both = f"{text}; the next operator is {_described(ranked[1], compared)}"
    if difference is None or difference.p is None:
        return f"{both}. Whether they differ cannot be tested: that takes {FEWEST} common seeds with different values."
    outside = "more than the noise explains, taken alone, though the same scores chose the two"
    inside = "within the noise" if difference.p >= ALPHA else outside
    return f"{both}. The difference, {SHARE.difference(difference)}, p {_is(difference.p)}, is {inside}."


def _methods(compared: Comparison) -> str:
    """Say for how many operators the choice of the method matters more than the noise."""
    if len(compared.methods) < 2:
        return f"One method only, {shortened(compared.methods[0][1])}: methods are not compared."
    wins = Counter(compared.label(ranked[0]) for one in compared.operators if (ranked := one.ranked("recovered")))
    by_mean = listed([f"{shortened(label)} ({count} of {len(compared.operators)})" for label, count in wins.most_common()])
    tested = [(one, lead) for one in compared.operators if (lead := one.leads["recovered"]) and lead.holm is not None]
    head = f"Best method by the mean: {by_mean}"
    if not tested:
        return f"{head}. No difference can be tested: that takes {FEWEST} common seeds with different values."
    ahead = [(one, lead) for one, lead in tested if leads(lead)]
    family = f"after Holm's adjustment over all pairs of methods of {counted(len(tested), 'operator')}"
    if not ahead:
        return f"{head}. The best is significantly above the next ({family}) for none: these differences are within the noise."
    described = [
        f"{shortened(one.name)} ({shortened(compared.label(lead.best))}, {SHARE.change(lead.difference.mean)})"
        for one, lead in ahead
    ]
    rest = len(tested) - len(ahead)
    others = f"; for the other {rest} the difference is within the noise" if rest else ""
    return f"{head}. The best is significantly above the next ({family}) for {listed(described)}{others}."


def _fastest(speed: Speed) -> str:
    """Say which operator is fastest at the greatest length, and from which length on each one is faster than its teacher."""
    longest = speed.tokens[-1] if speed.tokens else 0
    there = {name: points[-1].faster for name, points in speed.timed.items() if points[-1].tokens == longest}
    if not there:
        return ""
    name = max(there, key=lambda one: there[one].median)
    text = f"At {longest} tokens the fastest is {shortened(name)}: {_faster(there[name])} times its teacher's speed"
    begins = {one: _wins_from(speed, one) for one in speed.timed}
    parts = [f"{shortened(one)} from {tokens}" for one, tokens in sorted(begins.items(), key=_by_length) if tokens is not None]
    never = [one for one, tokens in begins.items() if tokens is None]
    sure = f"Faster in three quarters of the rounds, at every longer sequence too: {listed(parts)} tokens on."
    return f"{text}." + (f" {sure}" if parts else "") + (f" At no measured length: {listed(never)}." if never else "")


def _by_length(pair: tuple[str, int | None]) -> int:
    return pair[1] or 0


def _wins_from(speed: Speed, name: str) -> int | None:
    """Find the length from which on a student is faster in three quarters of the rounds, at every longer one too."""
    begin = None
    for one in speed.timed[name]:
        begin = (one.tokens if begin is None else begin) if one.faster.low > 1 else None
    return begin


def _matrix(kind: Kind, compared: Comparison) -> dict[str, Any]:
    means = [one.mean for operator in compared.operators for one in operator.found[kind].values() if one is not None]
    low, spread = min(means), max(means) - min(means)

    def cell(operator: Operator, method: str) -> dict[str, Any] | None:
        found = operator.found[kind].get(method)
        if found is None:
            return None
        shade = round((found.mean - low) / spread, 3) if spread else 0
        lead = operator.leads[kind]
        mark = BEST if leads(lead) and lead is not None and lead.best == method else ""
        return {"text": _cell(found, kind, compared), "shade": shade, "mark": mark}

    return {
        "id": kind,
        "title": title(kind, compared),
        "hint": reading(kind, compared),
        "methods": [label for _, label in compared.methods],
        "rows": [
            {"name": one.name, "student": one.student, "cells": [cell(one, name) for name, _ in compared.methods]}
            for one in compared.operators
        ],
    }


def _page_speed(speed: Speed) -> dict[str, Any]:
    style_of = operator_styles(list(speed.timed))
    return {
        "series": [
            {
                "name": name,
                **vars(style_of[name]),
                "points": [[one.tokens, float(f"{one.faster.median:.6g}")] for one in points],
            }
            for name, points in speed.timed.items()
        ],
        "table": speed_table(speed),
    }


def _with_mark(operator: Operator, kind: Kind, method: str, compared: Comparison) -> str:
    found, lead = operator.found[kind].get(method), operator.leads[kind]
    if found is None:
        return NOTHING
    text = _cell(found, kind, compared)
    return f"{text} ({BEST})" if leads(lead) and lead is not None and lead.best == method else text


def _cell(found: Estimate, kind: Kind, compared: Comparison) -> str:
    fewer = "" if found.n == compared.seeds(kind)[-1] else f" (n = {found.n})"
    return SCALES[kind].estimate(found) + fewer


def _described(operator: Operator, compared: Comparison) -> str:
    method = operator.ranked("recovered")[0]
    found = operator.found["recovered"][method]
    n = "" if found is None else f", n = {found.n}"
    return f"{shortened(operator.name)} with {shortened(compared.label(method))} ({SHARE.estimate(found)}{n})"


def _faster(found: Faster | None) -> str:
    if found is None:
        return NOTHING
    median, low, high = (significant(float(f"{value:.2g}")) for value in (found.median, found.low, found.high))
    return median if found.rounds < 2 else f"{median} ({low} to {high})"


def _times(value: float | None) -> str:
    return NOTHING if value is None else significant(value)


def _span(values: Sequence[float], write: Callable[[float], str]) -> str:
    if not values:
        return NOTHING
    return write(values[0]) if len(values) == 1 else f"{write(values[0])} to {write(values[-1])}"


def _is(p: float) -> str:
    return p_value(p) if p < 0.001 else f"= {p_value(p)}"

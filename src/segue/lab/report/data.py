"""The data of the page: everything that it shows, as finite JSON."""

from __future__ import annotations

import math
from typing import Any

from segue.lab.report import choices, findings, settings, table_one, tables
from segue.lab.report.answer import answer
from segue.lab.report.curves import AXES, BY_SITE, OVERALL, Curve, Line, Seed
from segue.lab.report.summary import Group, Method, Summary
from segue.lab.report.table_one import BY_DEPTH
from segue.reporting.formatting import counted, duration, flops, listed, memory, significant
from segue.reporting.palette import line_styles
from segue.reporting.records import Result

DIGITS = 4  # of values by site, of which there are many; others have six


def page_data(summary: Summary, results: list[Result], title: str) -> dict[str, Any]:
    """Collect everything that the page shows, as finite JSON."""
    style_of = line_styles(name for name, _ in summary.methods)
    return {
        "title": title,
        "score": summary.groups[0].score if summary.groups else "score",
        "percent": summary.score_format.percent,
        "facts": _facts(summary),
        "provenance": settings.provenance(results),
        "answer": answer(summary),
        "findings": findings.overview(summary),
        "notes": summary.notes,
        "methods": [
            {"id": name, "label": label, "rank": tables.rank_text(summary, name), **vars(style_of[name])}
            for name, label in summary.methods
        ],
        "groups": [_group(group, summary) for group in summary.groups],
        "ranked": summary.ranks is not None,
        "events": settings.EVENTS,
        "compared": tables.COMPARED,
        "compared_reading": tables.reading(summary),
        "chosen": choices.CHOSEN,
        "reading": table_one.READING,
        "runs": [_run(result, summary) for result in results],
    }


def plain(value: Any) -> Any:
    """Convert anything to finite JSON: numbers that are not finite and unknown objects become text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def _facts(summary: Summary) -> list[list[str]]:
    seeds = sorted({len(method.seeds) for group in summary.groups for method in group.methods})
    sites = sorted({len(group.sites) for group in summary.groups})
    epochs = sorted({group.epochs for group in summary.groups})
    return [
        ["Experiment" if len(summary.experiments) == 1 else "Experiments", listed(summary.experiments)],
        ["Runs", str(summary.runs)],
        ["Methods", str(len(summary.methods))],
        ["Groups", listed([group.name for group in summary.groups]) if len(summary.groups) <= 4 else str(len(summary.groups))],
        ["Seeds per method", _range([str(count) for count in seeds])],
        ["Sites", _range([str(count) for count in sites])],
        ["Epochs", _range([significant(count) for count in epochs])],
    ]


def _range(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}" if values else "0"


def _group(group: Group, summary: Summary) -> dict[str, Any]:
    shown = tables.columns(group, summary.score_format)
    return {
        "name": group.name,
        "teacher": summary.score_format.value(group.teacher),
        "teacher_score": _rounded(group.teacher),
        "teacher_eval": _rounded(group.teacher_eval),
        "sites": group.sites,
        "shown": group.shown_sites,
        "notes": group.notes,
        "findings": group.findings,
        "columns": [column.heading for column in shown],
        "rows": [
            {
                "method": method.method,
                "cells": [_cell(column.cell(method)) for column in shown],
                "mark": tables.MARKS[method.standing["final"]],
            }
            for method in group.methods
        ],
        "comparisons": [
            {
                "title": findings.measure_name(measure, group.score),
                "rows": [[_cell(cell) for cell in row] for row in tables.compared_rows(group, measure, summary.score_format)],
            }
            for measure in findings.MEASURE_NAMES
        ],
        "one_seed": group.one_seed,
        "hint": tables.hint([group]),
        "differences": settings.differences(group),
        "events": settings.events(group),
        "chosen": choices.rows(group, summary.score_format),
        "chosen_reading": choices.reading(group),
        "table_one": _table_one(group),
        "anneal_end": _rounded(group.anneal_end),
        "lines": {method.method: _line(method) for method in group.methods},
        "ends": {method.method: _end(method) for method in group.methods},
        "depth": {
            name: {method.method: _curve(getattr(method, name)) for method in group.methods}
            for name in ("early_gradient", "early_drift", "last_drift")
        }
        | {name: {method.method: _curve(method.table_one.by_depth[name]) for method in group.methods} for name in BY_DEPTH},
        "wins": {method.method: _win(method, group, summary) for method in group.methods},
    }


def _table_one(group: Group) -> dict[str, Any] | None:
    """Collect the section on costs and variance; None if these runs measured neither."""
    aspects, numbers = tables.shown_aspects(group), tables.cost_columns(group)
    if not aspects:
        return None
    return {
        "findings": table_one.findings(group),
        "aspects": [aspect.heading for aspect in aspects],
        "claims": [
            {"method": method.method, "cells": [table_one.against_paper(method, aspect) for aspect in aspects]}
            for method in group.methods
        ],
        "columns": [column.heading for column in numbers],
        "numbers": [
            {"method": method.method, "cells": [column.cell(method).text for column in numbers]} for method in group.methods
        ],
    }


def _win(method: Method, group: Group, summary: Summary) -> dict[str, Any]:
    means = [one.final.mean for one in group.methods if one.final]
    spread = max(means) - min(means) if means else 0.0
    return {
        "text": summary.score_format.estimate(method.final),
        "mark": tables.MARKS[method.standing["final"]],
        "shade": 0 if method.final is None or not spread else round((method.final.mean - min(means)) / spread, 3),
    }


def _line(method: Method) -> dict[str, Any]:
    line = method.line
    return {
        "x": _axes(line),
        "marks": {axis: [_rounded(x) for x in line.marks(getattr(line, axis))] for axis in AXES},
        "overall": {quantity: _curve(line.overall[quantity]) for quantity in OVERALL},
        "losses": {name: _curve(curve) for name, curve in line.losses.items() if curve.known},
        "sites": {
            quantity: [_curve(curve, DIGITS) for curve in line.by_site[quantity].values()]
            for quantity in BY_SITE
            if any(curve.known for curve in line.by_site[quantity].values())
        },
        "seeds": [
            {"seed": seed.seed, "x": _axes(seed)}
            | {name: [_rounded(value, DIGITS) for value in values] for name, values in seed.scores.items()}
            for seed in line.seeds
            if len(line.seeds) > 1
        ],
    }


def _axes(line: Line | Seed) -> dict[str, list[float | None]]:
    return {axis: [_rounded(x) for x in getattr(line, axis)] for axis in AXES}


def _end(method: Method) -> list[float | None] | None:
    """Return the work of a method, its final score and the half width of its interval."""
    if method.final is None or method.flops is None:
        return None
    return [_rounded(method.flops.mean), _rounded(method.final.mean), _rounded(method.final.half)]


def _curve(curve: Curve, digits: int = 6) -> list[list[float | None]] | None:
    if not curve.known:
        return None
    halves = [_rounded(value, digits) for value in curve.half]
    means = [_rounded(value, digits) for value in curve.mean]
    return [means] if all(half is None for half in halves) else [means, halves]


def _cell(cell: tables.Cell) -> list[Any]:
    return [cell.text, _rounded(cell.sort)]


def _run(result: Result, summary: Summary) -> dict[str, Any]:
    info, train = result.run_info, result.train_info
    final = train.final.get(train.score)
    facts = [
        f"final {train.score} {summary.score_format.value(final if final is not None and math.isfinite(final) else None)}",
        counted(train.total_steps, "step"),
        duration(train.seconds),
        flops(train.flops),
        memory(train.peak_memory),
    ]
    return {
        "name": info.name,
        "method": info.method,
        "label": info.label,
        "group": info.group,
        "seed": info.seed,
        "facts": facts,
        "hash": info.config_hash,
        "config": plain(info.config),
        "meta": plain(result.meta_info),
    }


def _rounded(value: float | None, digits: int = 6) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short  # fewer letters in the page

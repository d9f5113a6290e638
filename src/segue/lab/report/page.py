"""The report: one HTML page that works offline, with figures and tables as files, made only from saved runs."""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path
from typing import Any

from segue.border import checked
from segue.lab.report import choices, figures, findings, table_one, tables
from segue.lab.report.curves import BY_SITE, OVERALL, Curve
from segue.lab.report.summary import Group, Method, Summary, summarize
from segue.lab.report.table_one import BY_DEPTH
from segue.reporting import html
from segue.reporting.formatting import counted, duration, flops, listed, memory, significant
from segue.reporting.palette import line_styles, require_matplotlib
from segue.reporting.records import Result, read_all, write_file

SCRIPTS = ("chart.js", "page.js")


@checked
def build(folder: Path, *, out: Path | None = None, title: str | None = None, reference: str | None = None) -> Path:
    """Write report.html, table.md, table.csv and figures/ from the runs below a folder, into it or into another.

    `reference` names the method that the others are compared with; without it, that is the one that the experiment named before
    its runs, or else the best baseline of each group, and the p-values are adjusted for its choice.
    """
    require_matplotlib()
    results = read_all(folder)
    summary = summarize(results, reference=reference)
    out = folder if out is None else out
    drawn = figures.draw(summary, out / "figures")
    write_file(tables.markdown(summary), out / "table.md")
    write_file(tables.csv(summary), out / "table.csv")
    data = page_data(summary, results, title or " and ".join(summary.experiments))
    data["files"] = ["table.csv", "table.md", *(f"figures/{path.name}" for path in drawn)]
    return write_file(page(data), out / "report.html")


def page(data: dict[str, Any]) -> str:
    """Render the page: style, scripts and data inside, nothing fetched, nothing of the runs read as HTML."""
    return html.page(
        files("segue.lab.report"), "page.html", scripts=SCRIPTS, kind="Segue report", title=str(data["title"]), data=data
    )


def page_data(summary: Summary, results: list[Result], title: str) -> dict[str, Any]:
    """Collect everything that the page shows, as finite JSON."""
    style_of = line_styles(name for name, _ in summary.methods)
    return {
        "title": title,
        "score": summary.groups[0].score if summary.groups else "score",
        "percent": summary.score_format.percent,
        "facts": _facts(summary),
        "findings": findings.overview(summary),
        "notes": summary.notes,
        "methods": [
            {"id": name, "label": label, "rank": tables.rank_text(summary, name), **vars(style_of[name])}
            for name, label in summary.methods
        ],
        "groups": [_group(group, summary) for group in summary.groups],
        "ranked": summary.ranks is not None,
        "compared": tables.COMPARED,
        "compared_reading": tables.reading(summary),
        "chosen": choices.CHOSEN,
        "targets": tables.TARGETS,
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
                "rows": [
                    [_cell(cell) for cell in tables.compared(c, summary.score_format)]
                    for c in group.comparisons
                    if c.measure == measure
                ],
            }
            for measure in findings.MEASURE_NAMES
        ],
        "chosen": choices.rows(group, summary.score_format),
        "chosen_reading": choices.reading(group),
        "table_one": _table_one(group),
        "anneal_end": _rounded(group.anneal_end),
        "lines": {method.method: _line(method) for method in group.methods},
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
    line, axes = method.line, ("epoch", "seconds", "flops", "progress")
    return {
        "x": {axis: [_rounded(x) for x in getattr(line, axis)] for axis in axes},
        "marks": {axis: [_rounded(x) for x in line.marks(getattr(line, axis))] for axis in axes},
        "overall": {quantity: _curve(line.overall[quantity]) for quantity in OVERALL},
        "sites": {quantity: [_curve(curve) for curve in line.by_site[quantity].values()] for quantity in BY_SITE},
    }


def _curve(curve: Curve) -> list[list[float | None]] | None:
    if not curve.known:
        return None
    return [[_rounded(value) for value in curve.mean], [_rounded(value) for value in curve.half]]


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


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")

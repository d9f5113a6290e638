"""`segue eval`: what a comparison of two models found."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Column, Table

from segue.cli.terminal import console, print_json, say, say_aside
from segue.convert import findings
from segue.convert.evaluate import evaluate
from segue.convert.options import EvalSettings


def show(settings: EvalSettings, out: Path, *, as_json: bool) -> None:
    """Compare, then print the tables and sentences, or the results as JSON."""
    results = evaluate(settings, out, say_aside if as_json else say)
    if as_json:
        print_json(results)
        return
    for table in _tables(results):
        console.print(table)
    for sentence in (findings.worse(results), *findings.sentences(results)):
        say(f"- {sentence}")
    say(f"Next: open {out / 'index.html'}")


def _tables(results: dict[str, Any]) -> list[Table]:
    table = Table(Column("", no_wrap=True), "original", "converted", "compared", box=box.SIMPLE_HEAD)
    for part, rows in groupby(findings.rows(results), lambda row: row.part):
        table.add_section()
        table.add_row(part, style="dim")
        for row in rows:
            table.add_row(*row[:4], style="bold" if row.worse else None)
    branches = findings.branch_rows(results)
    if not branches:
        return [table]
    others = Table(Column("", no_wrap=True), *findings.BRANCH_HEADINGS[1:], box=box.SIMPLE_HEAD)
    for cells in branches:
        others.add_row(*cells)
    return [table, others]

"""Results in a terminal: a table that fits, and what was found."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from segue.lab.report.findings import overview
from segue.lab.report.summary import Summary
from segue.lab.report.tables import columns

SHOWN = ("final", "area", "epochs_1", "step_flops")  # the report has the others


def show(summary: Summary, console: Console) -> None:
    """Print for every group what people look for first, then the findings."""
    for group in summary.groups:
        setting = "" if group.name == "all" else f"{group.name}: "
        title = f"{setting}students alone; teacher {summary.score_format.value(group.teacher)}"
        table = Table(title=escape(title), box=box.SIMPLE_HEAD)
        chosen = [column for column in columns(group, summary.score_format) if column.key in SHOWN]
        table.add_column("Method", no_wrap=True)
        for column in chosen:
            table.add_column(column.heading, justify="right")
        for method in group.methods:
            table.add_row(escape(method.label), *(escape(unbroken(column.cell(method).text)) for column in chosen))
        console.print(table)
    for finding in overview(summary):
        console.print(f"- {escape(finding)}", soft_wrap=True)


def unbroken(text: str) -> str:
    """Keep a number, its interval and its unit on one line."""
    return text.replace(" ", "\u00a0")

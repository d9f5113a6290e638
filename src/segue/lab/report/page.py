"""The report: one HTML page that works offline, with figures and tables beside it, made only from saved runs."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from segue.lab.report import figures
from segue.lab.report.page_data import page_data
from segue.lab.report.summary import csv, markdown, summarize
from segue.reporting import html
from segue.reporting.palette import require_matplotlib
from segue.reporting.records import read_all, write_file

SCRIPTS = ("chart.js", "page.js")


def build(folder: Path, *, title: str | None = None) -> Path:
    """Write report.html, table.md, table.csv and figures/ from the runs below a folder."""
    require_matplotlib()
    results = read_all(folder)
    summary = summarize(results)
    drawn = figures.draw(summary, folder / "figures")
    write_file(markdown(summary), folder / "table.md")
    write_file(csv(summary), folder / "table.csv")
    data = page_data(summary, results, title or " and ".join(summary.experiments))
    data["files"] = ["table.csv", "table.md", *(f"figures/{path.name}" for path in drawn)]
    return write_file(page(data), folder / "report.html")


def page(data: dict[str, Any]) -> str:
    """Render the page: style, scripts and data inside, nothing fetched, nothing of the runs read as HTML."""
    return html.page(
        files("segue.lab.report"), "page.html", scripts=SCRIPTS, kind="Segue report", title=str(data["title"]), data=data
    )

"""The report: one HTML page that works offline, with figures and tables as files, made only from saved runs."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from segue.border import checked
from segue.lab.report import figures, tables
from segue.lab.report.data import page_data
from segue.lab.report.source import Source, read_grid
from segue.lab.report.summary import Summary, summarize
from segue.reporting import html
from segue.reporting.palette import require_matplotlib
from segue.reporting.records import write_file

SCRIPTS = ("chart.js", "heat.js", "download.js", "figures.js", "tables.js", "page.js")


@checked
def build(
    folder: Path,
    *,
    out: Path | None = None,
    title: str | None = None,
    reference: str | None = None,
    everything: bool = False,
) -> Path:
    """Write report.html, table.md, table.csv and figures/ from the runs of a grid, into its folder or into another.

    `reference` names the method that the others are compared with; without it, that is the one that the experiment named before
    its runs, or else the best other method of each group, and the p-values are adjusted for its choice. With `everything`,
    the runs of all folders below are taken, also of other experiments.
    """
    require_matplotlib()
    source = read_grid(folder, everything=everything)
    return write(source, summarize(source.results, reference=reference), folder if out is None else out, title)


def write(source: Source, summary: Summary, out: Path, title: str | None = None) -> Path:
    """Write the page of runs that are read and summarized, its tables and its figures."""
    require_matplotlib()
    drawn = figures.draw(summary, out / "figures")
    write_file(tables.markdown(summary), out / "table.md")
    write_file(tables.csv(summary), out / "table.csv")
    data = page_data(summary, source.results, title or " and ".join(summary.experiments))
    data["files"] = ["table.csv", "table.md", *(f"figures/{path.name}" for path in drawn)]
    return write_file(page(data), out / "report.html")


def page(data: dict[str, Any], *, live: bool = False) -> str:
    """Render the page: style, scripts and data inside, nothing of the runs read as HTML.

    It fetches nothing, unless it is `live`: then it asks the server that it came from for newer data.
    """
    return html.page(
        files("segue.lab.report"),
        "page.html",
        scripts=(*SCRIPTS, "live.js") if live else SCRIPTS,
        connects=live,
        kind="Segue report",
        title=str(data["title"]),
        data=data,
    )

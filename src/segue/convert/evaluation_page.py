"""The page of a comparison: one HTML file that works offline, with the figures inside it and as files."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from segue.convert import evaluation_text
from segue.convert.evaluation_figures import DARK, LIGHT, Figure, figures
from segue.reporting import html
from segue.reporting.records import write_file


def write(results: dict[str, Any], out: Path) -> Path:
    """Write the figures as PNG files, and index.html."""
    drawn = [(figure, figure.png(LIGHT), figure.png(DARK)) for figure in figures(results)]
    text = page(results, drawn)
    for figure, light, _ in drawn:
        write_file(light, out / f"{figure.name}.png")
    return write_file(text, out / "index.html")


def page(results: dict[str, Any], drawn: list[tuple[Figure, bytes, bytes]]) -> str:
    """Render the page: style, script and pictures inside, nothing fetched, nothing of the results read as HTML."""
    return html.page(
        files("segue.convert"),
        "evaluation_page.html",
        styles=["evaluation_page.css"],
        kind="Segue: converted beside original",
        title=f"{Path(results['folder']).resolve().name} beside {Path(results['base']['name']).name}",
        sentences=evaluation_text.sentences(results),
        rows=evaluation_text.rows(results),
        figures=[(figure, html.data_uri(light), html.data_uri(dark)) for figure, light, dark in drawn],
        versions=", ".join(f"{name} {version}" for name, version in results["meta"]["versions"].items()),
        finished=results["meta"]["finished"],
    )

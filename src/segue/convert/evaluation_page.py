"""The page of a comparison: one HTML file that works offline, with the figures inside and beside it."""

from __future__ import annotations

import base64
import os
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from segue.convert import evaluation_text as judge_words
from segue.convert.evaluation_figures import DARK, LIGHT, Figure, figures
from segue.lab.report.page import digest, shipped, write_text


def write(results: dict[str, Any], out: Path) -> Path:
    """Write the figures as PNG files, and index.html."""
    drawn = [(figure, figure.png(LIGHT), figure.png(DARK)) for figure in figures(results)]
    text = page(results, drawn)
    out.mkdir(parents=True, exist_ok=True)
    for figure, light, _ in drawn:
        draft = out / f".{figure.name}-{os.getpid()}"
        draft.write_bytes(light)
        os.replace(draft, out / f"{figure.name}.png")
    return write_text(out / "index.html", text)


def page(results: dict[str, Any], drawn: list[tuple[Figure, bytes, bytes]]) -> str:
    """Fill the page: style, script and pictures inside, nothing fetched, nothing of the results read as HTML."""
    template, style, script = _own("evaluation_page.html"), shipped("page.css") + _own("evaluation_page.css"), _own("evaluation_page.js")
    policy = f"default-src 'none'; img-src data:; style-src {digest(style)}; script-src {digest(script)}; base-uri 'none'"
    parts = {
        "POLICY": policy,
        "TITLE": escape(f"{Path(results['folder']).resolve().name} beside {Path(results['base']['name']).name}"),
        "STYLE": f"<style>{style}</style>",
        "SCRIPT": f"<script>{script}</script>",
        "SENTENCES": "\n".join(f"<li>{escape(text)}</li>" for text in judge_words.sentences(results)),
        "ROWS": "\n".join(_row(row) for row in judge_words.rows(results)),
        "FIGURES": "\n".join(_figure(*one) for one in drawn),
        "VERSIONS": escape(", ".join(f"{name} {version}" for name, version in results["meta"]["versions"].items())),
        "FINISHED": escape(results["meta"]["finished"]),
    }
    pieces = template.split("@@")  # text, name, text, name, ... text: no part can hold another's mark
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def _row(row: judge_words.Row) -> str:
    cells = "".join(
        f'<td data-heading="{heading}">{escape(cell)}</td>' for heading, cell in zip(row._fields[1:], row[1:], strict=True)
    )
    return f'<tr><th scope="row">{escape(row.what)}</th>{cells}</tr>'


def _figure(figure: Figure, light: bytes, dark: bytes) -> str:
    images = "".join(
        f'<img class="{paper}" alt="{escape(figure.title)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        for paper, png in (("light", light), ("dark", dark))
    )
    return f"<figure><h3>{escape(figure.title)}</h3>{images}<figcaption>{escape(figure.caption)}</figcaption></figure>"


def _own(name: str) -> str:
    return files("segue.convert").joinpath(name).read_text(encoding="utf-8")

"""The report: one HTML page that works offline, with figures and tables beside it, made only from saved runs."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from segue.lab.report import figures, operator_figures, operator_words, operators, speed
from segue.lab.report.page_data import page_data
from segue.lab.report.summary import csv, markdown, summarize
from segue.reporting.records import read_all

SCRIPTS = ("chart.js", "page.js")


def build(folder: Path, *, title: str | None = None) -> Path:
    """Write report.html, table.md, table.csv and figures/ from the runs below a folder."""
    figures.require_matplotlib()
    results = read_all(folder)
    summary = summarize(results)
    title = title or " and ".join(summary.experiments)
    compared = operators.section(summary)
    times = None if compared is None else speed.read(folder)
    drawn = figures.draw(summary, folder / "figures")
    text = markdown(summary)
    if compared is not None:
        drawn += operator_figures.draw(compared, times, folder / "figures")
        text += operator_words.markdown(compared, times)
    write_text(folder / "table.md", text)
    write_text(folder / "table.csv", csv(summary))
    data = page_data(summary, results, title, times)
    data["files"] = ["table.csv", "table.md", *(f"figures/{path.name}" for path in drawn)]
    return write_text(folder / "report.html", page(data))


def page(data: dict[str, Any]) -> str:
    """Fill the page: style, scripts and data inside, nothing fetched, nothing of the runs read as HTML."""
    style = shipped("page.css")
    scripts = [shipped(name) for name in SCRIPTS]
    allowed = " ".join(digest(text) for text in scripts)
    policy = f"default-src 'none'; style-src {digest(style)}; script-src {allowed}; base-uri 'none'; form-action 'none'"
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(str(data["title"])),
        "STYLE": f"<style>{style}</style>",
        "DATA": in_script(data),
        "SCRIPTS": "\n".join(f"<script>{text}</script>" for text in scripts),
    }
    pieces = shipped("page.html").split("@@")  # text, name, text, name, ... text: no part can hold another's mark
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def in_script(data: Any) -> str:
    """Write JSON that no HTML parser can mistake for markup."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def shipped(name: str) -> str:
    """Read a part of the page that comes with the package."""
    return files("segue.lab.report").joinpath(name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """Return the hash by which the page allows a style or script of its own."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write_text(path: Path, text: str) -> Path:
    """Write a file in one stroke."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_text(text, encoding="utf-8", newline="\n")
    os.replace(draft, path)
    return path

"""The record of a run: one line for every cell while it runs, and one line for every entry when it is kept."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.helpers.processes import ROOT
from tests.matrix.cells import BAD, REFUSED, STUDENTS

KEPT = Path(__file__).with_name("record.jsonl")
LONGEST = 400  # characters of a reason
PACKAGES = ("torch", "transformers", "timm", "torchvision", "diffusers")
Cell = dict[str, Any]  # entry, student, outcome, stage, detail, seconds


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def fingerprint() -> str:
    """Return a digest of the code that an outcome depends on: Segue, the models, and what a cell does."""
    digest = hashlib.sha256()
    ours = Path(__file__).parent
    cells = [ours / "cells.py", ours / "proofs.py", ours / "hugging_face.py", *sorted(ours.glob("entries*.py"))]
    for path in [*sorted((ROOT / "src" / "segue").rglob("*.py")), *cells]:
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Running:
    """The file of a run: what it depends on, then one line for every cell."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, *, fresh: bool) -> None:
        """Continue the file if it is of the same code and the same packages, else start it again."""
        head = {"code": fingerprint(), "versions": versions()}
        if not fresh and self.path.exists():
            with self.path.open(encoding="utf-8") as file:
                if json.loads(file.readline() or "null") == head:
                    return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(head) + "\n", encoding="utf-8")

    def add(self, cell: Cell) -> None:
        line = (json.dumps(cell, ensure_ascii=False) + "\n").encode()
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, line)  # in one call, so that the lines of two processes do not mix
        finally:
            os.close(file)

    def read(self) -> tuple[dict[str, Any], list[Cell]]:
        """Return what the run depends on, and the last line of every cell."""
        complete, _, _ = self.path.read_bytes().rpartition(b"\n")  # without a line that is being written
        head, *lines = complete.decode().splitlines()
        cells = [json.loads(line) for line in lines]
        return json.loads(head), list({(cell["entry"], cell["student"]): cell for cell in cells}.values())


def reason(cell: Cell) -> str:
    """Return what a refusal found, in one line and without the student's name, so that those with one reason are together."""
    lines = [line.strip() for line in cell["detail"].splitlines() if line.strip()]
    said = " ".join(lines[:2])
    said = re.sub(rf"\b{re.escape(cell['student'])}(\([^)]*\))?", "It", said)
    return said if len(said) <= LONGEST else said[:LONGEST].rsplit(" ", 1)[0] + " ..."


def keep(path: Path, head: dict[str, Any], cells: list[Cell], softmax: dict[str, bool]) -> None:
    """Write a run in the form that is committed: what it depends on, then one line for every entry in order."""
    lines = [head, *_entries(cells, softmax)]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def renew(path: Path, head: dict[str, Any], cells: list[Cell], softmax: dict[str, bool]) -> None:
    """Write some entries of another run into the committed form, each with the digest of the code that it ran with."""
    first, entries = kept(path)
    if first["versions"] != head["versions"]:
        raise SystemExit(f"the kept record is of {first['versions']}, this run of {head['versions']}: run all of it.")
    again = {entry["entry"]: {**entry, "code": head["code"]} for entry in _entries(cells, softmax)}
    lines = [first, *(again.get(entry["entry"], entry) for entry in entries)]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def _entries(cells: list[Cell], softmax: dict[str, bool]) -> Iterator[dict[str, Any]]:
    for entry, has_softmax in softmax.items():
        found = {cell["student"]: cell for cell in cells if cell["entry"] == entry}
        said: dict[str, list[str]] = {}
        for name, cell in found.items():
            if cell["outcome"] == REFUSED or cell["outcome"] in BAD:
                said.setdefault(reason(cell), []).append(name)
            elif cell.get("detail"):
                said.setdefault(cell["detail"], []).append(name)
        outcomes = {student.name: found[student.name]["outcome"] for student in STUDENTS}
        yield {"entry": entry, "softmax": has_softmax, "cells": outcomes, "said": said}


def kept(path: Path = KEPT) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the committed form: what the run depends on, and its entries."""
    head, *entries = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return head, entries

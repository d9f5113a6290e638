"""Texts and other rows of files, folders of files, and datasets."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from segue.data.files import optional, unreadable
from segue.data.hub import offline, prepared
from segue.errors import DataError, nearest

MOST_FILES = 100_000  # below a folder of texts
SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
TEXT = ("text", "sentence", "content")  # usual names of columns, the first that exists is taken
LABEL = ("label", "labels")


@dataclass
class Texts:
    """Texts, and their labels where they have some."""

    texts: list[str]
    labels: list[int] | None = None

    def __len__(self) -> int:
        return len(self.texts)


def read_texts(
    data: str,
    *,
    text: str | None = None,
    label: str | None = None,
    download: bool = False,
    names: Mapping[str, int] | None = None,
) -> Texts:
    """Read a file, a folder of files, or a dataset by its id (`id` or `id:configuration`).

    A plain text file is one text. Tables (JSON lines, CSV, TSV, Parquet) have a column of texts, by default the first of
    'text', 'sentence' and 'content' that exists, and optionally one of labels: numbers, or class names that `names` maps.
    """
    return columns(data, read_rows(data, download=download), text, label, names)


def read_rows(data: str, *, download: bool = False) -> Iterator[dict[str, Any]]:
    """Read the rows of a file, of a folder of files, or of a dataset; a plain text file is one row with a text."""
    fault = _fault(data)
    path = Path(data).expanduser()
    if path.is_file():
        return _of_file(fault, path)
    if (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        return _training_rows(optional("datasets", "hf", fault).load_from_disk(str(path)))
    if path.is_dir():
        return (row for file in _files_in(fault, path) for row in _of_file(fault, file))
    return _of_dataset(fault, data, download)


def _fault(data: str) -> str:
    return f"texts cannot be read from {data!r}."


def _files_in(fault: str, folder: Path) -> list[Path]:
    """Find the files of known types below a folder; a whole disk is not a folder of texts."""
    inside = list(islice(folder.rglob("*"), MOST_FILES + 1))
    if len(inside) > MOST_FILES:
        raise DataError(fault, f"The folder has more than {MOST_FILES:,} files.", "give the folder with the texts alone.")
    files = sorted(file for file in inside if file.suffix.lower() in SUFFIXES)
    if not files:
        raise DataError(fault, "The folder has no file of a known type.", f"known types are {', '.join(SUFFIXES)}.")
    return files


def _of_file(fault: str, path: Path) -> Iterator[dict[str, Any]]:
    try:
        if path.suffix.lower() == ".parquet":
            yield from optional("pyarrow.parquet", "lab", fault).read_table(path).to_pylist()
            return
        content = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".jsonl":
            yield from (json.loads(line) for line in content.split("\n") if line.strip())
        elif path.suffix.lower() == ".json":
            loaded = json.loads(content)
            yield from loaded if isinstance(loaded, list) else [loaded]
        elif path.suffix.lower() == ".csv":
            yield from csv.DictReader(content.splitlines(keepends=True))
        elif path.suffix.lower() == ".tsv":  # quotes mean nothing
            header, *lines = [line.rstrip("\r").split("\t") for line in content.split("\n") if line]
            yield from (dict(zip(header, line, strict=True)) for line in lines)
        else:
            yield {"text": content}
    except (OSError, ValueError) as error:
        raise unreadable(fault, path, error) from error


def _of_dataset(fault: str, data: str, download: bool) -> Iterator[dict[str, Any]]:
    datasets = optional("datasets", "hf", fault)
    name, _, configuration = data.partition(":")
    try:
        with nullcontext() if download else offline():
            parts = prepared(fault, datasets.load_dataset_builder(name, configuration or None))
    except DataError:
        raise
    except Exception as error:  # `datasets` raises errors of many libraries
        hint = "give a file that exists, or allow the download with --download."
        raise DataError(fault, f"It is neither a file nor a downloaded dataset ({type(error).__name__}).", hint) from error
    yield from _training_rows(parts)


def _training_rows(parts: Any) -> Iterator[dict[str, Any]]:
    """Return the training part; held-out examples are taken from its end."""
    if not isinstance(parts, dict):
        return iter(parts)
    return iter(parts["train" if "train" in parts else next(iter(parts))])


def columns(
    data: str, rows: Iterator[dict[str, Any]], text: str | None, label: str | None, names: Mapping[str, int] | None
) -> Texts:
    """Take the texts out of rows, and their labels where they have some."""
    fault, names = _fault(data), names or {}
    found: list[str] = []
    labels: list[int] = []
    text_column = label_column = None
    for row in rows:
        if not isinstance(row, dict):
            raise DataError(fault, f"A row is a {type(row).__name__}, not named values.", 'give rows such as {"text": "..."}.')
        if text_column is None:
            text_column = _column(fault, row, text, TEXT)
            wanted = [label] if label else [name for name in LABEL if name in row]
            label_column = _column(fault, row, wanted[0], LABEL) if wanted else None
        content = row.get(text_column)
        if not isinstance(content, str):
            raise DataError(fault, f"In row {len(found) + 1}, {text_column!r} is {content!r}.", "every row needs a text.")
        found.append(content)
        if label_column is not None:
            value = row.get(label_column)
            labels.append(names[str(value)] if str(value) in names else _label(fault, value, len(found)))
    if not found:
        raise DataError(fault, "It has no text.", "give a file that has some.")
    return Texts(found, labels if label_column is not None else None)


def _column(fault: str, row: dict[str, Any], named: str | None, usual: tuple[str, ...]) -> str:
    name = named or next((column for column in usual if column in row), None)
    if name is None or name not in row:
        hint = f"name one with --text or --label. {nearest(str(named), list(row))}"
        raise DataError(fault, f"Its columns are {', '.join(map(repr, row))}.", hint)
    return name


def _label(fault: str, value: Any, row: int) -> int:
    try:
        number = int(value)
        if number == float(value):
            return number
        raise ValueError
    except (TypeError, ValueError):
        hint = "give the indices or names of the model's classes."
        raise DataError(fault, f"In row {row} the label is {value!r}.", hint) from None

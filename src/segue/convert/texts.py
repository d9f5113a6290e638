"""Texts from files of many forms, or from `datasets`."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.data.files import optional, unreadable
from segue.data.hub import offline, prepared
from segue.errors import DataError, nearest

SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
TEXT = ("text", "sentence", "content")  # columns that are looked for, in this order
LABEL = ("label", "labels")


@dataclass
class Texts:
    """Texts, and their labels where they have some."""

    texts: list[str]
    labels: list[int] | None = None

    def __len__(self) -> int:
        return len(self.texts)


def read(
    data: str,
    *,
    text: str | None = None,
    label: str | None = None,
    download: bool = False,
    names: Mapping[str, int] | None = None,
) -> Texts:
    """Read a file, a folder of files, or a dataset by its id (`id` or `id:configuration`).

    A plain text file is one text. Tables (JSON lines, CSV, TSV, Parquet) have a column of texts, by default the first of
    'text', 'sentence' and 'content' that is there, and maybe one of labels: numbers, or words that `names` numbers.
    """
    asked = f"texts were to be read from {data!r}."
    path = Path(data).expanduser()
    if path.is_file():
        rows = _of_file(asked, path)
    elif (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        rows = _first_part(optional("datasets", "hf", asked).load_from_disk(str(path)))
    elif path.is_dir() and (files := sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)):
        rows = (row for file in files for row in _of_file(asked, file))
    elif path.is_dir():
        raise DataError(asked, "The folder holds no file of a known kind.", f"these are: {', '.join(SUFFIXES)}.")
    else:
        rows = _of_dataset(asked, data, download)
    return _gathered(asked, rows, text, label, names or {})


def _of_file(asked: str, path: Path) -> Iterator[dict[str, Any]]:
    try:
        if path.suffix.lower() == ".parquet":
            yield from optional("pyarrow.parquet", "lab", asked).read_table(path).to_pylist()
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
        raise unreadable(asked, path, error) from error


def _of_dataset(asked: str, data: str, download: bool) -> Iterator[dict[str, Any]]:
    datasets = optional("datasets", "hf", asked)
    name, _, configuration = data.partition(":")
    try:
        if download:
            parts = prepared(asked, datasets.load_dataset_builder(name, configuration or None))
        else:
            with offline():
                parts = prepared(asked, datasets.load_dataset_builder(name, configuration or None))
    except DataError:
        raise
    except Exception as error:  # `datasets` lets the errors of all its readers through
        hint = "give a file that exists, or allow the download with --download."
        raise DataError(asked, f"It cannot be had here ({type(error).__name__}).", hint) from error
    yield from _first_part(parts)


def _first_part(parts: Any) -> Iterator[dict[str, Any]]:
    """Return the rows to train on; what is held out is cut off their end."""
    if not isinstance(parts, dict):
        return iter(parts)
    return iter(parts["train" if "train" in parts else next(iter(parts))])


def _gathered(
    asked: str, rows: Iterator[dict[str, Any]], text: str | None, label: str | None, names: Mapping[str, int]
) -> Texts:
    found: list[str] = []
    labels: list[int] = []
    text_column = label_column = None
    for row in rows:
        if not isinstance(row, dict):
            raise DataError(
                asked, f"A line holds {type(row).__name__}, not named values.", 'give lines such as {"text": "..."}.'
            )
        if text_column is None:
            text_column = _column(asked, row, text, TEXT)
            wanted = [label] if label else [name for name in LABEL if name in row]
            label_column = _column(asked, row, wanted[0], LABEL) if wanted else None
        content = row.get(text_column)
        if not isinstance(content, str):
            raise DataError(asked, f"In row {len(found) + 1}, {text_column!r} is {content!r}.", "every row needs a text.")
        found.append(content)
        if label_column is not None:
            value = row.get(label_column)
            labels.append(names[str(value)] if str(value) in names else _label(asked, value, len(found)))
    if not found:
        raise DataError(asked, "It holds no text.", "give more.")
    return Texts(found, labels if label_column is not None else None)


def _column(asked: str, row: dict[str, Any], named: str | None, usual: tuple[str, ...]) -> str:
    name = named or next((column for column in usual if column in row), None)
    if name is None or name not in row:
        raise DataError(
            asked, f"Its columns are {', '.join(map(repr, row))}.", f"name one with --text. {nearest(str(named), list(row))}"
        )
    return name


def _label(asked: str, value: Any, row: int) -> int:
    try:
        number = int(value)
        if number == float(value):
            return number
        raise ValueError
    except (TypeError, ValueError):
        raise DataError(
            asked, f"In row {row} the label is {value!r}.", "labels are the numbers of the model's classes."
        ) from None

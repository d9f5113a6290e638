"""Sentences and labels in tab-separated files, as GLUE has them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from segue.border import checked
from segue.data.dataset import TextDataset, text_dataset
from segue.data.files import contents, store_paths, unreadable
from segue.errors import DataError, nearest

_INTEGER = re.compile("-?[0-9]{1,9}")  # int() would also take "1_0", " 1" and the digits of other scripts


@checked
@dataclass(frozen=True, kw_only=True)
class Tsv:
    """Load labelled sentences from two files: a header, then one example per line; quotes mean nothing."""

    train: str | Path
    test: str | Path
    text: str = "sentence"
    label: str = "label"

    def __post_init__(self) -> None:
        store_paths(self, "train", "test")

    def __call__(self) -> TextDataset:
        problem = f"{self} cannot be loaded."
        return text_dataset(problem, self._part(problem, self.train), self._part(problem, self.test))

    def _part(self, problem: str, path: str | Path) -> tuple[list[str], Tensor]:
        try:
            # not splitlines(): it would also break at characters that may occur inside a sentence
            lines = contents(problem, path).decode("utf-8-sig").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise unreadable(problem, path, error) from error
        header, *rows = [line.removesuffix("\r").split("\t") for line in lines]
        for column in (self.text, self.label):
            if header.count(column) != 1:
                times = "no column" if column not in header else "more than one column"
                raise DataError(problem, f"{path} has {times} {column!r}.", f"Name the columns. {nearest(column, header)}")
        text, label = header.index(self.text), header.index(self.label)
        for number, row in enumerate(rows, start=2):
            place = f"Line {number} of {path} has"
            if len(row) != len(header):
                found = f"{place} {len(row)} columns, the header {len(header)}."
                raise DataError(problem, found, "Every line needs as many tabs as the header; check that the file is complete.")
            if not row[text].strip():
                raise DataError(problem, f"{place} no text.", "Remove the line, or give it a text.")
            if not _INTEGER.fullmatch(row[label]):
                raise DataError(problem, f"{place} the label {row[label]!r}.", "Labels must be integers that count from 0.")
        return [row[text] for row in rows], torch.tensor([int(row[label]) for row in rows], dtype=torch.int64)

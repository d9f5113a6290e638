"""Sentences and labels in tab-separated files, as GLUE has them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from segue.data.checks import text_dataset
from segue.data.examples import TextDataset
from segue.data.files import contents, located, stored, unreadable
from segue.errors import DataError, nearest

_WHOLE_NUMBER = re.compile("-?[0-9]{1,9}")  # int() would also take "1_0", " 1" and the digits of other scripts


@dataclass(frozen=True, kw_only=True)
class Tsv:
    """Load labelled sentences from two files: a header, then one example per line; quotes mean nothing."""

    train: str | Path
    test: str | Path
    text: str = "sentence"
    label: str = "label"

    def __post_init__(self) -> None:
        stored(self, "train", "test")

    def __call__(self) -> TextDataset:
        asked = f"{self} was to be loaded."
        return text_dataset(asked, self._part(asked, located(self.train)), self._part(asked, located(self.test)))

    def _part(self, asked: str, path: Path) -> tuple[list[str], Tensor]:
        try:
            # not splitlines(): it would also break at characters that may stand inside a sentence
            lines = contents(asked, path).decode("utf-8-sig").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise unreadable(asked, path, error) from error
        header, *rows = [line.removesuffix("\r").split("\t") for line in lines]
        for column in (self.text, self.label):
            if header.count(column) != 1:
                times = "no column" if column not in header else "more than one column"
                raise DataError(asked, f"{path} has {times} {column!r}.", f"Name the columns. {nearest(column, header)}")
        text, label = header.index(self.text), header.index(self.label)
        labels = []
        for number, row in enumerate(rows, start=2):
            if len(row) != len(header):
                raise DataError(
                    asked,
                    f"Line {number} of {path} has {len(row)} columns, the header {len(header)}.",
                    "Every line needs as many tabs as the header; check whether the file is cut short.",
                )
            if not row[text].strip():
                raise DataError(asked, f"Line {number} of {path} has no text.", "Remove the line, or give it a text.")
            if not _WHOLE_NUMBER.fullmatch(row[label]):
                raise DataError(
                    asked,
                    f"Line {number} of {path} has the label {row[label]!r}.",
                    "Labels must be whole numbers that count from 0.",
                )
            labels.append(int(row[label]))
        return [row[text] for row in rows], torch.tensor(labels, dtype=torch.int64)

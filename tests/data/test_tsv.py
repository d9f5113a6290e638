"""Sentences in tab-separated files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from segue.data import (
    Tsv,
)
from tests.data.source_files import (
    fails,
)


def write_tsv(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_bytes((end.join(["sentence\tlabel", *lines]) + end).encode())
    return path


def test_tsv_holds_every_character(tmp_path: Path):
    odd = ["a \"quoted' one", "line\u2028separator and \x85", "naïve 日本 😀", "  spaces stay "]
    train = write_tsv(tmp_path / "train.tsv", *(f"{text}\t{at % 2}" for at, text in enumerate(odd)))
    test = write_tsv(tmp_path / "dev.tsv", "good\t1", "bad\t0", end="\r\n")
    dataset = Tsv(train=train, test=test)()
    assert dataset.train_texts == odd
    assert dataset.test_texts == ["good", "bad"]
    assert torch.equal(dataset.train_labels, torch.tensor([0, 1, 0, 1]))
    assert torch.equal(dataset.test_labels, torch.tensor([1, 0]))
    assert dataset.classes == 2
    assert repr(dataset) == "TextDataset(4 + 2 texts, classes=2)"


def test_tsv_columns_are_named(tmp_path: Path):
    path = tmp_path / "data.tsv"
    path.write_bytes(b"\xef\xbb\xbfid\tpolarity\treview\n7\t0\tbad\n8\t1\tgood")  # a byte-order mark, no last line end
    dataset = Tsv(train=path, test=path, text="review", label="polarity")()
    assert dataset.train_texts == ["bad", "good"]
    fails(Tsv(train=path, test=path, text="review"), "has no column 'label'.", "The only names are: ")


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"", ["has no column 'sentence'"]),
        (b"sentence\tlabel\n", ["The training part is empty."]),
        (b"sentence\tlabel\tlabel\na\t0\t1\n", ["has more than one column 'label'"]),
        (b"sentence\tlabel\na\t0\nb\n", ["Line 3 of ", "has 1 columns, the header 2"]),
        (b"sentence\tlabel\na\t0\n\nb\t1\n", ["Line 3 of ", "has 1 columns"]),
        (b"sentence\tlabel\na\tb\t0\n", ["Line 2 of ", "has 3 columns"]),
        (b"sentence\tlabel\n \t0\n", ["Line 2 of ", "has no text"]),
        (b"sentence\tlabel\na\tgood\n", ["Line 2 of ", "has the label 'good'", "count from 0"]),
        (b"sentence\tlabel\na\t\n", ["has the label ''"]),
        (b"sentence\tlabel\na\t1_0\n", ["has the label '1_0'"]),
        (b"sentence\tlabel\na\t0\nb\t-1\n", ["training labels go down to -1"]),
        (b"sentence\tlabel\na\t1\nb\t2\n", ["smallest is 1"]),
        (b"sentence\tlabel\na\t99999999999999999999\n", ["has the label '99999999999999999999'"]),
        (b"sentence\tlabel\n\xff\t0\n", ["cannot be read (UnicodeDecodeError"]),
    ],
)
def test_unusable_tsv(tmp_path: Path, content: bytes, texts: list[str]):
    path = tmp_path / "data.tsv"
    path.write_bytes(content)
    fails(Tsv(train=path, test=path), *texts)


def test_an_unknown_test_label_in_a_tsv(tmp_path: Path):
    train = write_tsv(tmp_path / "train.tsv", "a\t0", "b\t1")
    test = write_tsv(tmp_path / "test.tsv", "a\t2")
    fails(Tsv(train=train, test=test), "test labels go up to 2, but there are 2 classes")
    fails(Tsv(train=train, test=tmp_path / "tets.tsv"), "There is no file", "Nearest names: test.tsv.")

"""What a source gives: the training and the test part of a dataset."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Examples:
    """Inputs and their labels."""

    inputs: Tensor  # (N, C, H, W) uint8 for images
    labels: Tensor  # (N,) int64

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Examples({len(self)} of {tuple(self.inputs.shape[1:])})"


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images to learn from and images to test with."""

    train: Examples
    test: Examples
    classes: int
    mean: tuple[float, ...]  # per channel, of the training pixels in [0, 1]
    std: tuple[float, ...]


@dataclass(frozen=True, eq=False, repr=False)
class TextDataset:
    """Sentences to learn from and sentences to test with."""

    train_texts: list[str]
    train_labels: Tensor  # (N,) int64
    test_texts: list[str]
    test_labels: Tensor  # (M,) int64
    classes: int

    def __repr__(self) -> str:
        return f"TextDataset({len(self.train_texts)} + {len(self.test_texts)} texts, classes={self.classes})"

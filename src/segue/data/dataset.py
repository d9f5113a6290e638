"""Datasets in memory: what a source returns, and what is checked before anything is trained on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from segue.errors import DataError


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


def image_dataset(problem: str, train: Examples, test: Examples, classes: int | None = None) -> Dataset:
    """Check both parts of an image dataset and measure its training pixels; `classes` if the format fixes their number."""
    for part, examples in (("training", train), ("test", test)):
        images = examples.inputs
        if images.ndim != 4 or images.shape[1] not in (1, 3) or images.dtype != torch.uint8:
            found = f"The {part} images are {images.dtype} of shape {tuple(images.shape)}."
            raise DataError(problem, found, "Images must be uint8 of shape (N, 1, H, W) or (N, 3, H, W).")
        _check_counts(problem, part, "images", len(images) if images.numel() else 0, examples.labels)
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        shapes = tuple(train.inputs.shape[1:]), tuple(test.inputs.shape[1:])
        found = f"Training images have the shape {shapes[0]}, test images {shapes[1]}."
        raise DataError(problem, found, "Both parts must come from one dataset, with equal channels and sizes.")
    classes = _check_labels(problem, train.labels, test.labels, classes)
    mean, std = _statistics(problem, train.inputs)
    train, test = (Examples(part.inputs.contiguous(), part.labels.long().contiguous()) for part in (train, test))
    return Dataset(train, test, classes, mean, std)


def text_dataset(problem: str, train: tuple[list[str], Tensor], test: tuple[list[str], Tensor]) -> TextDataset:
    """Check both parts of a text dataset."""
    for part, (texts, labels) in (("training", train), ("test", test)):
        _check_counts(problem, part, "texts", len(texts), labels)
    return TextDataset(*train, *test, _check_labels(problem, train[1], test[1], None))


def _check_counts(problem: str, part: str, things: str, count: int, labels: Tensor) -> None:
    if not count:
        raise DataError(problem, f"The {part} part is empty.", "Check that the files are complete and the paths are right.")
    if labels.ndim != 1 or labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        found = f"The {part} labels are {labels.dtype} of shape {tuple(labels.shape)}."
        raise DataError(problem, found, "Labels must be integers, one per example.")
    if count != len(labels):
        found = f"The {part} part has {count} {things} but {len(labels)} labels."
        raise DataError(problem, found, "One of the files is incomplete or belongs to another dataset.")


def _check_labels(problem: str, train: Tensor, test: Tensor, classes: int | None) -> int:
    """Return the number of classes, if the labels are what one may expect of 0 .. classes - 1."""
    for part, labels in (("training", train), ("test", test)):
        if int(labels.min()) < 0:
            hint = "Labels count from 0; -1 often marks a test part whose labels are secret: take the validation part."
            raise DataError(problem, f"The {part} labels go down to {int(labels.min())}.", hint)
    if classes is None:
        classes = int(train.max()) + 1
        # a small sample may miss a class; a file that counts from 1, or marks "unknown" by 255, must not pass
        present, smallest = len(torch.unique(train)), int(train.min())
        if smallest > 0 or 2 * present < classes:
            values = f"{present} of the {classes} values from 0 to {classes - 1}"
            found = f"The training labels take {values}; the smallest is {smallest}."
            raise DataError(problem, found, "Labels must count from 0, without large gaps.")
    if classes < 2:
        raise DataError(problem, "There is only one class.", "Give examples of at least two classes.")
    for part, labels in (("training", train), ("test", test)):
        if int(labels.max()) >= classes:
            found = f"The {part} labels go up to {int(labels.max())}, but there are {classes} classes."
            raise DataError(problem, found, f"Labels must be between 0 and {classes - 1}.")
    return classes


def _statistics(problem: str, images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel, exact and independent of threads: sums of integers."""
    means, stds = [], []
    for channel in range(images.shape[1]):
        counts = torch.bincount(images[:, channel].reshape(-1), minlength=256).tolist()
        total = sum(counts)
        first = sum(value * count for value, count in enumerate(counts))
        second = sum(value * value * count for value, count in enumerate(counts))
        means.append(first / (255 * total))
        stds.append(((second * total - first * first) ** 0.5) / (255 * total))
    if not any(stds):
        raise DataError(problem, "All training pixels are equal.", "Check that the files are complete and the paths are right.")
    return tuple(means), tuple(std or 1.0 for std in stds)  # one blank channel must not become a division by zero

"""What every dataset must fulfil before anything is trained on it."""

from __future__ import annotations

import torch
from torch import Tensor

from segue.data.examples import Dataset, Examples, TextDataset
from segue.errors import DataError


def image_dataset(asked: str, train: Examples, test: Examples, classes: int | None = None) -> Dataset:
    """Check both parts of an image dataset and measure its training pixels; `classes` where the format fixes their number."""
    for part, examples in (("training", train), ("test", test)):
        _check_images(asked, part, examples.inputs)
        _check_counts(asked, part, "images", len(examples.inputs), examples.labels)
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise DataError(
            asked,
            f"Training images have the shape {tuple(train.inputs.shape[1:])}, test images {tuple(test.inputs.shape[1:])}.",
            "Both parts must come from one dataset, with equal channels and sizes.",
        )
    classes = _check_labels(asked, train.labels, test.labels, classes)
    mean, std = _statistics(asked, train.inputs)
    return Dataset(_packed(train), _packed(test), classes, mean, std)


def text_dataset(asked: str, train: tuple[list[str], Tensor], test: tuple[list[str], Tensor]) -> TextDataset:
    """Check both parts of a text dataset."""
    for part, (texts, labels) in (("training", train), ("test", test)):
        if not texts:
            raise _empty(asked, part)
        _check_counts(asked, part, "texts", len(texts), labels)
    return TextDataset(*train, *test, _check_labels(asked, train[1], test[1], None))


def _packed(examples: Examples) -> Examples:
    return Examples(examples.inputs.contiguous(), examples.labels.to(torch.int64).contiguous())


def _empty(asked: str, part: str) -> DataError:
    return DataError(asked, f"The {part} part is empty.", "Check that the files are complete and the paths are right.")


def _check_images(asked: str, part: str, images: Tensor) -> None:
    if images.ndim != 4 or images.shape[1] not in (1, 3) or images.dtype != torch.uint8:
        raise DataError(
            asked,
            f"The {part} images are {images.dtype} of shape {tuple(images.shape)}.",
            "Images must be uint8 of shape (N, 1, H, W) or (N, 3, H, W).",
        )
    if images.numel() == 0:
        raise _empty(asked, part)


def _check_counts(asked: str, part: str, things: str, count: int, labels: Tensor) -> None:
    if labels.ndim != 1 or labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise DataError(
            asked,
            f"The {part} labels are {labels.dtype} of shape {tuple(labels.shape)}.",
            "Labels must be integers, one per example.",
        )
    if count != len(labels):
        raise DataError(
            asked,
            f"The {part} part has {count} {things} but {len(labels)} labels.",
            "Both must be equal in number; one of the files is cut short or belongs to another dataset.",
        )


def _check_labels(asked: str, train: Tensor, test: Tensor, classes: int | None) -> int:
    """Return the number of classes, if the labels are what one may expect of 0 .. classes - 1."""
    for part, labels in (("training", train), ("test", test)):
        if int(labels.min()) < 0:
            raise DataError(
                asked,
                f"The {part} labels go down to {int(labels.min())}.",
                "Labels count from 0; -1 often marks a test part whose labels are kept secret: take the validation part.",
            )
    if classes is None:
        classes = int(train.max()) + 1
        # a small sample may miss a class; a file that counts from 1, or marks "unknown" by 255, must not pass
        present = len(torch.unique(train))
        if int(train.min()) > 0 or 2 * present < classes:
            raise DataError(
                asked,
                f"The training labels take {present} of the {classes} values from 0 to {classes - 1}; "
                f"the smallest is {int(train.min())}.",
                "Labels must count from 0, without large gaps.",
            )
    if classes < 2:
        raise DataError(asked, "There is only one class.", "Give examples of at least two classes.")
    for part, labels in (("training", train), ("test", test)):
        if int(labels.max()) >= classes:
            raise DataError(
                asked,
                f"The {part} labels go up to {int(labels.max())}, but there are {classes} classes.",
                f"Labels must lie between 0 and {classes - 1}.",
            )
    return classes


def _statistics(asked: str, images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel, exact and independent of threads: sums of whole numbers."""
    means, stds = [], []
    for channel in range(images.shape[1]):
        counts = torch.bincount(images[:, channel].reshape(-1), minlength=256).tolist()
        total = sum(counts)
        first = sum(value * count for value, count in enumerate(counts))
        second = sum(value * value * count for value, count in enumerate(counts))
        means.append(first / (255 * total))
        stds.append(((second * total - first * first) ** 0.5) / (255 * total))
    if not any(stds):
        raise DataError(asked, "All training pixels are equal.", "Check that the files are complete and the paths are right.")
    return tuple(means), tuple(std or 1.0 for std in stds)  # one blank channel must not become a division by zero

"""Data that needs no download: the handwritten digits inside scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from segue.errors import MissingExtraError


@dataclass(frozen=True)
class Split:
    """Images and their labels."""

    images: Tensor  # (N, 1, 8, 8), standardised
    labels: Tensor  # (N,)

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield shuffled batches for ever, epoch after epoch; what does not fill a batch is left out."""
        size = min(size, len(self))
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self), generator=generator)
            for start in range(0, len(self) - size + 1, size):
                chosen = order[start : start + size]
                yield self.images[chosen], self.labels[chosen]


@dataclass(frozen=True)
class Digits:
    """The two parts of the digits."""

    train: Split
    validation: Split


def digits(*, validation: int = 500, seed: int = 0) -> Digits:
    """Load scikit-learn's 1,797 digits, split by a fixed seed and standardised by the training part.

    >>> digits().train.images.shape
    torch.Size([1297, 1, 8, 8])
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtraError(
            "the digits were to be loaded.",
            "They lie inside scikit-learn, which is not installed.",
            "pip install segue[lab]",
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], torch.from_numpy(labels)[order]
    train = images[validation:]
    images = (images - train.mean()) / train.std()
    return Digits(Split(images[validation:], labels[validation:]), Split(images[:validation], labels[:validation]))

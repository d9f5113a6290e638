"""The handwritten digits of scikit-learn, which need no download."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from segue.data.dataset import Dataset, Examples, image_dataset
from segue.data.files import optional

_HELD_OUT = 500


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Load 1,797 digits of 8x8 pixels; 500 of them, always the same, are the test part.

    >>> dataset = Digits()()
    >>> dataset.train, dataset.test
    (Examples(1297 of (1, 8, 8)), Examples(500 of (1, 8, 8)))
    """

    def __call__(self) -> Dataset:
        problem = f"{self} cannot be loaded."
        pixels, labels = optional("sklearn.datasets", "lab", problem).load_digits(return_X_y=True)
        images = (torch.from_numpy(pixels).long() * 255 // 16).to(torch.uint8).view(-1, 1, 8, 8)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        images, labels = images[order], torch.from_numpy(labels)[order]
        train = Examples(images[_HELD_OUT:], labels[_HELD_OUT:])
        return image_dataset(problem, train, Examples(images[:_HELD_OUT], labels[:_HELD_OUT]), classes=10)

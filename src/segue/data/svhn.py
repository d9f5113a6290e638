"""Street View House Numbers in MATLAB files."""

from __future__ import annotations

from pathlib import Path

import torch

from segue.data.checks import image_dataset
from segue.data.examples import Dataset, Examples
from segue.data.matlab import read_matlab
from segue.errors import DataError


def read_svhn(asked: str, folder: Path) -> Dataset:
    """Read train_32x32.mat and test_32x32.mat."""
    train, test = (_part(asked, folder / f"{part}_32x32.mat") for part in ("train", "test"))
    return image_dataset(asked, train, test, classes=10)


def _part(asked: str, path: Path) -> Examples:
    arrays = read_matlab(asked, path)
    if not {"X", "y"} <= set(arrays) or arrays["X"].ndim != 4 or arrays["y"].ndim != 2 or arrays["y"].shape[1] != 1:
        found = f"{path} has no images X (H, W, C, N) and labels y (N, 1)."
        raise DataError(asked, found, "Fetch the cropped digits, 32 x 32 pixels.")
    labels = arrays["y"][:, 0].long()
    return Examples(arrays["X"].permute(3, 2, 0, 1), torch.where(labels == 10, 0, labels))  # the digit 0 is labelled 10

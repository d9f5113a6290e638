"""Street View House Numbers in MATLAB files."""

from __future__ import annotations

from pathlib import Path

import torch

from segue.errors import DataError
from segue.lab.sources.checks import image_dataset
from segue.lab.sources.examples import Dataset, Examples
from segue.lab.sources.extras import optional
from segue.lab.sources.files import existing_file, unreadable
from segue.lab.sources.pixels import as_images, as_labels


def read_svhn(asked: str, folder: Path) -> Dataset:
    """Read train_32x32.mat and test_32x32.mat."""
    return image_dataset(asked, _part(asked, folder, "training"), _part(asked, folder, "test"), classes=10)


def _part(asked: str, folder: Path, part: str) -> Examples:
    path = existing_file(asked, folder / ("train_32x32.mat" if part == "training" else "test_32x32.mat"))
    matlab = optional("scipy.io", "lab", asked)
    try:
        arrays = matlab.loadmat(path, variable_names=["X", "y"])
    except Exception as error:  # scipy stumbles over damaged bytes in many ways
        raise unreadable(asked, path, error) from error
    if not {"X", "y"} <= set(arrays) or arrays["X"].ndim != 4:
        raise DataError(
            asked, f"{path} has no images X (H, W, C, N) and labels y.", "Fetch the cropped digits, 32 x 32 pixels."
        )
    labels = as_labels(asked, part, arrays["y"])
    images = as_images(asked, part, arrays["X"].transpose(3, 0, 1, 2))
    return Examples(images, torch.where(labels == 10, 0, labels))  # MATLAB counts from 1: the digit 0 is labelled 10

"""Arrays of pixels brought to one form: bytes, channels first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from segue.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt


def as_images(asked: str, part: str, array: npt.NDArray[Any]) -> Tensor:  # (N, 1 or 3, H, W) uint8
    """Accept (N, H, W), (N, H, W, C) and (N, C, H, W); where both of the latter fit, channels are last, as in Keras."""
    images = torch.from_numpy(_as_bytes(asked, part, array))
    if images.ndim == 3:
        return images.unsqueeze(1)
    if images.ndim == 4 and images.shape[3] in (1, 3, 4):
        images = images.permute(0, 3, 1, 2)
    elif images.ndim != 4 or images.shape[1] not in (1, 3, 4):
        raise DataError(
            asked,
            f"The {part} images have the shape {tuple(images.shape)}.",
            "Give (N, H, W), (N, H, W, C) or (N, C, H, W) with 1 or 3 channels, or 4 of which the last is transparency.",
        )
    return images[:, :3]


def as_labels(asked: str, part: str, array: npt.NDArray[Any]) -> Tensor:  # (N,) int64
    """Accept whole numbers of shape (N,) or, as Keras has them, (N, 1)."""
    if array.dtype.kind not in "ui" or array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] != 1):
        raise DataError(
            asked,
            f"The {part} labels are {array.dtype} of shape {array.shape}.",
            "Labels must be integers, one per example; turn one-hot labels into numbers with argmax.",
        )
    return torch.from_numpy(array.reshape(-1).astype("int64"))


def _as_bytes(asked: str, part: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Keep whole numbers from 0 to 255; turn fractions from 0 to 1 into the nearest 255th."""
    kind = array.dtype.kind
    if kind not in "uif":
        raise DataError(asked, f"The {part} images are {array.dtype}.", "Give uint8, or floats between 0 and 1.")
    if array.size == 0:
        return array.astype("uint8")
    if kind == "f" and bool((array != array).any()):
        raise DataError(asked, f"The {part} images contain NaN.", "Find out where they come from; no pixel can be guessed.")
    low, high = array.min().item(), array.max().item()
    limit = 1 if kind == "f" else 255
    if low < 0 or high > limit:
        raise DataError(
            asked,
            f"The {part} images are {array.dtype} from {low:g} to {high:g}.",
            "Give uint8, or floats between 0 and 1; standardise later, with the mean and std of the dataset.",
        )
    return (array.astype("float32") * 255).round().astype("uint8") if kind == "f" else array.astype("uint8")

"""Images changed at random while training, a batch at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from segue.errors import DataError


@dataclass(frozen=True)
class NoAugmentation:
    """Leave the images as they are; nothing is drawn from the generator."""

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return images


@dataclass(frozen=True)
class Crop:
    """Shift every image by up to `pad` pixels each way; what comes in from outside is zero.

    >>> Crop(pad=1)(torch.ones(2, 3, 8, 8), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 8, 8])
    """

    pad: int = 4

    def __post_init__(self) -> None:
        _check_pad(self)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return _shifted(self, images, self.pad, generator, flip=False)


@dataclass(frozen=True)
class CropFlip:
    """Shift like `Crop`, then mirror each image left to right or not, as a coin falls: the usual augmentation of CIFAR."""

    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        _check_pad(self)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return _shifted(self, images, self.pad, generator, self.flip)


def normalise(
    images_uint8: Tensor, mean: tuple[float, ...], std: tuple[float, ...], size: int | None = None
) -> Tensor:  # (N, C, H, W) float32
    """Turn bytes into numbers around 0, resized to `size` x `size` pixels when that is given.

    >>> normalise(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8), mean=(0.5,), std=(0.25,)).unique()
    tensor([2.])
    """
    asked = f"Images were to be normalised by mean={mean} and std={std}."
    if images_uint8.dtype != torch.uint8 or images_uint8.ndim != 4:
        found = f"The images are {images_uint8.dtype} of shape {tuple(images_uint8.shape)}."
        raise DataError(asked, found, "Give uint8 images of shape (N, C, H, W).")
    channels = images_uint8.shape[1]
    if not len(mean) == len(std) == channels or not min(std, default=0) > 0:
        found = f"The images have {channels} channels."
        raise DataError(asked, found, "Give one mean and one std above 0 for each channel.")
    images = images_uint8.float() / 255
    if size is not None and images.shape[2:] != (size, size):
        images = functional.interpolate(images, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
    shift, scale = (torch.tensor(each, device=images.device).view(1, -1, 1, 1) for each in (mean, std))
    return images.sub_(shift).div_(scale)


def _check_pad(augmentation: Crop | CropFlip) -> None:
    if augmentation.pad < 0:
        raise DataError(f"{augmentation} was asked for.", f"pad is {augmentation.pad}.", "Give 0 or more pixels.")


def _shifted(augmentation: Crop | CropFlip, images: Tensor, pad: int, generator: torch.Generator, flip: bool) -> Tensor:
    """Read each image from its own place in the padded batch: rows and columns are index tables, mirrored or not."""
    if images.ndim != 4:
        raise DataError(f"{augmentation} was applied.", f"The input has the shape {tuple(images.shape)}.", "Give (B, C, H, W).")
    count, _, height, width = images.shape
    # drawn where the generator lives: one seed gives the same images on every device
    corners = torch.randint(2 * pad + 1, (2, count), generator=generator, device=generator.device)
    rows = corners[0, :, None] + torch.arange(height, device=generator.device)  # (B, H)
    columns = torch.arange(width, device=generator.device).expand(count, width)  # (B, W)
    if flip:
        mirrored = torch.randint(2, (count, 1), generator=generator, device=generator.device)
        columns = torch.where(mirrored.bool(), width - 1 - columns, columns)
    columns = columns + corners[1, :, None]
    flat = rows[:, :, None] * (width + 2 * pad) + columns[:, None, :]  # (B, H, W) places in the padded image
    places = flat.to(images.device).view(count, 1, -1).expand(-1, images.shape[1], -1)
    padded = functional.pad(images, (pad, pad, pad, pad))
    return padded.flatten(2).gather(2, places).view_as(images)

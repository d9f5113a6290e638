"""Images changed at random while training, a batch at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from segue.border import Count, PositiveInt, checked
from segue.errors import DataError


@dataclass(frozen=True)
class NoAugmentation:
    """Leave the images as they are; nothing is drawn from the generator."""

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return images


@checked
@dataclass(frozen=True)
class CropFlip:
    """Shift every image by up to `pad` pixels each way, then mirror it left to right or not, at random: usual for CIFAR.

    Pixels from outside are zero.

    >>> CropFlip(pad=1)(torch.ones(2, 3, 8, 8), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 8, 8])
    """

    pad: Count = 4  # pixels
    flip: bool = True

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        if images.ndim != 4:
            found = f"The input has the shape {tuple(images.shape)}."
            raise DataError(f"{self} cannot be applied.", found, "Give (B, C, H, W).")
        count, _, height, width = images.shape
        # drawn on the device of the generator: one seed gives the same images on every device
        corners = torch.randint(2 * self.pad + 1, (2, count), generator=generator, device=generator.device)
        rows = corners[0, :, None] + torch.arange(height, device=generator.device)  # (B, H)
        columns = torch.arange(width, device=generator.device).expand(count, width)  # (B, W)
        if self.flip:
            mirrored = torch.randint(2, (count, 1), generator=generator, device=generator.device)
            columns = torch.where(mirrored.bool(), width - 1 - columns, columns)
        columns = columns + corners[1, :, None]
        flat = rows[:, :, None] * (width + 2 * self.pad) + columns[:, None, :]  # (B, H, W) places in the padded image
        places = flat.to(images.device).view(count, 1, -1).expand(-1, images.shape[1], -1)
        padded = functional.pad(images, (self.pad, self.pad, self.pad, self.pad))
        return padded.flatten(2).gather(2, places).view_as(images)


@checked
@dataclass(frozen=True)
class Crop:
    """Shift every image as `CropFlip` does, without mirroring."""

    pad: Count = 4  # pixels

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return CropFlip(pad=self.pad, flip=False)(images, generator)


@checked
def normalise(
    images_uint8: Tensor, mean: tuple[float, ...], std: tuple[float, ...], size: PositiveInt | None = None
) -> Tensor:  # (N, C, H, W) float32
    """Turn bytes into numbers around 0, resized to `size` x `size` pixels if that is given.

    >>> normalise(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8), mean=(0.5,), std=(0.25,)).unique()
    tensor([2.])

    Args:
        images_uint8: (N, C, H, W), from 0 to 255.
        mean: Of each channel, on a scale from 0 to 1.
        std: Of each channel.
        size: Pixels of each side.
    """
    problem = f"The images cannot be normalised by mean={mean} and std={std}."
    if images_uint8.dtype != torch.uint8 or images_uint8.ndim != 4:
        found = f"The images are {images_uint8.dtype} of shape {tuple(images_uint8.shape)}."
        raise DataError(problem, found, "Give uint8 images of shape (N, C, H, W).")
    channels = images_uint8.shape[1]
    if not len(mean) == len(std) == channels or not min(std, default=0) > 0:
        found = f"The images have {channels} channels."
        raise DataError(problem, found, "Give one mean and one std above 0 for each channel.")
    images = images_uint8.float() / 255
    if size is not None and images.shape[2:] != (size, size):
        images = functional.interpolate(images, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
    shift, scale = (torch.tensor(each, device=images.device).view(1, -1, 1, 1) for each in (mean, std))
    return images.sub_(shift).div_(scale)

"""Encoded images (PNG, JPEG and their kin) turned into bytes of pixels."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from torch import Tensor

from segue.data.extras import optional
from segue.data.files import unreadable
from segue.errors import DataError

# named one by one: among the formats that Pillow would try otherwise is EPS, which starts a PostScript interpreter
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")


def decode(asked: str, name: object, content: bytes, size: int | None = None) -> Tensor:  # (1 or 3, H, W) uint8
    """Decode one image: grey stays one channel, everything else becomes RGB, transparency is dropped.

    With `size`, the largest square in its middle is taken and resized to `size` x `size` pixels.
    """
    pillow = optional("PIL.Image", "lab", asked)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            image = pillow.open(io.BytesIO(content), formats=_FORMATS)
            if image.format == "PNG":
                image.verify()  # compares checksums, which decoding does not; the image is used up by it
                image = pillow.open(io.BytesIO(content), formats=_FORMATS)
            image.load()
    except Exception as error:  # a decoder may stumble over damaged bytes in any way
        raise unreadable(asked, name, error) from error
    image = _eight_bits(asked, name, image)
    if size is not None and image.size != (size, size):
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        # cut, then resized: in one step the filter would look at pixels beyond the cut
        image = image.crop((left, top, left + side, top + side)).resize((size, size), pillow.Resampling.BILINEAR)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, -1).permute(2, 0, 1).contiguous()


def stack(asked: str, part: str, images: list[Tensor]) -> Tensor:
    """Join images of one size; where some are grey and some coloured, all become RGB."""
    sizes = sorted({tuple(image.shape[1:]) for image in images})
    if len(sizes) > 1:
        raise DataError(
            asked,
            f"The {part} images have {len(sizes)} sizes, among them {sizes[0]} and {sizes[-1]}.",
            "Give images of one size; ImageFolder resizes those that are not.",
        )
    if len({image.shape[0] for image in images}) > 1:
        images = [image.expand(3, -1, -1) for image in images]
    return torch.stack(images) if images else torch.empty(0, 1, 0, 0, dtype=torch.uint8)


def _eight_bits(asked: str, name: object, image: Any) -> Any:
    if image.mode in ("1", "L", "LA", "La"):
        return image.convert("L")
    if image.mode in ("P", "PA"):
        return image.convert("RGBA").convert("RGB")  # straight to RGB, Pillow warns of a palette with transparency
    if image.mode in ("RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"):
        return image.convert("RGB")
    raise DataError(
        asked,
        f"{name} has pixels of Pillow's mode {image.mode!r}.",
        "Convert it to 8 bits per channel; doing that here would clip the values.",
    )

"""MNIST's file format: a header of big-endian numbers, then bytes."""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from segue.data.checks import image_dataset
from segue.data.examples import Dataset, Examples
from segue.data.files import existing_file, existing_folder, located, stored, unreadable
from segue.errors import DataError

_PIECE = 2**20


@dataclass(frozen=True, kw_only=True)
class Idx:
    """Load MNIST, Fashion-MNIST or KMNIST from a folder of IDX files, plain or gzipped.

    The folder holds train-images-idx3-ubyte, train-labels-idx1-ubyte and the same with t10k, each with or without .gz.
    """

    folder: str | Path

    def __post_init__(self) -> None:
        stored(self, "folder")

    def __call__(self) -> Dataset:
        asked = f"{self} was to be loaded."
        return read_idx_folder(asked, existing_folder(asked, located(self.folder)))


def read_idx_folder(asked: str, folder: Path, classes: int | None = None) -> Dataset:
    """Read the four files of an MNIST-like dataset."""
    train, test = (
        Examples(
            read_idx(asked, folder / f"{part}-images-idx3-ubyte", 3).unsqueeze(1),
            read_idx(asked, folder / f"{part}-labels-idx1-ubyte", 1).long(),
        )
        for part in ("train", "t10k")
    )
    return image_dataset(asked, train, test, classes)


def read_idx(asked: str, path: Path, dimensions: int) -> Tensor:
    """Read one IDX file of bytes; `path` may lack its .gz."""
    zipped = path.with_name(path.name + ".gz")
    path = zipped if zipped.is_file() and not path.is_file() else existing_file(asked, path)
    try:
        with cast(BinaryIO, gzip.open(path) if path == zipped else path.open("rb")) as stream:
            header = stream.read(4 + 4 * dimensions)
            if header[:4] != bytes([0, 0, 8, dimensions]):  # 8 means unsigned bytes
                raise DataError(
                    asked,
                    f"{path} begins with {header[:4].hex(' ')} instead of 00 00 08 {dimensions:02x}.",
                    f"It must be an IDX file of unsigned bytes with {dimensions} dimensions.",
                )
            if len(header) < 4 + 4 * dimensions:
                raise unreadable(asked, path, "it ends inside its header")
            shape = struct.unpack(f">{dimensions}I", header[4:])
            content = bytearray()
            # piece by piece: a damaged header may promise more than there is memory. Reaching the end checks gzip's checksum
            while len(content) <= prod(shape) and (piece := stream.read(_PIECE)):
                content += piece
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(asked, path, error) from error
    if len(content) != prod(shape):
        length = "more" if len(content) > prod(shape) else str(len(content))
        raise unreadable(asked, path, f"its header promises {'x'.join(map(str, shape))} = {prod(shape)} bytes, it has {length}")
    return torch.frombuffer(content, dtype=torch.uint8).view(shape) if content else torch.empty(shape, dtype=torch.uint8)

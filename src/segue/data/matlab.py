"""Arrays of bytes in MATLAB's files (version 5), which is all that SVHN needs.

Read here because scipy's reader, which knows every other kind of content too, crashes the interpreter on damaged files.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from segue.data.files import contents, unreadable

_INT8, _UINT8, _INT32, _UINT32, _MATRIX, _COMPRESSED = 1, 2, 5, 6, 14, 15  # MATLAB's numbers for what an element holds


def read_matlab(asked: str, path: Path) -> dict[str, Tensor]:
    """Read all arrays of a file by name, if all are arrays of bytes."""
    content = contents(asked, path)
    order = {b"\0\1IM": "<", b"\1\0MI": ">"}.get(content[124:128])  # the version 0x0100 and "MI", each as its machine wrote it
    if order is None:
        raise unreadable(asked, path, "it is no MATLAB file of version 5")
    try:
        return dict(_array(order, kind, element) for kind, element in _elements(order, memoryview(content)[128:]))
    except (ValueError, struct.error, zlib.error) as error:
        raise unreadable(asked, path, error) from error


def _elements(order: str, content: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Split what stands one after the other: kind, length, content, and zeros up to a multiple of eight bytes."""
    while content:
        kind, length = struct.unpack_from(f"{order}II", content)
        start, end = 8, 8 + length
        if kind >> 16:  # at most four bytes of content stand inside the eight of the tag
            kind, length, start, end = kind & 0xFFFF, kind >> 16, 4, 4 + (kind >> 16)
            if length > 4:
                raise ValueError("an element is longer than its place")
        if end > len(content):
            raise ValueError(f"an element of {length} bytes has {len(content) - start}")
        yield kind, content[start:end]
        content = content[end if kind == _COMPRESSED else -(-end // 8) * 8 :]


def _array(order: str, kind: int, element: memoryview) -> tuple[str, Tensor]:
    if kind == _COMPRESSED:
        (kind, element), *more = _elements(order, memoryview(zlib.decompress(element)))
        if more:
            raise ValueError("a compressed element holds several")
    if kind != _MATRIX:
        raise ValueError(f"it holds an element of kind {kind} in the place of an array")
    (flags, _), (sizes, shape_bytes), (letters, name), (values, pixels), *more = _elements(order, element)
    if (flags, sizes, letters, values) != (_UINT32, _INT32, _INT8, _UINT8) or more or len(shape_bytes) % 4:
        raise ValueError("it holds something other than an array of bytes")
    shape = struct.unpack(f"{order}{len(shape_bytes) // 4}i", shape_bytes)
    if min(shape, default=0) < 0 or len(pixels) != prod(shape):
        raise ValueError(f"an array of shape {shape} has {len(pixels)} bytes")
    if not pixels:
        return bytes(name).decode(), torch.empty(shape, dtype=torch.uint8)
    flat = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
    return bytes(name).decode(), flat.view(shape[::-1]).permute(*range(len(shape))[::-1])  # MATLAB's first index runs fastest

"""CIFAR-10 and CIFAR-100 as their authors publish them, in the binary and in the Python version."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from segue.data.checks import image_dataset
from segue.data.examples import Dataset, Examples
from segue.data.files import contents, existing_folder, unreadable
from segue.data.pickled import read_pickled
from segue.errors import DataError

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a version of CIFAR keeps what."""

    binary: str
    pickled: str
    train: tuple[str, ...]
    test: str
    classes: int
    label: str  # its key in the Python version
    label_bytes: int  # per image in the binary version; the last one counts


CIFAR10 = Layout(
    binary="cifar-10-batches-bin",
    pickled="cifar-10-batches-py",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    classes=10,
    label="labels",
    label_bytes=1,
)
CIFAR100 = Layout(
    binary="cifar-100-binary",
    pickled="cifar-100-python",
    train=("train",),
    test="test",
    classes=100,
    label="fine_labels",
    label_bytes=2,
)


def read_cifar(asked: str, folder: Path, layout: Layout) -> Dataset:
    """Read the binary version where it is there, since it is nothing but bytes, else the Python version."""
    if (folder / layout.binary).is_dir():
        folder, suffix, read = folder / layout.binary, ".bin", _read_binary
    else:
        folder, suffix, read = existing_folder(asked, folder / layout.pickled), "", _read_pickled
    batches = [read(asked, folder / f"{name}{suffix}", layout) for name in layout.train]
    if len({len(batch) for batch in batches}) > 1:
        found = f"The batches in {folder} have {', '.join(str(len(batch)) for batch in batches)} images."
        raise DataError(asked, found, "All must be equally many; fetch the files again.")
    train = Examples(torch.cat([batch.inputs for batch in batches]), torch.cat([batch.labels for batch in batches]))
    return image_dataset(asked, train, read(asked, folder / f"{layout.test}{suffix}", layout), layout.classes)


def _read_binary(asked: str, path: Path, layout: Layout) -> Examples:
    content = bytearray(contents(asked, path))
    record = layout.label_bytes + _PIXELS
    if not content or len(content) % record:
        raise unreadable(asked, path, f"its {len(content)} bytes are not a multiple of {record}")
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, record)
    return Examples(_images(records[:, layout.label_bytes :]), records[:, layout.label_bytes - 1].long())


def _read_pickled(asked: str, path: Path, layout: Layout) -> Examples:
    entries = read_pickled(asked, path)
    pixels, labels = entries.get("data"), entries.get(layout.label)
    if not isinstance(pixels, Tensor) or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise unreadable(asked, path, f"it has no array 'data' of N x {_PIXELS} bytes")
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise unreadable(asked, path, f"it has no list {layout.label!r} of whole numbers")
    if len(labels) != len(pixels):
        raise unreadable(asked, path, f"it has {len(pixels)} images but {len(labels)} labels")
    return Examples(_images(pixels), torch.tensor(labels, dtype=torch.int64))


def _images(rows: Tensor) -> Tensor:
    return rows.reshape(-1, 3, 32, 32)

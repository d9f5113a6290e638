"""Tiny datasets in the formats of the real ones, written byte by byte where the format is simple."""

from __future__ import annotations

import gzip
import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from segue.data.dataset import Dataset
from segue.errors import DataError

Part = tuple[Tensor, Tensor]  # images (N, C, H, W) uint8, labels (N,)


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def part(count: int, channels: int = 3, size: int = 32, classes: int = 10, seed: int = 0) -> Part:
    """Draw random images; labels go round, so that every class occurs."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, channels, size, size), generator=generator, dtype=torch.uint8)
    return images, torch.arange(count) % classes


def assert_holds(dataset: Dataset, train: Part, test: Part, classes: int) -> None:
    """Compare a loaded dataset with what was written, pixel for pixel."""
    for examples, (images, labels) in ((dataset.train, train), (dataset.test, test)):
        assert examples.inputs.dtype == torch.uint8
        assert examples.labels.dtype == torch.int64
        assert examples.inputs.is_contiguous()
        assert len(examples) == len(images)
        assert torch.equal(examples.inputs, images)
        assert torch.equal(examples.labels, labels)
    assert dataset.classes == classes
    pixels = train[0].double() / 255
    torch.testing.assert_close(torch.tensor(dataset.mean, dtype=torch.double), pixels.mean((0, 2, 3)))
    torch.testing.assert_close(torch.tensor(dataset.std, dtype=torch.double), pixels.std((0, 2, 3), correction=0))


def raw(tensor: Tensor) -> bytes:
    """Return the bytes of a uint8 tensor."""
    return tensor.contiguous().numpy().tobytes()


def idx(tensor: Tensor) -> bytes:
    """Write a uint8 tensor as MNIST's authors do."""
    return bytes([0, 0, 8, tensor.ndim]) + struct.pack(f">{tensor.ndim}I", *tensor.shape) + raw(tensor)


def write_idx(folder: Path, train: Part, test: Part, zipped: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (images, labels) in (("train", train), ("t10k", test)):
        for file, tensor in ((f"{name}-images-idx3-ubyte", images[:, 0]), (f"{name}-labels-idx1-ubyte", labels.byte())):
            if zipped:
                (folder / f"{file}.gz").write_bytes(gzip.compress(idx(tensor)))
            else:
                (folder / file).write_bytes(idx(tensor))


def png(image: Tensor, mode: str | None = None) -> bytes:
    """Encode one image (C, H, W), converted to Pillow's `mode` if that is given."""
    array = image.permute(1, 2, 0).numpy()
    picture = Image.fromarray(array[:, :, 0] if len(image) == 1 else array)
    stream = io.BytesIO()
    (picture.convert(mode) if mode else picture).save(stream, "PNG")
    return stream.getvalue()


def encoded(images: Tensor) -> list[dict[str, Any]]:
    """Encode images as `datasets` stores them."""
    return [{"bytes": png(image), "path": f"{at}.png"} for at, image in enumerate(images)]


def write_images(folder: Path, images: Tensor, labels: Tensor, names: list[str]) -> None:
    """Write folder/<class>/0000.png and so on."""
    for at, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        (folder / names[label]).mkdir(parents=True, exist_ok=True)
        (folder / names[label] / f"{at:04}.png").write_bytes(png(image))


def by_class(images_and_labels: Part) -> Part:
    """Order examples as a reader of folders finds them."""
    images, labels = images_and_labels
    order = torch.argsort(labels, stable=True)
    return images[order], labels[order]


def python2_pickle(entries: dict[str, Any]) -> bytes:
    """Write a dictionary of lists, strings and uint8 tensors with the instructions that Python 2 and the NumPy of 2009 used."""
    return b"\x80\x02}(" + b"".join(_python2(key) + _python2(value) for key, value in entries.items()) + b"u."


def _python2(value: Any) -> bytes:
    if isinstance(value, str | bytes):
        content = value.encode() if isinstance(value, str) else value
        return (
            b"U" + bytes([len(content)]) + content if len(content) < 256 else b"T" + struct.pack("<i", len(content)) + content
        )
    if isinstance(value, int):
        return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)
    if isinstance(value, list):
        return b"](" + b"".join(_python2(item) for item in value) + b"e"
    assert isinstance(value, Tensor)
    shape = _python2(value.shape[0]) + _python2(value.shape[1]) + b"\x86"
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    return empty + b"(K\x01" + shape + dtype + b"\x89" + _python2(raw(value)) + b"tb"


def cifar100_entries(images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Name things as in the Python version of CIFAR-100."""
    return {
        "filenames": [f"{at}.png" for at in range(len(labels))],
        "batch_label": "training batch 1 of 1",
        "fine_labels": labels.tolist(),
        "coarse_labels": [0] * len(labels),
        "data": images.flatten(1),
    }


def write_cifar100_python(root: Path, train: Part, test: Part) -> None:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True, exist_ok=True)
    for name, (images, labels) in (("train", train), ("test", test)):
        (folder / name).write_bytes(python2_pickle(cifar100_entries(images, labels)))
    (folder / "meta").write_bytes(python2_pickle({"fine_label_names": [str(at) for at in range(100)]}))


def write_cifar100_binary(root: Path, train: Part, test: Part) -> None:
    folder = root / "cifar-100-binary"
    folder.mkdir(parents=True, exist_ok=True)
    for name, (images, labels) in (("train", train), ("test", test)):
        coarse = torch.zeros(len(labels), 1, dtype=torch.uint8)
        (folder / f"{name}.bin").write_bytes(raw(torch.cat([coarse, labels.byte()[:, None], images.flatten(1)], 1)))


def write_cifar10(root: Path, train: Part, test: Part, binary: bool) -> None:
    folder = root / ("cifar-10-batches-bin" if binary else "cifar-10-batches-py")
    folder.mkdir(parents=True, exist_ok=True)
    batches = {f"data_batch_{at}": both for at, both in enumerate(zip(train[0].chunk(5), train[1].chunk(5), strict=True), 1)}
    for name, (images, labels) in {**batches, "test_batch": test}.items():
        if binary:
            (folder / f"{name}.bin").write_bytes(raw(torch.cat([labels.byte()[:, None], images.flatten(1)], 1)))
        else:
            (folder / name).write_bytes(python2_pickle({"labels": labels.tolist(), "data": images.flatten(1)}))


def fails(source: Callable[[], object], *texts: str) -> str:
    """Load, expect a DataError of three lines, and look for `texts` in it."""
    with pytest.raises(DataError) as caught:
        source()
    message = str(caught.value)
    assert len(caught.value.args) == 3
    assert "\n  Hint: " in message
    for text in texts:
        assert text in message, message
    return message


CIFAR100 = part(200, classes=100), part(100, classes=100, seed=1)

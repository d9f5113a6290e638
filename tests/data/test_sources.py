"""Data in: every format pixel for pixel, every kind of damage in clear words, nothing run and nothing fetched unasked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy
import pytest
import torch

from segue import data as sources
from segue.data import (
    Cifar10Png,
    Crop,
    CropFlip,
    Digits,
    Examples,
    HubDataset,
    Idx,
    ImageFolder,
    NoAugmentation,
    Npz,
    Parquet,
    Torchvision,
    Tsv,
    normalise,
)
from segue.data.pixels import as_images
from segue.errors import DataError, MissingExtraError
from tests.data.source_files import (
    assert_holds,
    by_class,
    cifar100_entries,
    idx,
    part,
    png,
    python2_pickle,
    write_cifar10,
    write_cifar10_png,
    write_cifar100_binary,
    write_cifar100_python,
    write_idx,
    write_images,
)


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


# Sources as configurations


SOURCES = [
    Digits(),
    Idx(folder=Path("somewhere")),
    Cifar10Png(folder=Path("somewhere")),
    Npz(path=Path("file.npz")),
    Parquet(train=Path("a.parquet"), test="b.parquet", image="img", label="fine_label"),
    ImageFolder(folder=Path("somewhere")),
    Torchvision(name="CIFAR100", folder=Path("somewhere")),
    HubDataset(id="uoft-cs/cifar100", image="img", label="fine_label"),
    Tsv(train=Path("a.tsv"), test="b.tsv"),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__name__)
def test_a_source_is_its_configuration(source: Any):
    fields = dataclasses.asdict(source)
    assert json.loads(json.dumps(fields)) == fields  # paths are stored as strings
    assert eval(repr(source), vars(sources)) == source
    assert hash(source) == hash(dataclasses.replace(source))
    with pytest.raises(dataclasses.FrozenInstanceError):
        source.folder = "elsewhere"
    with pytest.raises(TypeError):
        type(source)("positional")


def test_torch_alone_is_needed(tmp_path: Path):
    write_idx(tmp_path, part(20, 1, 8), part(10, 1, 8))
    program = f"""
import sys
others = "numpy", "PIL", "pyarrow", "datasets", "torchvision", "sklearn", "scipy", "pandas"
sys.modules.update(dict.fromkeys(others))
from segue.data import *
assert len(Idx(folder={str(tmp_path)!r})().train) == 20
try:
    Digits()()
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == (
        "Digits() was to be loaded.\n  This needs sklearn, which is not installed.\n  Hint: pip install segue[lab]\n"
    )


@pytest.mark.parametrize(
    ("source", "module", "extra"),
    [
        (lambda folder: Digits(), "sklearn.datasets", "lab"),
        (lambda folder: Cifar10Png(folder=folder), "PIL.Image", "lab"),
        (lambda folder: ImageFolder(folder=folder), "PIL.Image", "lab"),
        (lambda folder: Npz(path=folder / "file"), "numpy", "lab"),
        (lambda folder: Parquet(train=folder / "file", test=folder / "file"), "pyarrow", "lab"),
        (lambda folder: Torchvision(name="MNIST", folder=folder, download=True), "torchvision.datasets", "timm"),
        (lambda folder: HubDataset(id="some/data"), "datasets", "hf"),
    ],
)
def test_missing_packages(source: Callable[[Path], Any], module: str, extra: str, tmp_path: Path, monkeypatch: Any):
    write_cifar10_png(tmp_path, part(10), part(5))
    write_images(tmp_path / "train", *part(4, classes=2), ["a", "b"])
    write_images(tmp_path / "test", *part(4, classes=2), ["a", "b"])
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError) as caught:
        source(tmp_path)()
    package = module.partition(".")[0]
    assert str(caught.value).splitlines()[1:] == [
        f"  This needs {package}, which is not installed.",
        f"  Hint: pip install segue[{extra}]",
    ]


def test_a_broken_package_is_not_called_missing(tmp_path: Path, monkeypatch: Any):
    (tmp_path / "brokenpackage.py").write_text("import something_else_that_is_absent")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError, match=r"cannot be imported: No module named 'something_else_that_is_absent'\."):
        sources.extras.optional("brokenpackage", "lab", "It was asked for.")


# Digits


def test_digits_keep_their_split():
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images = (torch.from_numpy(pixels)[order].view(-1, 1, 8, 8) * 255 / 16).floor().byte()
    labels = torch.from_numpy(labels)[order]
    assert_holds(Digits()(), (images[500:], labels[500:]), (images[:500], labels[:500]), 10)
    assert (int(images.min()), int(images.max())) == (0, 255)


# IDX


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_holds_every_pixel(tmp_path: Path, zipped: bool):
    train, test = part(30, 1, 28), part(20, 1, 28, seed=1)
    write_idx(tmp_path, train, test, zipped)
    assert_holds(Idx(folder=tmp_path)(), train, test, 10)


def test_idx_agrees_with_torchvision(tmp_path: Path):
    from torchvision.datasets import MNIST

    write_idx(tmp_path / "MNIST" / "raw", part(30, 1, 28), part(20, 1, 28, seed=1))
    ours = Torchvision(name="MNIST", folder=tmp_path)()
    for examples, train in ((ours.train, True), (ours.test, False)):
        theirs = MNIST(tmp_path, train=train)
        assert torch.equal(examples.inputs[:, 0], theirs.data)
        assert torch.equal(examples.labels, theirs.targets)


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("file", "damage", "texts"),
    [
        (IMAGES, lambda b: b[:-1], ["promises 30x8x8 = 1920 bytes, it has 1919", "damaged or cut short"]),
        (IMAGES, lambda b: b + b"\0", ["promises 30x8x8 = 1920 bytes, it has more"]),
        (IMAGES, lambda b: b[:10], ["it ends inside its header"]),
        (IMAGES, lambda b: b"", ["begins with  instead of 00 00 08 03"]),
        (IMAGES, lambda b: b"\0\0\x0d\3" + b[4:], ["begins with 00 00 0d 03 instead of 00 00 08 03", "unsigned bytes"]),
        (IMAGES, lambda b: b[:4] + b"\xff" * 12 + b[16:], ["4294967295x4294967295x4294967295", "it has 1920"]),
        (IMAGES, lambda b: idx(torch.zeros(0, 8, 8, dtype=torch.uint8)), ["The training part is empty."]),
        (IMAGES, lambda b: idx(torch.zeros(30, 8, 8, dtype=torch.uint8)), ["All training pixels are equal."]),
        (IMAGES, lambda b: idx(part(30, 1, 9)[0][:, 0]), ["have the shape (1, 9, 9), test images (1, 8, 8)"]),
        (LABELS, lambda b: idx(torch.arange(29, dtype=torch.uint8)), ["has 30 images but 29 labels"]),
        (LABELS, lambda b: idx(torch.arange(30, dtype=torch.uint8) % 10 + 1), ["take 10 of the 11 values", "smallest is 1"]),
        (LABELS, lambda b: b[:-1] + b"\xff", ["take 11 of the 256 values from 0 to 255", "without large gaps"]),
        (LABELS, lambda b: idx(torch.arange(30, dtype=torch.uint8) % 9), ["test labels go up to 9, but there are 9 classes"]),
        (LABELS, lambda b: idx(torch.zeros(30, dtype=torch.uint8)), ["There is only one class."]),
    ],
)
def test_damaged_idx(tmp_path: Path, file: str, damage: Callable[[bytes], bytes], texts: list[str]):
    write_idx(tmp_path, part(30, 1, 8), part(20, 1, 8))
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(damage(whole))
    fails(Idx(folder=tmp_path), f"Idx(folder={str(tmp_path)!r}) was to be loaded.", *texts)


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-9], lambda b: b"no gzip", lambda b: b[:-8] + b"\0" * 4 + b[-4:], lambda b: b[:40] + b"\xff" * 9 + b[49:]],
    ids=["cut", "another format", "checksum", "content"],
)
def test_damaged_gzip(tmp_path: Path, damage: Callable[[bytes], bytes]):
    write_idx(tmp_path, part(30, 1, 8), part(20, 1, 8), zipped=True)
    file = tmp_path / f"{IMAGES}.gz"
    file.write_bytes(damage(file.read_bytes()))
    fails(Idx(folder=tmp_path), f"{file} cannot be read (", "damaged or cut short")


def test_an_absent_file_and_its_neighbours(tmp_path: Path):
    write_idx(tmp_path, part(30, 1, 8), part(20, 1, 8))
    (tmp_path / IMAGES).rename(tmp_path / "train-images.idx3-ubyte")
    fails(
        Idx(folder=tmp_path),
        f"There is no file {tmp_path / IMAGES}.",
        f"Look in {tmp_path}. Nearest names: train-images.idx3-ubyte, ",
    )
    fails(Idx(folder=tmp_path / "mnits" / "raw"), f"There is no folder {tmp_path / 'mnits' / 'raw'}.", f"Look in {tmp_path}.")
    fails(Idx(folder=tmp_path / LABELS), "is not a folder.", "Give the path of a folder.")
    (tmp_path / IMAGES).mkdir()
    fails(Idx(folder=tmp_path), "is not a file.")


def test_home_is_found_but_not_stored(tmp_path: Path, monkeypatch: Any):
    write_idx(tmp_path / "mnist", part(30, 1, 8), part(20, 1, 8))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    source = Idx(folder="~/mnist")
    assert len(source().train) == 30
    assert source.folder == "~/mnist"


# CIFAR-10 in PNG files


def test_cifar10_png_holds_every_pixel(tmp_path: Path):
    train, test = part(50), part(20, seed=1)
    write_cifar10_png(tmp_path, train, test)
    assert_holds(Cifar10Png(folder=tmp_path)(), train, test, 10)


@pytest.mark.parametrize(
    ("file", "content", "texts"),
    [
        ("data_batch_3.png", lambda b: b[: len(b) // 2], ["data_batch_3.png cannot be read ("]),
        ("data_batch_3.png", lambda b: b[:2000] + bytes([b[2000] ^ 1]) + b[2001:], ["data_batch_3.png cannot be read ("]),
        ("test_batch.png", lambda b: png(torch.zeros(3, 4, 8, dtype=torch.uint8)), ["is 8 x 4 pixels with 3 channels"]),
        ("test_batch.png", lambda b: png(torch.zeros(1, 4, 1024, dtype=torch.uint8)), ["1024 x 4 pixels with 1 channels"]),
        ("train_lables.json", lambda b: b[:-1], ["train_lables.json cannot be read (JSONDecodeError"]),
        ("train_lables.json", lambda b: b"\xff\xfe\xfd", ["train_lables.json cannot be read (UnicodeDecodeError"]),
        ("train_lables.json", lambda b: b'["cat"]', ["is not a list of whole numbers"]),
        ("train_lables.json", lambda b: b"[true, 1e3]", ["is not a list of whole numbers"]),
        ("train_lables.json", lambda b: b"[0, 1]", ["has 50 images but 2 labels"]),
        ("test_lables.json", lambda b: b.replace(b"[0", b"[-1"), ["test labels go down to -1", "kept secret"]),
        ("test_lables.json", lambda b: b.replace(b"[0", b"[10"), ["test labels go up to 10, but there are 10 classes"]),
    ],
)
def test_damaged_cifar10_png(tmp_path: Path, file: str, content: Callable[[bytes], bytes], texts: list[str]):
    write_cifar10_png(tmp_path, part(50), part(20))
    (tmp_path / file).write_bytes(content((tmp_path / file).read_bytes()))
    fails(Cifar10Png(folder=tmp_path), *texts)


# NumPy archives


def save(path: Path, **changes: Any) -> Npz:
    (x_train, y_train), (x_test, y_test) = part(30), part(20, seed=1)
    arrays = {
        "x_train": x_train.permute(0, 2, 3, 1),
        "y_train": y_train,
        "x_test": x_test.permute(0, 2, 3, 1),
        "y_test": y_test,
    }
    arrays = {name: numpy.asarray(array) for name, array in arrays.items()}
    arrays.update(changes)
    numpy.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return Npz(path=path)


def both(change: Callable[[Any], Any]) -> dict[str, Any]:
    """Change the images of both parts, given as NHWC arrays."""
    return {
        "x_train": change(part(30)[0].permute(0, 2, 3, 1).numpy()),
        "x_test": change(part(20, seed=1)[0].permute(0, 2, 3, 1).numpy()),
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"y_train": numpy.arange(30, dtype=numpy.uint8)[:, None] % 10},
        both(lambda x: x.transpose(0, 3, 1, 2)),
        both(lambda x: x.astype(numpy.int64)),
        both(lambda x: x.astype(">i4")),
        both(lambda x: numpy.concatenate([x, x[..., :1] * 0], 3)),
        both(lambda x: (x / 255).astype(numpy.float64)),
        both(lambda x: (x / 255).astype(numpy.float32)),
        both(lambda x: (x / 255).astype(">f4")),
        both(lambda x: (x / 255).astype(numpy.float16)),
        both(lambda x: numpy.asfortranarray(x)),
    ],
    ids="plain column channels-first int64 big-endian alpha float64 float32 big-endian-float float16 fortran".split(),  # noqa: SIM905
)
def test_npz_holds_every_pixel(tmp_path: Path, changes: dict[str, Any]):
    assert_holds(save(tmp_path / "data.npz", **changes)(), part(30), part(20, seed=1), 10)


def test_npz_grey_images(tmp_path: Path):
    source = save(tmp_path / "data.npz", **both(lambda x: x[..., 0]))
    (train, labels), (test, test_labels) = part(30), part(20, seed=1)
    assert_holds(source(), (train[:, :1], labels), (test[:, :1], test_labels), 10)


def test_floats_become_the_nearest_255th():
    values = torch.tensor([0.0, 0.4 / 255, 0.6 / 255, 0.5, 1.0]).view(1, 1, 5).numpy()
    assert as_images("", "", values).flatten().tolist() == [0, 0, 1, 128, 255]


def spoiled(value: float) -> dict[str, Any]:
    def spoil(x: Any) -> Any:
        x = x / 255
        x[0, 0, 0, 0] = value
        return x

    return both(spoil)


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        (spoiled(float("nan")), ["The training images contain NaN."]),
        (spoiled(float("inf")), ["training images are float64 from 0 to inf"]),
        (spoiled(1.01), ["training images are float64 from 0 to 1.01", "standardise later"]),
        (spoiled(-0.5), ["training images are float64 from -0.5 to 1"]),
        (both(lambda x: x.astype(numpy.float32)), ["training images are float32 from 0 to 255", "floats between 0 and 1"]),
        (both(lambda x: x.astype(numpy.int32) * 2), ["training images are int32 from 0 to 510"]),
        (both(lambda x: x > 9), ["training images are bool", "Give uint8"]),
        (both(lambda x: x[..., :2]), ["training images have the shape (30, 32, 32, 2)", "(N, H, W, C)"]),
        (both(lambda x: x.reshape(len(x), -1)), ["training images have the shape (30, 3072)"]),
        (both(lambda x: x[:0]), ["The training part is empty."]),
        ({"x_test": numpy.zeros((20, 16, 16, 3), numpy.uint8)}, ["shape (3, 32, 32), test images (3, 16, 16)"]),
        ({"x_test": numpy.zeros((20, 32, 32), numpy.uint8)}, ["shape (3, 32, 32), test images (1, 32, 32)"]),
        ({"y_test": numpy.arange(19)}, ["The test part has 20 images but 19 labels."]),
        ({"y_train": numpy.arange(30) / 2}, ["training labels are float64 of shape (30,)"]),
        ({"y_train": numpy.eye(30, dtype=numpy.int64)}, ["training labels are int64 of shape (30, 30)", "argmax"]),
        ({"y_train": numpy.arange(30) - 1}, ["training labels go down to -1"]),
        ({"y_train": None, "y_trian": numpy.arange(30)}, ["has no array 'y_train'", "Nearest names: x_train, y_trian"]),
        ({"x_train": numpy.array([{}] * 30, dtype=object)}, ["data.npz cannot be read (ValueError: Object arrays cannot be"]),
    ],
)
def test_unusable_npz(tmp_path: Path, changes: dict[str, Any], texts: list[str]):
    fails(save(tmp_path / "data.npz", **changes), *texts)


def test_damaged_npz(tmp_path: Path):
    source = save(tmp_path / "data.npz")
    whole = (tmp_path / "data.npz").read_bytes()
    for content in (whole[:-100], whole[:5000] + b"\xff" * 50 + whole[5050:], b"", pickle.dumps({"x_train": 1})):
        (tmp_path / "data.npz").write_bytes(content)
        fails(source, "data.npz cannot be read (")
    numpy.save(tmp_path / "one.npy", numpy.arange(3))
    fails(Npz(path=tmp_path / "one.npy"), "one.npy cannot be read (")
    fails(Npz(path=tmp_path / "dada.npz"), "There is no file", "Nearest names: data.npz")


# Parquet


def write_parquet(path: Path, images: Any, labels: Any, **names: str) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {names.get("image", "image"): images, names.get("label", "label"): pyarrow.array(labels)}
    parquet.write_table(pyarrow.table(columns), path)


def encoded(images: torch.Tensor) -> list[dict[str, Any]]:
    return [{"bytes": png(image), "path": f"{at}.png"} for at, image in enumerate(images)]


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "structs": encoded,
    "bytes": lambda images: [png(image) for image in images],
    "lists": lambda images: images.permute(0, 2, 3, 1).tolist(),
    "channels first": lambda images: images.tolist(),
    "floats": lambda images: (images.double() / 255).tolist(),
}


@pytest.mark.parametrize("form", FORMS)
def test_parquet_holds_every_pixel(tmp_path: Path, form: str):
    train, test = part(30), part(20, seed=1)
    names = {"image": "img", "label": "fine_label"}
    write_parquet(tmp_path / "train.parquet", FORMS[form](train[0]), train[1].tolist(), **names)
    write_parquet(tmp_path / "test.parquet", FORMS[form](test[0]), test[1].tolist(), **names)
    assert_holds(Parquet(train=tmp_path / "train.parquet", test=tmp_path / "test.parquet", **names)(), train, test, 10)


def test_parquet_in_several_files_and_fixed_lists(tmp_path: Path):
    import pyarrow

    train, test = part(30, 1, 4), part(20, 1, 4, seed=1)
    pixels = pyarrow.list_(pyarrow.list_(pyarrow.uint8(), 4), 4)
    for at, (images, labels) in enumerate(zip(train[0].chunk(3), train[1].chunk(3), strict=True)):
        write_parquet(tmp_path / f"train-{at}-of-3.parquet", pyarrow.array(images[:, 0].tolist(), pixels), labels.tolist())
    write_parquet(tmp_path / "test.parquet", pyarrow.array(test[0][:, 0].tolist(), pixels), test[1].tolist())
    source = Parquet(train=tmp_path / "train-*.parquet", test=tmp_path / "test.parquet")
    assert_holds(source(), train, test, 10)
    fails(Parquet(train=tmp_path / "absent-*.parquet", test=tmp_path / "test.parquet"), "There is no file", "absent-*.parquet")
    write_parquet(tmp_path / "train-3-of-3.parquet", encoded(train[0]), train[1].tolist())
    fails(source, "train-*.parquet cannot be read (")


def test_parquet_written_by_datasets_names_its_classes(tmp_path: Path):
    train, test = part(30), part(20, seed=1)
    write_with_datasets(tmp_path, train, test, classes=12)
    assert_holds(Parquet(train=tmp_path / "train.parquet", test=tmp_path / "test.parquet")(), train, test, 12)


@pytest.mark.parametrize(
    ("images", "labels", "texts"),
    [
        ("structs", [0, 1, -1], ["training labels go down to -1"]),
        ("structs", [0, 1, None], ["column 'label' of the training part has 1 empty places"]),
        ("structs", ["a", "b", "c"], ["column 'label' of the training part holds string"]),
        ([None, None, None], [0, 1, 2], ["column 'image' of the training part has 3 empty places"]),
        ([1, 2, 3], [0, 1, 2], ["column 'image' of the training part holds int64", "nested lists of pixels"]),
        ([{"bytes": None, "path": "a.png"}] * 3, [0, 1, 2], ["no bytes, only the path 'a.png'", "ImageFolder"]),
        ([{"bytes": b"?", "path": "a.png"}] * 3, [0, 1, 2], ["training image 0 cannot be read (UnidentifiedImageError"]),
        ([[[1, 2], [3, 4]], [[1, 2], [3]], [[1, 2], [3, 4]]], [0, 1, 2], ["lists of different lengths: 2, 1."]),
        ([[[1, 2]], [[1, None]], [[1, 2]]], [0, 1, 2], ["lists of int64 with 1 empty places"]),
        ([[["a"]], [["b"]], [["c"]]], [0, 1, 2], ["lists of string with 0 empty places"]),
        ([[1, 2], [3, 4], [5, 6]], [0, 1, 2], ["training images have the shape (3, 2)"]),
        ([[[float("nan")]]] * 3, [0, 1, 2], ["The training images contain NaN."]),
        ([[[256]], [[0]], [[0]]], [0, 1, 2], ["training images are int64 from 0 to 256"]),
    ],
)
def test_unusable_parquet(tmp_path: Path, images: Any, labels: Any, texts: list[str]):
    path = tmp_path / "data.parquet"
    write_parquet(path, encoded(part(3)[0]) if images == "structs" else images, labels)
    fails(Parquet(train=path, test=path), *texts)


def test_damaged_parquet(tmp_path: Path):
    path = tmp_path / "data.parquet"
    source = Parquet(train=path, test=path)
    for images in (encoded(part(0)[0]), part(0)[0].tolist()):
        write_parquet(path, images, [0][:0])
        fails(source)
    write_parquet(path, encoded(part(3)[0]), [0, 1, 2], image="img")
    fails(source, "The training part has no column 'image'.", "image=... and label=... Nearest names: img.")
    whole = path.read_bytes()
    for content in (whole[:-9], whole[: len(whole) // 2], b""):
        path.write_bytes(content)
        fails(source, "data.parquet cannot be read (")
    images = encoded(part(3)[0])
    images[1] = {"bytes": png(part(1, size=16)[0][0]), "path": ""}
    write_parquet(path, images, [0, 1, 2])
    fails(source, "images have 2 sizes, among them (16, 16) and (32, 32).", "ImageFolder resizes")


# Folders of images


NAMES = ["cat", "dog", "emu"]


@pytest.mark.parametrize("second", ["test", "val"])
@pytest.mark.parametrize("channels", [1, 3])
def test_image_folder_agrees_with_torchvision(tmp_path: Path, second: str, channels: int):
    from torchvision.datasets import ImageFolder as Theirs

    train, test = part(12, channels, 16, classes=3), part(6, channels, 16, classes=3, seed=1)
    write_images(tmp_path / "train", *train, NAMES)
    write_images(tmp_path / second, *test, NAMES)
    (tmp_path / "train" / "cat" / ".hidden.png").write_bytes(b"")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / ".cache").mkdir()
    dataset = ImageFolder(folder=tmp_path, size=16)()
    assert_holds(dataset, by_class(train), by_class(test), 3)
    theirs = Theirs(tmp_path / second)
    assert dataset.test.labels.tolist() == theirs.targets
    for image, (their_image, _) in zip(dataset.test.inputs, theirs, strict=True):
        assert torch.equal(image.expand(3, -1, -1), torch.from_numpy(numpy.array(their_image)).permute(2, 0, 1))


def test_the_test_part_wins_over_val_and_may_lack_a_class(tmp_path: Path):
    train, test, other = part(12, classes=3), part(4, classes=2, seed=1), part(6, classes=3, seed=2)
    for name, images in (("train", train), ("test", test), ("val", other)):
        write_images(tmp_path / name, *images, NAMES)
    assert_holds(ImageFolder(folder=tmp_path)(), by_class(train), by_class(test), 3)


def test_images_of_every_kind(tmp_path: Path):
    from PIL import Image

    colour = torch.zeros(3, 8, 8, dtype=torch.uint8)
    colour[0, :4], colour[2, 4:] = 255, 255
    grey = torch.arange(64, dtype=torch.uint8).view(1, 8, 8)
    for folder in ("train", "test"):
        write_images(tmp_path / folder, colour[None], torch.tensor([0]), ["a", "b"])
        write_images(tmp_path / folder, grey[None], torch.tensor([1]), ["a", "b"])
    for mode in ("RGBA", "P"):
        (tmp_path / "train" / "a" / f"{mode}.png").write_bytes(png(colour, mode))
    (tmp_path / "train" / "b" / "LA.png").write_bytes(png(grey, "LA"))
    (tmp_path / "train" / "b" / "one.PNG").write_bytes(png(grey, "1"))
    palette = Image.fromarray(colour.permute(1, 2, 0).numpy()).quantize(4)
    palette.save(tmp_path / "train" / "a" / "transparent.png", transparency=bytes([0, 128, 255, 255]))
    palette.save(tmp_path / "train" / "a" / "x.gif")
    dataset = ImageFolder(folder=tmp_path, size=8)()
    assert torch.equal(dataset.train.inputs[:5], colour.expand(5, -1, -1, -1))  # transparency is dropped
    assert torch.equal(dataset.train.inputs[5], grey.expand(3, -1, -1))  # beside coloured images, grey becomes RGB
    assert torch.equal(dataset.train.inputs[6], grey.expand(3, -1, -1))
    assert dataset.train.inputs.shape == (8, 3, 8, 8)


def test_image_folder_takes_the_middle_and_resizes(tmp_path: Path):
    from PIL import Image

    image = part(1, 3, 16)[0][0]
    wide = torch.cat([torch.zeros_like(image[:, :, :4]), image, torch.zeros_like(image[:, :, :4])], 2)
    for folder in ("train", "test"):
        write_images(tmp_path / folder, wide[None], torch.tensor([0]), ["a", "b"])
        write_images(tmp_path / folder, image[None], torch.tensor([1]), ["a", "b"])
    loaded = ImageFolder(folder=tmp_path, size=16)().train.inputs
    assert torch.equal(loaded[0], image)
    small = ImageFolder(folder=tmp_path, size=6)().train.inputs
    expected = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((6, 6), Image.Resampling.BILINEAR)
    assert torch.equal(small[1], torch.from_numpy(numpy.array(expected)).permute(2, 0, 1))
    assert torch.equal(small[0], small[1])


def test_unusable_image_folders(tmp_path: Path):
    source = ImageFolder(folder=tmp_path)
    fails(source, f"There is no folder {tmp_path / 'train'}.", "no names to choose from")
    (tmp_path / "train").mkdir()
    fails(source, f"There is no folder {tmp_path / 'test'}.", "The only names are: train.")
    (tmp_path / "test").mkdir()
    fails(source, "The training part is empty.")
    write_images(tmp_path / "train", *part(2, classes=1), ["cat"])
    write_images(tmp_path / "test", *part(2, classes=1), ["cat"])
    fails(source, "There is only one class.")
    (tmp_path / "train" / "dog").mkdir()
    fails(source, f"{tmp_path / 'train' / 'dog'} holds no image.", ".png", "remove the folder")
    file = tmp_path / "train" / "dog" / "1.png"
    whole = png(part(1)[0][0])
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n%%EndComments\n"  # Pillow would hand it to an interpreter
    for content in (whole[:-30], whole[:200] + bytes([whole[200] ^ 4]) + whole[201:], script, b""):
        file.write_bytes(content)
        fails(source, f"{file} cannot be read (", "damaged or cut short")
    from PIL import Image

    Image.fromarray(numpy.full((8, 8), 4000, numpy.uint16)).save(file)
    fails(source, "has pixels of Pillow's mode 'I;16'", "8 bits per channel")
    file.write_bytes(whole)
    write_images(tmp_path / "test", *part(1), ["dgo"])
    fails(source, f"{tmp_path / 'test'} has a class 'dgo' that {tmp_path / 'train'} does not have.", "Nearest names: dog")
    fails(lambda: ImageFolder(folder=tmp_path, size=0), "size is 0.")


def test_an_image_too_large_is_refused(tmp_path: Path, monkeypatch: Any):
    from PIL import Image

    for folder in ("train", "test"):
        write_images(tmp_path / folder, *part(2, classes=2), ["a", "b"])
    for limit in (1000, 100):  # Pillow warns above its limit and stops above twice of it
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        fails(ImageFolder(folder=tmp_path), "0000.png cannot be read (DecompressionBomb")


# CIFAR and SVHN, as torchvision stores them


@pytest.fixture
def unchecked(monkeypatch: Any) -> None:
    """Let torchvision read files that are not the real ones."""
    from torchvision.datasets import cifar, svhn

    for module in (cifar, svhn):
        monkeypatch.setattr(module, "check_integrity", lambda path, md5: os.path.isfile(path))


CIFAR100 = part(200, classes=100), part(100, classes=100, seed=1)


@pytest.mark.usefixtures("unchecked")
def test_cifar100_agrees_with_torchvision(tmp_path: Path):
    from torchvision import datasets

    write_cifar100_python(tmp_path, *CIFAR100)
    ours = Torchvision(name="CIFAR100", folder=tmp_path)()
    assert_holds(ours, *CIFAR100, 100)
    for examples, train in ((ours.train, True), (ours.test, False)):
        theirs = datasets.CIFAR100(tmp_path, train=train)
        assert torch.equal(examples.inputs.permute(0, 2, 3, 1), torch.from_numpy(theirs.data))
        assert examples.labels.tolist() == theirs.targets


def test_cifar100_in_its_binary_version_goes_first(tmp_path: Path):
    write_cifar100_binary(tmp_path, *CIFAR100)
    (tmp_path / "cifar-100-python").mkdir()
    (tmp_path / "cifar-100-python" / "train").write_bytes(b"never read")
    assert_holds(Torchvision(name="CIFAR100", folder=tmp_path)(), *CIFAR100, 100)


@pytest.mark.parametrize("binary", [False, True])
def test_cifar10_in_both_versions(tmp_path: Path, binary: bool):
    train, test = part(50), part(20, seed=1)
    write_cifar10(tmp_path, train, test, binary)
    assert_holds(Torchvision(name="CIFAR10", folder=tmp_path)(), train, test, 10)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_pickles_of_every_age_are_understood(tmp_path: Path, protocol: int, order: Any):
    write_cifar100_python(tmp_path, *CIFAR100)
    for name, (images, labels) in zip(("train", "test"), CIFAR100, strict=True):
        entries = cifar100_entries(images, labels)
        entries["data"] = numpy.array(entries["data"].numpy(), order=order)
        (tmp_path / "cifar-100-python" / name).write_bytes(pickle.dumps(entries, protocol))
    assert_holds(Torchvision(name="CIFAR100", folder=tmp_path)(), *CIFAR100, 100)


class Malice:
    """What an attacker would put into a pickle."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.path),))


class Shell:
    """The classic."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f'touch "{self.path}"',))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("attack", [Malice, Shell])
def test_nothing_in_a_pickle_is_run(tmp_path: Path, protocol: int, attack: Any):
    write_cifar100_python(tmp_path, *CIFAR100)
    touched = tmp_path / "touched"
    content = pickle.dumps({"data": attack(str(touched)), "fine_labels": [0]}, protocol)
    (tmp_path / "cifar-100-python" / "train").write_bytes(content)
    fails(Torchvision(name="CIFAR100", folder=tmp_path), " asks for ", "which was not done", "do not trust this one")
    assert not touched.exists()
    pickle.loads(content)
    assert touched.exists()  # the attack was a real one


def with_array(**changes: Any) -> bytes:
    entries = cifar100_entries(*CIFAR100[0])
    entries.update(changes)
    return python2_pickle({name: value for name, value in entries.items() if value is not None})


WHOLE = with_array()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "cannot be read ("),
        (WHOLE[:-1], "cannot be read ("),
        (WHOLE[:3000], "cannot be read ("),
        (WHOLE[: len(WHOLE) // 2], "cannot be read ("),
        (b"\x80\x02K\x01.", "cannot be read (AttributeError"),
        (b"\x80\x02u.", "cannot be read (IndexError"),
        (b"\x80\x02h\x05.", "cannot be read (KeyError"),
        (b"\x80\x02}U\x04data](K\x01eub.", "cannot be read ("),
        (b"\x80\x02}K\x01b.", "asks for a change of something that is no array"),
        (b"\x80\x02}U\x04data" + b"cnumpy\nndarray\n)Rs.", "asks for a call of numpy ndarray"),
        (b"\x80\x02}U\x04dataU\x01x)Rs.", "asks for a call of str"),
        (b"\x80\x02}U\x04data" + b"cbuiltins\neval\nU\x011\x85Rs.", "asks for builtins.eval"),
        (b"\x80\x02}U\x04data" + b"cnumpy\ndtype\nU\x02u1\x85Rs.", "a dtype in the place of an array"),
        (b"\x80\x02}U\x04data" + b"cnumpy.core.multiarray\n_reconstruct\n)Rs.", "cannot be read ("),
        (WHOLE.replace(b"U\x02u1", b"U\x02O8"), "its array is not one of bytes"),
        (WHOLE.replace(b"M\x00\x0c", b"M\x01\x0c"), "an array of shape (200, 3073) has 614400 bytes"),
        (with_array(data=None), "it has no array 'data' of N x 3072 bytes"),
        (with_array(data=torch.zeros(4, 4, dtype=torch.uint8)), "it has no array 'data' of N x 3072 bytes"),
        (with_array(data=[1, 2]), "it has no array 'data' of N x 3072 bytes"),
        (with_array(fine_labels=None), "it has no list 'fine_labels' of whole numbers"),
        (with_array(fine_labels=["cat"] * 200), "it has no list 'fine_labels' of whole numbers"),
        (with_array(fine_labels=[1] * 199), "it has 200 images but 199 labels"),
        (with_array(fine_labels=[100] * 200), "training labels go up to 100, but there are 100 classes"),
    ],
)
def test_damaged_pickles(tmp_path: Path, content: bytes, text: str):
    write_cifar100_python(tmp_path, *CIFAR100)
    (tmp_path / "cifar-100-python" / "train").write_bytes(content)
    fails(Torchvision(name="CIFAR100", folder=tmp_path), text)


def test_damaged_pickles_of_any_kind_end_in_a_data_error(tmp_path: Path):
    write_cifar100_python(tmp_path, *CIFAR100)
    file = tmp_path / "cifar-100-python" / "train"
    start = python2_pickle({"fine_labels": [1, 2], "batch_label": "b", "data": torch.zeros(1, 3, dtype=torch.uint8)})
    generator = torch.Generator().manual_seed(0)
    for at in torch.randint(2, len(start), (300,), generator=generator).tolist():
        value = int(torch.randint(256, (1,), generator=generator))
        file.write_bytes(start[:at] + bytes([value]) + start[at + 1 :])
        fails(Torchvision(name="CIFAR100", folder=tmp_path))


def test_damaged_cifar_binaries(tmp_path: Path):
    write_cifar100_binary(tmp_path, *CIFAR100)
    file = tmp_path / "cifar-100-binary" / "train.bin"
    source = Torchvision(name="CIFAR100", folder=tmp_path)
    whole = file.read_bytes()
    for content in (whole[:-1], b""):
        file.write_bytes(content)
        fails(source, f"its {len(content)} bytes are not a multiple of 3074")
    file.unlink()
    fails(
        source,
        f"There is no file {file}.",
        "The only names are: test.bin.",
        "Or pass download=True to let torchvision fetch it.",
    )
    write_cifar10(tmp_path, part(50), part(20), binary=True)
    first = tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin"
    first.write_bytes(first.read_bytes()[: 9 * 3073])
    fails(Torchvision(name="CIFAR10", folder=tmp_path), "have 9, 10, 10, 10, 10 images", "equally many")


def write_svhn(folder: Path, train: Any, test: Any, compressed: bool = True) -> None:
    from scipy.io import savemat

    for name, (images, labels) in (("train", train), ("test", test)):
        digits = torch.where(labels == 0, 10, labels).byte()[:, None].numpy()
        arrays = {"X": images.permute(2, 3, 1, 0).numpy(), "y": digits}
        savemat(folder / f"{name}_32x32.mat", arrays, do_compression=compressed)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("count", [3, 4, 30])  # up to four labels are written in a shorter form
def test_svhn_agrees_with_torchvision(tmp_path: Path, compressed: bool, count: int):
    from torchvision import datasets

    train, test = part(30), part(count, seed=1)
    write_svhn(tmp_path, train, test, compressed)
    ours = Torchvision(name="SVHN", folder=tmp_path)()
    assert_holds(ours, train, test, 10)
    theirs = datasets.SVHN(tmp_path, split="test")
    assert torch.equal(ours.test.inputs, torch.from_numpy(theirs.data))
    assert ours.test.labels.tolist() == theirs.labels.tolist()


def test_damaged_svhn(tmp_path: Path):
    from scipy.io import savemat

    write_svhn(tmp_path, part(3), part(3), compressed=False)
    file, source = tmp_path / "test_32x32.mat", Torchvision(name="SVHN", folder=tmp_path)
    whole = file.read_bytes()
    for content in (whole[:3000], whole[:-3], whole[:130], b"no matlab", whole[:124] + b"\2\0IM" + whole[128:]):
        file.write_bytes(content)
        fails(source, "test_32x32.mat cannot be read (")
    for arrays in ({"X": numpy.zeros((2, 2))}, {"X": "text"}, {"X": {"a": 1}}):
        savemat(file, arrays)
        fails(source, "test_32x32.mat cannot be read (ValueError: ")
    savemat(file, {"X": numpy.zeros((2, 2), numpy.uint8), "y": numpy.zeros((2, 1), numpy.uint8)})
    fails(source, "has no images X (H, W, C, N) and labels y (N, 1).")
    generator = torch.Generator().manual_seed(0)
    for at, value in zip(*torch.randint(256, (2, 300), generator=generator).tolist(), strict=True):
        file.write_bytes(whole[: 120 + at] + bytes([value]) + whole[121 + at :])  # scipy's own reader dies of some of these
        try:
            source()
        except DataError:
            continue


def test_torchvision_names_and_layouts(tmp_path: Path):
    fails(lambda: Torchvision(name="CIFAR", folder=tmp_path), "There is no reader for 'CIFAR'.", "CIFAR10, CIFAR100")
    (tmp_path / "cifar-100").mkdir()
    source = Torchvision(name="CIFAR100", folder=tmp_path)
    fails(source, f"no folder {tmp_path / 'cifar-100-python'}", "Nearest names: cifar-100.", "Or pass download=True")
    train, test = part(30, 1, 28), part(20, 1, 28, seed=1)
    write_idx(tmp_path / "FashionMNIST" / "raw", train, test, zipped=True)
    assert_holds(Torchvision(name="FashionMNIST", folder=tmp_path)(), train, test, 10)


# Downloads


@pytest.fixture
def no_network(monkeypatch: Any) -> None:
    import urllib.request

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


@pytest.fixture
def server() -> Iterator[Callable[[Path], str]]:
    """Serve folders on this machine, as the homes of the datasets do."""
    running = []

    def serve(folder: Path) -> str:
        class Quiet(SimpleHTTPRequestHandler):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments, directory=str(folder))

            def log_message(self, *arguments: Any) -> None:
                pass

        running.append(ThreadingHTTPServer(("127.0.0.1", 0), Quiet))
        Thread(target=running[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{running[-1].server_port}/"

    yield serve
    for each in running:
        each.shutdown()
        each.server_close()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def test_cifar100_is_fetched_by_torchvision_and_read_here(tmp_path: Path, monkeypatch: Any, server: Any):
    from torchvision import datasets

    write_cifar100_python(tmp_path / "server", *CIFAR100)
    archive = tmp_path / "server" / "cifar-100-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "server" / "cifar-100-python", "cifar-100-python")
    files = {name: md5((tmp_path / "server" / "cifar-100-python" / name).read_bytes()) for name in ("train", "test")}
    monkeypatch.setattr(datasets.CIFAR100, "url", server(tmp_path / "server") + archive.name)
    monkeypatch.setattr(datasets.CIFAR100, "tgz_md5", "0" * 32)
    monkeypatch.setattr(datasets.CIFAR100, "train_list", [["train", files["train"]]])
    monkeypatch.setattr(datasets.CIFAR100, "test_list", [["test", files["test"]]])
    monkeypatch.setattr(pickle, "load", None)  # torchvision's reader must not be called
    source = Torchvision(name="CIFAR100", folder=tmp_path / "here", download=True)
    fails(source, "The download failed: http://127.0.0.1:", "gave RuntimeError: File not found or corrupted.", "by hand")
    monkeypatch.setattr(datasets.CIFAR100, "tgz_md5", md5(archive.read_bytes()))
    assert_holds(source(), *CIFAR100, 100)
    archive.unlink()
    assert len(source().train) == 200  # intact files are not fetched again
    (tmp_path / "here" / "cifar-100-python" / "train").write_bytes(b"changed")
    (tmp_path / "here" / "cifar-100-python.tar.gz").unlink()
    fails(source, "The download failed: http://127.0.0.1:", "gave HTTPError: HTTP Error 404")


def test_mnist_and_svhn_are_fetched_by_torchvision(tmp_path: Path, monkeypatch: Any, server: Any):
    from scipy.io import savemat
    from torchvision import datasets

    train, test = part(30, 1, 28), part(20, 1, 28, seed=1)
    far = tmp_path / "server"
    address = server(far)
    write_idx(far, train, test, zipped=True)
    known = [(file.name, md5(file.read_bytes())) for file in sorted(far.iterdir())]
    monkeypatch.setattr(datasets.MNIST, "mirrors", [address + "down/", address])
    monkeypatch.setattr(datasets.MNIST, "resources", known)
    source = Torchvision(name="MNIST", folder=tmp_path / "here", download=True)
    assert_holds(source(), train, test, 10)
    monkeypatch.setattr(datasets.MNIST, "mirrors", [])
    (tmp_path / "here" / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").unlink()
    fails(source, "The download failed")

    savemat(far / "train_32x32.mat", {"X": part(30)[0].permute(2, 3, 1, 0).numpy(), "y": part(30)[1].byte().numpy()[:, None]})
    (far / "test_32x32.mat").write_bytes((far / "train_32x32.mat").read_bytes())
    checksum = md5((far / "train_32x32.mat").read_bytes())
    known_parts = {name: [f"{address}{name}_32x32.mat", f"{name}_32x32.mat", checksum] for name in ("train", "test")}
    monkeypatch.setattr(datasets.SVHN, "split_list", known_parts)
    assert_holds(Torchvision(name="SVHN", folder=tmp_path / "here", download=True)(), part(30), part(30), 10)


@pytest.mark.usefixtures("no_network")
def test_nothing_is_fetched_unasked(tmp_path: Path):
    for name in ("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST", "SVHN"):
        fails(Torchvision(name=name, folder=tmp_path), "There is no ", "download=True")
    write_cifar100_binary(tmp_path, *CIFAR100)
    assert len(Torchvision(name="CIFAR100", folder=tmp_path, download=True)().train) == 200  # nothing is missing
    assert [file.name for file in tmp_path.iterdir()] == ["cifar-100-binary"]


# Hugging Face datasets


def with_datasets(images: torch.Tensor, labels: torch.Tensor, classes: int) -> Any:
    import datasets

    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(classes), "note": datasets.Value("string")}
    )
    rows = {"image": encoded(images), "label": labels.tolist(), "note": ["x"] * len(labels)}
    return datasets.Dataset.from_dict(rows, features)


def write_with_datasets(folder: Path, train: Any, test: Any, classes: int = 10) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (images, labels) in (("train", train), ("test", test)):
        with_datasets(images, labels, classes).to_parquet(folder / f"{name}.parquet")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Any) -> Path:
    """Keep the cache of `datasets` apart, and let it believe that there is a network."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "cache"


HUB = part(30), part(20, seed=1)


def test_a_folder_of_parquet_files(tmp_path: Path, cache: Path):
    write_with_datasets(tmp_path / "data", *HUB, classes=12)
    assert_holds(HubDataset(id=tmp_path / "data")(), *HUB, 12)
    fails(HubDataset(id=tmp_path / "data", image="img"), "training part has no column 'img'", "The only names are: ")
    fails(
        HubDataset(id=tmp_path / "data", test="tset"), "There is no part 'tset'.", "train=... and test=... Nearest names: test"
    )
    fails(HubDataset(id=tmp_path / "dada"), f"There is no folder {tmp_path / 'dada'}.", "Nearest names: data")


def test_a_folder_saved_to_disk(tmp_path: Path, cache: Path):
    import datasets

    parts = {"train": with_datasets(*HUB[0], 10), "validation": with_datasets(*HUB[1], 10).select(range(20))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "data")
    assert_holds(HubDataset(id=tmp_path / "data", test="validation")(), *HUB, 10)
    for file in (tmp_path / "data" / "train").glob("*.arrow"):
        file.write_bytes(file.read_bytes()[:100])
    fails(HubDataset(id=tmp_path / "data", test="validation"), f"{tmp_path / 'data'} cannot be read (")


def test_a_folder_of_images_through_datasets(tmp_path: Path, cache: Path):
    train, test = part(12, classes=3), part(6, classes=3, seed=1)
    write_images(tmp_path / "data" / "train", *train, NAMES)
    write_images(tmp_path / "data" / "test", *test, NAMES)
    source = HubDataset(id=tmp_path / "data")
    assert_holds(source(), by_class(train), by_class(test), 3)


def test_a_parquet_file_cannot_point_at_other_files(tmp_path: Path):
    (tmp_path / "secret.png").write_bytes(png(part(1)[0][0]))
    write_parquet(tmp_path / "data.parquet", [{"bytes": None, "path": str(tmp_path / "secret.png")}] * 2, [0, 1])
    fails(Parquet(train=tmp_path / "data.parquet", test=tmp_path / "data.parquet"), "has no bytes, only the path")


def test_a_cached_dataset_needs_no_network(tmp_path: Path, cache: Path):
    import datasets

    write_with_datasets(tmp_path / "data", *HUB)
    builder = datasets.load_dataset_builder(str(tmp_path / "data"))
    builder.download_and_prepare()
    place = cache / "some___tiny" / "default" / "0.0.0" / "hash"
    place.parent.mkdir(parents=True)
    os.rename(builder.cache_dir, place)
    for file in place.glob("*.arrow"):
        file.rename(place / file.name.replace(builder.dataset_name, "tiny", 1))
    assert_holds(HubDataset(id="some/tiny")(), *HUB, 10)


@pytest.mark.usefixtures("cache", "no_network")
def test_the_hub_is_asked_only_when_that_is_allowed(monkeypatch: Any):
    import datasets
    import huggingface_hub.constants

    def offline() -> list[bool]:
        return [datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE]

    fails(
        HubDataset(id="some/absent"),
        "some/absent cannot be had here (",
        "Hint: Pass download=True to allow the download from the Hugging Face Hub.",
    )
    assert offline() == [False, False]
    seen = []

    def spy(name: str) -> None:
        seen.append((name, offline()))
        raise ConnectionError("no network in tests")

    monkeypatch.setattr(datasets, "load_dataset_builder", spy)
    fails(HubDataset(id="some/absent"), "ConnectionError: no network in tests")
    fails(HubDataset(id="some/absent", download=True), "Check the connection, the id, and that HF_HUB_OFFLINE is not set.")
    assert seen == [("some/absent", [True, True]), ("some/absent", [False, False])]


def test_other_readers_of_datasets_are_refused(tmp_path: Path, cache: Path):
    (tmp_path / "data").mkdir()
    for name in ("train", "test"):
        (tmp_path / "data" / f"{name}.csv").write_text("image,label\n1,2\n")
    fails(HubDataset(id=tmp_path / "data"), "`datasets` would read it with its reader 'csv'.", "parquet, arrow, imagefolder")
    assert not cache.exists() or not list(cache.rglob("*.arrow"))


# Sentences


def write_tsv(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_bytes((end.join(["sentence\tlabel", *lines]) + end).encode())
    return path


def test_tsv_holds_every_character(tmp_path: Path):
    odd = ["a \"quoted' one", "line\u2028separator and \x85", "naïve 日本 😀", "  spaces stay "]
    train = write_tsv(tmp_path / "train.tsv", *(f"{text}\t{at % 2}" for at, text in enumerate(odd)))
    test = write_tsv(tmp_path / "dev.tsv", "good\t1", "bad\t0", end="\r\n")
    dataset = Tsv(train=train, test=test)()
    assert dataset.train_texts == odd
    assert dataset.test_texts == ["good", "bad"]
    assert torch.equal(dataset.train_labels, torch.tensor([0, 1, 0, 1]))
    assert torch.equal(dataset.test_labels, torch.tensor([1, 0]))
    assert dataset.classes == 2
    assert repr(dataset) == "TextDataset(4 + 2 texts, classes=2)"


def test_tsv_columns_are_named(tmp_path: Path):
    path = tmp_path / "data.tsv"
    path.write_bytes(b"\xef\xbb\xbfid\tpolarity\treview\n7\t0\tbad\n8\t1\tgood")  # a byte-order mark, no last line end
    dataset = Tsv(train=path, test=path, text="review", label="polarity")()
    assert dataset.train_texts == ["bad", "good"]
    fails(Tsv(train=path, test=path, text="review"), "has no column 'label'.", "The only names are: ")


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"", ["has no column 'sentence'"]),
        (b"sentence\tlabel\n", ["The training part is empty."]),
        (b"sentence\tlabel\tlabel\na\t0\t1\n", ["has more than one column 'label'"]),
        (b"sentence\tlabel\na\t0\nb\n", ["Line 3 of ", "has 1 columns, the header 2"]),
        (b"sentence\tlabel\na\t0\n\nb\t1\n", ["Line 3 of ", "has 1 columns"]),
        (b"sentence\tlabel\na\tb\t0\n", ["Line 2 of ", "has 3 columns"]),
        (b"sentence\tlabel\n \t0\n", ["Line 2 of ", "has no text"]),
        (b"sentence\tlabel\na\tgood\n", ["Line 2 of ", "has the label 'good'", "count from 0"]),
        (b"sentence\tlabel\na\t\n", ["has the label ''"]),
        (b"sentence\tlabel\na\t1_0\n", ["has the label '1_0'"]),
        (b"sentence\tlabel\na\t0\nb\t-1\n", ["training labels go down to -1"]),
        (b"sentence\tlabel\na\t1\nb\t2\n", ["smallest is 1"]),
        (b"sentence\tlabel\na\t99999999999999999999\n", ["has the label '99999999999999999999'"]),
        (b"sentence\tlabel\n\xff\t0\n", ["cannot be read (UnicodeDecodeError"]),
    ],
)
def test_unusable_tsv(tmp_path: Path, content: bytes, texts: list[str]):
    path = tmp_path / "data.tsv"
    path.write_bytes(content)
    fails(Tsv(train=path, test=path), *texts)


def test_an_unknown_test_label_in_a_tsv(tmp_path: Path):
    train = write_tsv(tmp_path / "train.tsv", "a\t0", "b\t1")
    test = write_tsv(tmp_path / "test.tsv", "a\t2")
    fails(Tsv(train=train, test=test), "test labels go up to 2, but there are 2 classes")
    fails(Tsv(train=train, test=tmp_path / "tets.tsv"), "There is no file", "Nearest names: test.tsv.")


# Augmentation and normalisation


def naive(images: torch.Tensor, pad: int, flip: bool, generator: torch.Generator) -> torch.Tensor:
    """Crop and mirror one image after the other."""
    corners = torch.randint(2 * pad + 1, (2, len(images)), generator=generator)
    coins = torch.randint(2, (len(images), 1), generator=generator) if flip else torch.zeros(len(images), 1)
    height, width = images.shape[2:]
    changed = []
    for image, top, left, coin in zip(images, *corners.tolist(), coins.flatten().tolist(), strict=True):
        padded = image.new_zeros(image.shape[0], height + 2 * pad, width + 2 * pad)
        padded[:, pad : pad + height, pad : pad + width] = image
        window = padded[:, top : top + height, left : left + width]
        changed.append(window.flip(2) if coin else window)
    return torch.stack(changed)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (7, 3, 32, 32), (5, 1, 28, 28), (64, 3, 5, 9)])
@pytest.mark.parametrize("pad", [0, 1, 4, 40])
@pytest.mark.parametrize("flip", [False, True])
def test_crops_equal_the_naive_ones(shape: tuple[int, ...], pad: int, flip: bool):
    images = torch.randn(shape)
    expected = naive(images, pad, flip, torch.Generator().manual_seed(3))
    assert torch.equal(CropFlip(pad=pad, flip=flip)(images, torch.Generator().manual_seed(3)), expected)
    if not flip:
        assert torch.equal(Crop(pad)(images, torch.Generator().manual_seed(3)), expected)


def test_augmentation_is_reproducible_and_complete():
    image = torch.arange(9.0).view(1, 1, 3, 3) + 1
    many = CropFlip(pad=1)(image.expand(2000, -1, -1, -1), torch.Generator().manual_seed(0))
    kinds, counts = many.flatten(1).unique(dim=0, return_counts=True)
    assert len(kinds) == 2 * 9  # every shift, mirrored or not, and about equally often
    assert int(counts.min()) > 60
    assert int(counts.max()) < 170
    again = CropFlip(pad=1)(image.expand(2000, -1, -1, -1), torch.Generator().manual_seed(0))
    other = CropFlip(pad=1)(image.expand(2000, -1, -1, -1), torch.Generator().manual_seed(1))
    assert torch.equal(many, again)
    assert not torch.equal(many, other)


def test_augmentation_leaves_global_randomness_and_its_input_alone():
    images, before = torch.ones(4, 3, 8, 8), torch.get_rng_state()
    generator = torch.Generator().manual_seed(0)
    CropFlip()(images, generator)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(images, torch.ones(4, 3, 8, 8))
    state = generator.get_state()
    assert NoAugmentation()(images, generator) is images
    assert torch.equal(state, generator.get_state())


def test_augmentations_are_configurations():
    assert repr(CropFlip()) == "CropFlip(pad=4, flip=True)"
    assert Crop(2) == Crop(pad=2)
    assert hash(NoAugmentation()) == hash(NoAugmentation())
    fails(lambda: Crop(-1), "Crop(pad=-1) was asked for.", "pad is -1.")
    fails(lambda: CropFlip()(torch.zeros(3, 8, 8), torch.Generator()), "The input has the shape (3, 8, 8).", "(B, C, H, W)")


@pytest.mark.parametrize("size", [None, 32, 16, 48, 224])
def test_normalise_agrees_with_torchvision(size: int | None):
    from torchvision.transforms import functional

    images, mean, std = part(4)[0], (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    expected = images.float() / 255
    if size:
        expected = functional.resize(expected, [size, size], antialias=True)
    actual = normalise(images, mean, std, size)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, functional.normalize(expected, mean, std), atol=1e-5, rtol=1e-5)


def test_normalise_refuses_what_does_not_fit():
    images = part(2)[0]
    fails(lambda: normalise(images.float(), (0.5,) * 3, (0.5,) * 3), "The images are torch.float32", "Give uint8")
    fails(lambda: normalise(images[0], (0.5,) * 3, (0.5,) * 3), "of shape (3, 32, 32)")
    fails(lambda: normalise(images, (0.5,), (0.5,)), "The images have 3 channels.", "for each channel")
    fails(lambda: normalise(images, (0.5,) * 3, (0.5, 0.0, 0.5)), "one std above 0")


def test_a_blank_channel_does_not_divide_by_zero(tmp_path: Path):
    images = both(lambda x: x * numpy.array([1, 0, 1], numpy.uint8))
    dataset = save(tmp_path / "data.npz", **images)()
    assert dataset.mean[1] == 0.0
    assert dataset.std[1] == 1.0
    assert normalise(dataset.train.inputs, dataset.mean, dataset.std).isfinite().all()


def test_examples_say_how_many_they_are():
    assert repr(Examples(*part(4))) == "Examples(4 of (3, 32, 32))"
    assert len(Examples(*part(4))) == 4

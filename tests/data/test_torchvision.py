"""MNIST-like sets and SVHN: every pixel, damaged files, downloads only when asked."""

from __future__ import annotations

import hashlib
import pickle
import tarfile
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from segue.data import (
    Idx,
    Torchvision,
)
from tests.data.source_files import (
    CIFAR100,
    IMAGES,
    LABELS,
    assert_holds,
    fails,
    idx,
    part,
    write_cifar100_binary,
    write_cifar100_python,
    write_idx,
)


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


@pytest.mark.parametrize(
    ("file", "damage", "texts"),
    [
        (IMAGES, lambda b: b[:-1], [f"{IMAGES} cannot be read (", "damaged or incomplete"]),
        (IMAGES, lambda b: b + b"\0", [f"{IMAGES} cannot be read ("]),
        (IMAGES, lambda b: b[:10], [f"{IMAGES} cannot be read ("]),
        (IMAGES, lambda b: b"", [f"{IMAGES} cannot be read ("]),
        (IMAGES, lambda b: b"\0\0\x0d\3" + b[4:], [f"{IMAGES} cannot be read ("]),
        (IMAGES, lambda b: b[:4] + b"\xff" * 12 + b[16:], [f"{IMAGES} cannot be read ("]),
        (IMAGES, lambda b: idx(part(30, 1, 9)[0][:, 0]), ["have the shape (1, 9, 9), test images (1, 8, 8)"]),
        (LABELS, lambda b: idx(torch.arange(29, dtype=torch.uint8)), ["has 30 images but 29 labels"]),
        (LABELS, lambda b: idx(part(30, 1, 8)[0][:, 0]), [f"{LABELS} cannot be read (ValueError: x should have 1 dimension"]),
        (LABELS, lambda b: b[:-1] + b"\xff", ["take 11 of the 256 values from 0 to 255", "without large gaps"]),
    ],
)
def test_damaged_idx(tmp_path: Path, file: str, damage: Callable[[bytes], bytes], texts: list[str]):
    write_idx(tmp_path, part(30, 1, 8), part(20, 1, 8))
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(damage(whole))
    fails(Idx(folder=tmp_path), f"Idx(folder={str(tmp_path)!r}) cannot be loaded.", *texts)


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-9], lambda b: b"no gzip", lambda b: b[:-8] + b"\0" * 4 + b[-4:], lambda b: b[:40] + b"\xff" * 9 + b[49:]],
    ids=["cut", "another format", "checksum", "content"],
)
def test_damaged_gzip(tmp_path: Path, damage: Callable[[bytes], bytes]):
    write_idx(tmp_path, part(30, 1, 8), part(20, 1, 8), zipped=True)
    file = tmp_path / f"{IMAGES}.gz"
    file.write_bytes(damage(file.read_bytes()))
    fails(Idx(folder=tmp_path), f"{file} cannot be read (", "damaged or incomplete")


def write_svhn(folder: Path, train: Any, test: Any) -> None:
    from scipy.io import savemat

    for name, (images, labels) in (("train", train), ("test", test)):
        digits = torch.where(labels == 0, 10, labels).byte()[:, None].numpy()
        arrays = {"X": images.permute(2, 3, 1, 0).numpy(), "y": digits}
        savemat(folder / f"{name}_32x32.mat", arrays)


@pytest.mark.usefixtures("unchecked")
def test_svhn_holds_every_pixel(tmp_path: Path):
    train, test = part(30), part(20, seed=1)
    write_svhn(tmp_path, train, test)
    assert_holds(Torchvision(name="SVHN", folder=tmp_path)(), train, test, 10)


def test_svhn_is_compared_with_its_checksum(tmp_path: Path):
    write_svhn(tmp_path, part(3), part(3))
    fails(Torchvision(name="SVHN", folder=tmp_path), "train_32x32.mat cannot be read (RuntimeError: Dataset not found or")


def test_torchvision_names_and_layouts(tmp_path: Path):
    fails(lambda: Torchvision(name="CIFAR", folder=tmp_path), "'CIFAR' is not a known name.", "CIFAR10, CIFAR100")
    (tmp_path / "cifar-100").mkdir()
    source = Torchvision(name="CIFAR100", folder=tmp_path)
    fails(source, f"no folder {tmp_path / 'cifar-100-python'}", "Nearest names: cifar-100.", "Or pass download=True")
    train, test = part(30, 1, 28), part(20, 1, 28, seed=1)
    write_idx(tmp_path / "FashionMNIST" / "raw", train, test, zipped=True)
    assert_holds(Torchvision(name="FashionMNIST", folder=tmp_path)(), train, test, 10)


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
    fails(source, "The download fails (", "RuntimeError: File not found or corrupted.", "by hand")
    monkeypatch.setattr(datasets.CIFAR100, "tgz_md5", md5(archive.read_bytes()))
    assert_holds(source(), *CIFAR100, 100)
    archive.unlink()
    assert len(source().train) == 200  # intact files are not fetched again
    (tmp_path / "here" / "cifar-100-python" / "train").write_bytes(b"changed")
    (tmp_path / "here" / "cifar-100-python.tar.gz").unlink()
    fails(source, "The download fails (", "HTTPError: HTTP Error 404")


def test_mnist_and_svhn_are_fetched_by_torchvision(tmp_path: Path, monkeypatch: Any, server: Any):
    from scipy.io import savemat
    from torchvision import datasets

    train, test = part(30, 1, 28), part(20, 1, 28, seed=1)
    far = tmp_path / "server"
    address = server(far)
    write_idx(far, train, test, zipped=True)
    known = [(file.name, md5(file.read_bytes())) for file in sorted(far.iterdir())]
    monkeypatch.setattr(datasets.MNIST, "mirrors", [address])
    monkeypatch.setattr(datasets.MNIST, "resources", known)
    source = Torchvision(name="MNIST", folder=tmp_path / "here", download=True)
    assert_holds(source(), train, test, 10)
    monkeypatch.setattr(datasets.MNIST, "mirrors", [])
    for file in (tmp_path / "here" / "MNIST" / "raw").glob("t10k-labels*"):
        file.unlink()
    fails(source, "The download fails (")

    savemat(far / "train_32x32.mat", {"X": part(10)[0].permute(2, 3, 1, 0).numpy(), "y": part(10)[1].byte().numpy()[:, None]})
    (far / "test_32x32.mat").write_bytes((far / "train_32x32.mat").read_bytes())
    checksum = md5((far / "train_32x32.mat").read_bytes())
    known_parts = {name: [f"{address}{name}_32x32.mat", f"{name}_32x32.mat", checksum] for name in ("train", "test")}
    monkeypatch.setattr(datasets.SVHN, "split_list", known_parts)
    assert_holds(Torchvision(name="SVHN", folder=tmp_path / "here", download=True)(), part(10), part(10), 10)


@pytest.mark.usefixtures("no_network")
def test_nothing_is_fetched_unasked(tmp_path: Path):
    for name in ("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST", "SVHN"):
        fails(Torchvision(name=name, folder=tmp_path), "There is no ", "download=True")
    write_cifar100_binary(tmp_path, *CIFAR100)
    assert len(Torchvision(name="CIFAR100", folder=tmp_path, download=True)().train) == 200  # nothing is missing
    assert [file.name for file in tmp_path.iterdir()] == ["cifar-100-binary"]

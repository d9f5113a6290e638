"""MNIST, Fashion-MNIST, SVHN and CIFAR in the folders that torchvision fills."""

from __future__ import annotations

import gzip
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segue.border import checked
from segue.data.cifar import CIFAR10, CIFAR100, read_cifar
from segue.data.dataset import Dataset, Examples, image_dataset
from segue.data.files import AbsentError, existing_file, existing_folder, optional, require_network, store_paths, unreadable
from segue.errors import DataError, nearest

_CIFAR = {"CIFAR10": CIFAR10, "CIFAR100": CIFAR100}
_NAMES = (*_CIFAR, "MNIST", "FashionMNIST", "SVHN")


@checked
@dataclass(frozen=True, kw_only=True)
class Torchvision:
    """Load CIFAR10, CIFAR100, MNIST, FashionMNIST or SVHN from the folder that torchvision calls `root`.

    With `download`, torchvision fetches what is missing and compares checksums. CIFAR is read here, because torchvision
    would execute its files, which are pickles.
    """

    name: str
    folder: str | Path
    download: bool = False

    def __post_init__(self) -> None:
        store_paths(self, "folder")
        if self.name not in _NAMES:
            raise DataError(f"{self} has no reader.", f"{self.name!r} is not a known name.", nearest(self.name, list(_NAMES)))

    def __call__(self) -> Dataset:
        problem, folder = f"{self} cannot be loaded.", Path(self.folder).expanduser()
        if self.download:
            require_network(problem)
            _download(problem, self.name, folder)
        try:
            return self._read(problem, existing_folder(problem, folder))
        except AbsentError as error:
            if self.download:
                raise
            problem, found, hint = error.args
            raise AbsentError(problem, found, f"{hint} Or pass download=True to let torchvision fetch it.") from None

    def _read(self, problem: str, folder: Path) -> Dataset:
        if self.name in _CIFAR:
            return read_cifar(problem, folder, _CIFAR[self.name])
        if self.name == "SVHN":
            return image_dataset(problem, _svhn(problem, folder, "train"), _svhn(problem, folder, "test"), classes=10)
        return _read_idx(problem, existing_folder(problem, folder / self.name / "raw"), classes=10)


@checked
@dataclass(frozen=True, kw_only=True)
class Idx:
    """Load MNIST, Fashion-MNIST or KMNIST from a folder of IDX files, plain or gzipped.

    The folder holds train-images-idx3-ubyte, train-labels-idx1-ubyte and the same with t10k, each with or without .gz.
    """

    folder: str | Path

    def __post_init__(self) -> None:
        store_paths(self, "folder")

    def __call__(self) -> Dataset:
        problem = f"{self} cannot be loaded."
        return _read_idx(problem, existing_folder(problem, self.folder))


def _read_idx(problem: str, folder: Path, classes: int | None = None) -> Dataset:
    train, test = (
        Examples(
            _idx_file(problem, folder / f"{part}-images-idx3-ubyte", "read_image_file").unsqueeze(1),
            _idx_file(problem, folder / f"{part}-labels-idx1-ubyte", "read_label_file"),
        )
        for part in ("train", "t10k")
    )
    return image_dataset(problem, train, test, classes)


def _idx_file(problem: str, path: Path, reader: str) -> Tensor:
    """Read one file with torchvision, which expects it unzipped."""
    read = getattr(optional("torchvision.datasets.mnist", "timm", problem), reader)
    zipped = path.with_name(f"{path.name}.gz")
    path = zipped if zipped.is_file() and not path.is_file() else existing_file(problem, path)
    try:
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder) / "plain" if path == zipped else path
            if path == zipped:
                plain.write_bytes(gzip.decompress(path.read_bytes()))
            content: Tensor = read(plain)
            return content
    except Exception as error:  # torchvision asserts, and damaged bytes fail in any way
        raise unreadable(problem, path, error) from error


def _svhn(problem: str, folder: Path, part: str) -> Examples:
    svhn = optional("torchvision.datasets", "timm", problem).SVHN
    path = existing_file(problem, folder / f"{part}_32x32.mat")
    try:
        read = svhn(folder, split=part)  # it compares the checksum first: scipy's reader crashes on damaged files
    except Exception as error:
        raise unreadable(problem, path, error) from error
    return Examples(torch.from_numpy(read.data), torch.from_numpy(read.labels))


def _download(problem: str, name: str, folder: Path) -> None:
    datasets = optional("torchvision.datasets", "timm", problem)
    if name in _CIFAR and (folder / _CIFAR[name].binary).is_dir():
        return
    known: Any = getattr(datasets, name)
    try:
        if name == "SVHN":
            for part in ("train", "test"):
                known(folder, split=part, download=True)
        else:
            loader = known.__new__(known)  # its initialiser would also read the files, and execute those of CIFAR
            loader.root = str(folder)
            loader.download()
        return
    except (OSError, RuntimeError) as error:  # no connection, or another checksum
        found = f"The download fails ({type(error).__name__}: {error})."
    # outside of the block above: as the context of ours, the error would keep its connection open
    raise DataError(problem, found, "Check the connection, or put the files into the folder by hand.")

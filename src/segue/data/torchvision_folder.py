"""Folders as torchvision fills them, read without torchvision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from segue.data.cifar import CIFAR10, CIFAR100, Layout, read_cifar
from segue.data.examples import Dataset
from segue.data.fetch import fetch_cifar, fetch_mnist, fetch_svhn
from segue.data.files import AbsentError, existing_folder, located, stored
from segue.data.idx import read_idx_folder
from segue.data.svhn import read_svhn
from segue.errors import DataError, nearest


@dataclass(frozen=True, kw_only=True)
class Torchvision:
    """Load CIFAR10, CIFAR100, MNIST, FashionMNIST or SVHN from the folder that torchvision calls `root`.

    With `download`, torchvision fetches what is missing and compares its checksum. It never reads the files: its reader of
    CIFAR would run them, since they are pickles.
    """

    name: str
    folder: str | Path
    download: bool = False

    def __post_init__(self) -> None:
        stored(self, "folder")
        if self.name not in _READ:
            raise DataError(f"{self} was asked for.", f"There is no reader for {self.name!r}.", nearest(self.name, list(_READ)))

    def __call__(self) -> Dataset:
        asked = f"{self} was to be loaded."
        folder = located(self.folder)
        if self.download:
            _FETCH[self.name](asked, folder)
        try:
            return _READ[self.name](asked, existing_folder(asked, folder))
        except AbsentError as error:
            if self.download:
                raise
            asked, found, hint = error.args
            raise AbsentError(asked, found, f"{hint} Or pass download=True to let torchvision fetch it.") from None


def _read_cifar(layout: Layout, asked: str, folder: Path) -> Dataset:
    return read_cifar(asked, folder, layout)


def _read_mnist(name: str, asked: str, folder: Path) -> Dataset:
    return read_idx_folder(asked, existing_folder(asked, folder / name / "raw"), classes=10)


_READ: dict[str, Callable[[str, Path], Dataset]] = {
    "CIFAR10": partial(_read_cifar, CIFAR10),
    "CIFAR100": partial(_read_cifar, CIFAR100),
    "MNIST": partial(_read_mnist, "MNIST"),
    "FashionMNIST": partial(_read_mnist, "FashionMNIST"),
    "SVHN": read_svhn,
}
_FETCH: dict[str, Callable[[str, Path], None]] = {
    "CIFAR10": partial(fetch_cifar, "CIFAR10", CIFAR10.binary),
    "CIFAR100": partial(fetch_cifar, "CIFAR100", CIFAR100.binary),
    "MNIST": partial(fetch_mnist, "MNIST"),
    "FashionMNIST": partial(fetch_mnist, "FashionMNIST"),
    "SVHN": fetch_svhn,
}

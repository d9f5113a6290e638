"""Downloads by torchvision, which knows the addresses and the checksums."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

from segue.data.extras import optional
from segue.errors import DataError


def fetch_cifar(name: str, binary: str, asked: str, folder: Path) -> None:
    """Fetch and unpack the Python version, unless its files are intact or the binary version is there."""
    if (folder / binary).is_dir():
        return
    datasets = _torchvision(asked)
    known = getattr(datasets, name)
    files = [(folder / known.base_folder / file, md5) for file, md5 in (*known.train_list, *known.test_list)]
    if not all(datasets.utils.check_integrity(str(file), md5) for file, md5 in files):
        get = partial(datasets.utils.download_and_extract_archive, filename=known.filename, md5=known.tgz_md5)
        _try(asked, [known.url], partial(get, download_root=str(folder)))


def fetch_mnist(name: str, asked: str, folder: Path) -> None:
    """Fetch the gzipped IDX files that are missing; they are read as they are."""
    datasets = _torchvision(asked)
    known = getattr(datasets, name)
    raw = folder / name / "raw"
    for file, md5 in known.resources:
        if (raw / file).with_suffix("").is_file():
            continue
        get = partial(datasets.utils.download_url, root=str(raw), filename=file, md5=md5)
        _try(asked, [mirror + file for mirror in known.mirrors], get)


def fetch_svhn(asked: str, folder: Path) -> None:
    """Fetch the two MATLAB files."""
    datasets = _torchvision(asked)
    for part in ("train", "test"):
        url, file, md5 = datasets.SVHN.split_list[part]
        _try(asked, [url], partial(datasets.utils.download_url, root=str(folder), filename=file, md5=md5))


def _torchvision(asked: str) -> ModuleType:
    optional("torchvision.datasets.utils", "timm", asked)
    return optional("torchvision.datasets", "timm", asked)


def _try(asked: str, addresses: list[str], get: Callable[[str], None]) -> None:
    """Download from the first address that answers."""
    failures = []
    for address in addresses:
        try:
            return get(address)
        except (OSError, RuntimeError) as error:  # no connection, or another checksum
            failures.append(f"{address} gave {type(error).__name__}: {error}")
    found = f"The download failed: {'; '.join(failures)}."
    raise DataError(asked, found, "Check the connection, or put the files into the folder by hand.")

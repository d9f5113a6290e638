"""Files and packages that are missing: errors that name what is near and what to install."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from segue.data import (
    Digits,
    HubDataset,
    Idx,
    ImageFolder,
    Parquet,
    Torchvision,
)
from segue.data.files import located, optional
from segue.errors import MissingExtraError
from tests.data.source_files import (
    IMAGES,
    LABELS,
    fails,
    part,
    write_idx,
    write_images,
)
from tests.helpers.processes import run_python


@pytest.mark.processes
def test_torch_alone_is_needed(tmp_path: Path):
    (tmp_path / "data.tsv").write_text("sentence\tlabel\nbad\t0\ngood\t1\n")
    program = f"""
import sys
others = "numpy", "PIL", "pyarrow", "datasets", "torchvision", "sklearn", "scipy", "pandas"
sys.modules.update(dict.fromkeys(others))
from segue.data import *
path = {str(tmp_path / "data.tsv")!r}
assert Tsv(train=path, test=path)().classes == 2
try:
    Digits()()
except ImportError as error:
    print(error)
"""
    run = run_python("-c", program)
    assert run.stdout == (
        "Digits() cannot be loaded.\n  This needs sklearn, which is not installed.\n  Hint: pip install segue[lab]\n"
    )


@pytest.mark.parametrize(
    ("source", "module", "extra"),
    [
        (lambda folder: Digits(), "sklearn", "lab"),
        (lambda folder: ImageFolder(folder=folder), "PIL.Image", "lab"),
        (lambda folder: ImageFolder(folder=folder), "datasets", "hf"),
        (lambda folder: Parquet(train=folder / "file", test=folder / "file"), "datasets", "hf"),
        (lambda folder: Idx(folder=folder), "torchvision.datasets.mnist", "timm"),
        (lambda folder: Torchvision(name="MNIST", folder=folder, download=True), "torchvision.datasets", "timm"),
        (lambda folder: HubDataset(id="some/data"), "datasets", "hf"),
    ],
)
def test_missing_packages(source: Callable[[Path], Any], module: str, extra: str, tmp_path: Path, monkeypatch: Any):
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
        optional("brokenpackage", "lab", "It cannot be loaded.")


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


def test_a_relative_path_is_looked_for_in_the_folder_of_data(tmp_path, monkeypatch):
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert located("mnist") == Path("mnist")  # without the variable nothing else is tried
    monkeypatch.setenv("SEGUE_DATA", str(tmp_path / "data"))
    assert located("mnist") == tmp_path / "data" / "mnist"
    assert located("other") == Path("other")  # the error names what was asked for
    assert located(tmp_path / "mnist") == tmp_path / "mnist"
    (tmp_path / "mnist").mkdir()
    assert located("mnist") == Path("mnist")  # what is here wins

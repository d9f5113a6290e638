"""CIFAR in both versions: every pixel, and nothing in a pickle is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from segue.data import (
    Torchvision,
)
from tests.data.source_files import (
    CIFAR100,
    assert_holds,
    cifar100_entries,
    fails,
    part,
    python2_pickle,
    write_cifar10,
    write_cifar100_binary,
    write_cifar100_python,
)


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
    fails(Torchvision(name="CIFAR100", folder=tmp_path), " asks for ", "which is refused", "do not trust this one")
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
        (b"\x80\x02}K\x01b.", "asks for a change of something that is not an array"),
        (b"\x80\x02}U\x04data" + b"cnumpy\nndarray\n)Rs.", "asks for a call of numpy ndarray"),
        (b"\x80\x02}U\x04dataU\x01x)Rs.", "asks for a call of str"),
        (b"\x80\x02}U\x04data" + b"cbuiltins\neval\nU\x011\x85Rs.", "asks for builtins.eval"),
        (b"\x80\x02}U\x04data" + b"cnumpy\ndtype\nU\x02u1\x85Rs.", "a dtype where an array belongs"),
        (b"\x80\x02}U\x04data" + b"cnumpy.core.multiarray\n_reconstruct\n)Rs.", "cannot be read ("),
        (WHOLE.replace(b"U\x02u1", b"U\x02O8"), "its array is not one of bytes"),
        (WHOLE.replace(b"M\x00\x0c", b"M\x01\x0c"), "an array of shape (200, 3073) has 614400 bytes"),
        (with_array(data=None), "it has no array 'data' of N x 3072 bytes"),
        (with_array(data=torch.zeros(4, 4, dtype=torch.uint8)), "it has no array 'data' of N x 3072 bytes"),
        (with_array(data=[1, 2]), "it has no array 'data' of N x 3072 bytes"),
        (with_array(fine_labels=None), "it has no list 'fine_labels' of integers"),
        (with_array(fine_labels=["cat"] * 200), "it has no list 'fine_labels' of integers"),
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
    fails(Torchvision(name="CIFAR10", folder=tmp_path), "have 9, 10, 10, 10, 10 images", "the same number")

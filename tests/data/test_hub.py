"""The hub, Parquet files and image folders, pixel for pixel; nothing is fetched unless asked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from segue.data import (
    HubDataset,
    ImageFolder,
    Parquet,
)
from tests.data.source_files import (
    assert_holds,
    by_class,
    encoded,
    fails,
    part,
    png,
    write_images,
)

NAMES = ["cat", "dog", "emu"]


HUB = part(30), part(20, seed=1)


def write_parquet(path: Path, images: Any, labels: Any, **names: str) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {names.get("image", "image"): images, names.get("label", "label"): pyarrow.array(labels)}
    parquet.write_table(pyarrow.table(columns), path)


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


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "structs": encoded,
    "bytes": lambda images: [png(image) for image in images],
}


@pytest.mark.parametrize("form", FORMS)
def test_parquet_holds_every_pixel(tmp_path: Path, form: str):
    train, test = part(30), part(20, seed=1)
    names = {"image": "img", "label": "fine_label"}
    write_parquet(tmp_path / "train.parquet", FORMS[form](train[0]), train[1].tolist(), **names)
    write_parquet(tmp_path / "test.parquet", FORMS[form](test[0]), test[1].tolist(), **names)
    assert_holds(Parquet(train=tmp_path / "train.parquet", test=tmp_path / "test.parquet", **names)(), train, test, 10)


def test_parquet_in_several_files(tmp_path: Path):
    train, test = part(30), part(20, seed=1)
    for at, (images, labels) in enumerate(zip(train[0].chunk(3), train[1].chunk(3), strict=True)):
        write_parquet(tmp_path / f"train-{at}-of-3.parquet", encoded(images), labels.tolist())
    write_parquet(tmp_path / "test.parquet", encoded(test[0]), test[1].tolist())
    source = Parquet(train=tmp_path / "train-*.parquet", test=tmp_path / "test.parquet")
    assert_holds(source(), train, test, 10)
    fails(Parquet(train=tmp_path / "absent-*.parquet", test=tmp_path / "test.parquet"), "There is no file", "absent-*.parquet")
    write_parquet(tmp_path / "train-3-of-3.parquet", [1, 2, 3], [0, 1, 2])
    fails(source, "train-3-of-3.parquet", "cannot be read (")


def test_parquet_written_by_datasets_names_its_classes(tmp_path: Path):
    train, test = part(30), part(20, seed=1)
    write_with_datasets(tmp_path, train, test, classes=12)
    assert_holds(Parquet(train=tmp_path / "train.parquet", test=tmp_path / "test.parquet")(), train, test, 12)


@pytest.mark.parametrize(
    ("images", "labels", "texts"),
    [
        ("structs", [0, 1, -1], ["training labels go down to -1"]),
        ("structs", [0, 1, None], ["column 'label' of the part 'train' has values that are not integers"]),
        ("structs", ["a", "b", "c"], ["column 'label' of the part 'train' has values that are not integers"]),
        ([None, None, None], [0, 1, 2], ["column 'image' of the part 'train' has no encoded image in row 0, but None"]),
        ([1, 2, 3], [0, 1, 2], ["column 'image' of the part 'train' has no encoded image in row 0, but 1"]),
        ([[[0]]] * 3, [0, 1, 2], ["column 'image' of the part 'train' has no encoded image in row 0, but [[0]]"]),
        ([{"bytes": None, "path": "a.png"}] * 3, [0, 1, 2], ["no encoded image in row 0", "ImageFolder"]),
        ([{"bytes": b"?", "path": "a.png"}] * 3, [0, 1, 2], ["image 0 of the part 'train' cannot be read (UnidentifiedImage"]),
    ],
)
def test_unusable_parquet(tmp_path: Path, images: Any, labels: Any, texts: list[str]):
    path = tmp_path / "data.parquet"
    write_parquet(path, encoded(part(3)[0]) if images == "structs" else images, labels)
    fails(Parquet(train=path, test=path), *texts)


def test_damaged_parquet(tmp_path: Path):
    path = tmp_path / "data.parquet"
    source = Parquet(train=path, test=path)
    for images in ([], encoded(part(0)[0])):
        write_parquet(path, images, [0][:0])
        fails(source)
    write_parquet(path, encoded(part(3)[0]), [0, 1, 2], image="img")
    fails(source, "The part 'train' has no column 'image'.", "image=... and label=... Nearest names: img.")
    whole = path.read_bytes()
    for content in (whole[:-9], whole[: len(whole) // 2], b""):
        path.write_bytes(content)
        fails(source, "data.parquet cannot be read (")
    images = encoded(part(3)[0])
    images[1] = {"bytes": png(part(1, size=16)[0][0]), "path": ""}
    write_parquet(path, images, [0, 1, 2])
    fails(source, "have 2 sizes, among them (16, 16) and (32, 32).", "ImageFolder resizes")


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
    assert torch.equal(dataset.train.inputs[5], grey.expand(3, -1, -1))  # together with coloured images, grey becomes RGB
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
    fails(source, f"{tmp_path / 'train'} has no folders.", "one folder per class")
    write_images(tmp_path / "train", *part(2, classes=1), ["cat"])
    write_images(tmp_path / "test", *part(2, classes=1), ["cat"])
    fails(source, "There is only one class.")
    (tmp_path / "train" / "dog").mkdir()
    fails(source, f"{tmp_path / 'train' / 'dog'} has no image.", "remove the folder")
    file = tmp_path / "train" / "dog" / "1.png"
    whole = png(part(1)[0][0])
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n%%EndComments\n"  # Pillow would hand it to an interpreter
    for content in (whole[:-30], whole[:200] + bytes([whole[200] ^ 4]) + whole[201:], script, b""):
        file.write_bytes(content)
        fails(source, f"{file} cannot be read (", "damaged or incomplete")
    from PIL import Image

    Image.fromarray(numpy.full((8, 8), 4000, numpy.uint16)).save(file)
    fails(source, "has pixels of Pillow's mode 'I;16'", "8 bits per channel")
    file.write_bytes(whole)
    write_images(tmp_path / "test", *part(1), ["dgo"])
    fails(source, f"{tmp_path / 'test'} has a class 'dgo' that {tmp_path / 'train'} does not have.", "Nearest names: dog")
    fails(lambda: ImageFolder(folder=tmp_path, size=0), "ImageFolder(size=...) must be a positive integer, got 0.")


def test_an_image_too_large_is_refused(tmp_path: Path, monkeypatch: Any):
    from PIL import Image

    for folder in ("train", "test"):
        write_images(tmp_path / folder, *part(2, classes=2), ["a", "b"])
    for limit in (1000, 100):  # Pillow warns above its limit and stops above twice of it
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        fails(ImageFolder(folder=tmp_path), "0000.png cannot be read (DecompressionBomb")


def test_a_folder_of_parquet_files(tmp_path: Path, cache: Path):
    write_with_datasets(tmp_path / "data", *HUB, classes=12)
    assert_holds(HubDataset(id=tmp_path / "data")(), *HUB, 12)
    fails(HubDataset(id=tmp_path / "data", image="img"), "The part 'train' has no column 'img'.", "Nearest names: ")
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
    fails(Parquet(train=tmp_path / "data.parquet", test=tmp_path / "data.parquet"), "has no encoded image in row 0")


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
        "some/absent is not available (",
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

"""Images that Hugging Face `datasets` reads: the hub, Parquet files, folders by class. The network is used only when asked."""

from __future__ import annotations

import io
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segue.border import PositiveInt, checked
from segue.data.dataset import Dataset, Examples, image_dataset
from segue.data.files import contents, existing_file, existing_folder, hub_offline, optional, store_paths, unreadable
from segue.errors import DataError, nearest

_READERS = ("parquet", "arrow", "imagefolder", "cache")  # of plain data; `datasets` has others
# named one by one: among the formats that Pillow would try otherwise is EPS, which starts a PostScript interpreter
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM", "TIFF")


@checked
@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """Load an image dataset with `datasets`: an id such as "uoft-cs/cifar100", or a folder on this machine."""

    id: str | Path
    image: str = "image"
    label: str = "label"
    train: str = "train"
    test: str = "test"
    download: bool = False

    def __post_init__(self) -> None:
        store_paths(self, "id")

    def __call__(self) -> Dataset:
        problem = f"{self} cannot be loaded."
        parts = self._parts(problem)
        for name in (self.train, self.test):
            if name not in parts:
                hint = f"Name the parts with train=... and test=... {nearest(name, list(parts))}"
                raise DataError(problem, f"There is no part {name!r}.", hint)
        return _images(problem, parts, (self.train, self.test), (self.image, self.label))

    def _parts(self, problem: str) -> Any:
        datasets = optional("datasets", "hf", problem)
        folder = Path(self.id).expanduser()
        local = folder.is_dir() or folder.is_absolute() or str(self.id).startswith(".")
        if local:
            existing_folder(problem, folder)
        try:
            with nullcontext() if self.download and not local else offline():
                if local and (folder / "dataset_dict.json").is_file():  # written by save_to_disk
                    return datasets.load_from_disk(str(folder))
                return prepared(problem, datasets.load_dataset_builder(str(folder) if local else self.id))
        except DataError:
            raise
        except Exception as error:  # `datasets` lets the errors of all its readers through
            if local:
                raise unreadable(problem, folder, error) from error
            asked = "Check the connection, the id, and that HF_HUB_OFFLINE is not set."
            hint = asked if self.download else "Pass download=True to allow the download from the Hugging Face Hub."
            raise DataError(problem, f"{self.id} is not available ({type(error).__name__}: {error}).", hint) from error


@checked
@dataclass(frozen=True, kw_only=True)
class Parquet:
    """Load two Parquet files, or two patterns such as "train-*.parquet"; the columns often are called img or fine_label."""

    train: str | Path
    test: str | Path
    image: str = "image"
    label: str = "label"

    def __post_init__(self) -> None:
        store_paths(self, "train", "test")

    def __call__(self) -> Dataset:
        problem = f"{self} cannot be loaded."
        files = {}
        for name, path in (("train", Path(self.train).expanduser()), ("test", Path(self.test).expanduser())):
            shards = sorted(path.parent.glob(path.name)) if "*" in path.name else []
            files[name] = [escape(str(shard)) for shard in shards or [existing_file(problem, path)]]
        with _local(problem, "parquet", files) as parts:
            return _images(problem, parts, ("train", "test"), (self.image, self.label))


@checked
@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """Load folder/train/<class>/* and folder/test/<class>/* (or folder/val), each image as `size` x `size` pixels.

    Classes are numbered in the order of their folders' names. An oblong image is cropped to its middle.
    """

    folder: str | Path
    size: PositiveInt = 32

    def __post_init__(self) -> None:
        store_paths(self, "folder")

    def __call__(self) -> Dataset:
        problem = f"{self} cannot be loaded."
        folder = existing_folder(problem, self.folder)
        train = existing_folder(problem, folder / "train")
        test = folder / "val" if (folder / "val").is_dir() and not (folder / "test").is_dir() else folder / "test"
        classes, tested = (
            sorted(path.name for path in part.iterdir() if path.is_dir() and not path.name.startswith("."))
            for part in (train, existing_folder(problem, test))
        )
        if not classes:
            raise DataError(problem, f"{train} has no folders.", "Give one folder per class, with images in it.")
        if unknown := sorted(set(tested) - set(classes)):
            found = f"{test} has a class {unknown[0]!r} that {train} does not have."
            raise DataError(problem, found, f"Both parts need the same classes. {nearest(unknown[0], classes)}")
        files = {name: [f"{escape(str(part))}/*/*"] for name, part in (("train", train), ("test", test))}
        with _local(problem, "imagefolder", files, drop_labels=False, drop_metadata=True) as parts:
            for name in set(classes) - set(getattr(parts["train"].features.get("label"), "names", classes)):
                raise DataError(problem, f"{train / name} has no image.", "Put images there, or remove the folder.")
            return _images(problem, parts, ("train", "test"), ("image", "label"), size=self.size)


@contextmanager
def offline() -> Iterator[None]:
    """Keep Hugging Face's libraries off the network, and their progress bars ("Downloading data") off the screen."""
    problem = "Hugging Face's libraries cannot be kept offline."
    datasets: Any = optional("datasets", "hf", problem)
    config: Any = optional("datasets.config", "hf", problem)  # it keeps the value that it found when it was imported
    before, silent = config.HF_HUB_OFFLINE, datasets.are_progress_bars_disabled()
    try:
        datasets.disable_progress_bars()
        config.HF_HUB_OFFLINE = True
        with hub_offline():
            yield
    finally:
        config.HF_HUB_OFFLINE = before
        if not silent:
            datasets.enable_progress_bars()


def prepared(problem: str, builder: Any) -> Any:
    """Return the parts of a builder of `datasets` whose reader runs no code of the dataset."""
    reader = type(builder).__module__.split(".")[-1]
    if reader not in _READERS:
        hint = f"Give a dataset in one of the formats {', '.join(_READERS[:3])}."
        raise DataError(problem, f"`datasets` would read it with its reader {reader!r}.", hint)
    builder.download_and_prepare()
    return builder.as_dataset()


@contextmanager
def _local(problem: str, reader: str, files: dict[str, list[str]], **settings: Any) -> Iterator[Any]:
    """Read files of this machine by way of a temporary cache, so that no copy of them stays."""
    datasets, _ = optional("datasets", "hf", problem), optional("PIL.Image", "lab", problem)
    with offline(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        try:
            parts = prepared(problem, datasets.load_dataset_builder(reader, data_files=files, cache_dir=cache, **settings))
        except Exception as error:
            names = ", ".join(name for part in files.values() for name in part)
            raise unreadable(problem, names, error.__cause__ or error) from error
        yield parts


def _images(problem: str, parts: Any, names: tuple[str, str], columns: tuple[str, str], size: int | None = None) -> Dataset:
    train, test = (_examples(problem, name, parts[name], *columns, size) for name in names)
    return image_dataset(problem, train, test, getattr(parts[names[0]].features[columns[1]], "num_classes", None))


def _examples(problem: str, part: str, rows: Any, image: str, label: str, size: int | None = None) -> Examples:
    """Read two columns; of image folders, the table has only the paths."""
    folder = rows.info.builder_name == "imagefolder"
    for column in (image, label):
        if column not in rows.column_names:
            hint = f"Name the columns with image=... and label=... {nearest(column, rows.column_names)}"
            raise DataError(problem, f"The part {part!r} has no column {column!r}.", hint)
    # as Arrow's own table: `datasets` would decode every image itself, with whatever Pillow can open
    table = rows.select_columns([image, label]).with_format("arrow")[:]
    labels, images = table.column(label).to_pylist(), []
    if not all(type(each) is int for each in labels):
        found = f"The column {label!r} of the part {part!r} has values that are not integers."
        raise DataError(problem, found, "Labels must be integers that count from 0; take a part whose labels are public.")
    for at, row in enumerate(table.column(image).to_pylist()):
        name, content = f"image {at} of the part {part!r}", row.get("bytes") if isinstance(row, dict) else row
        if content is None and folder:
            name, content = row["path"], contents(problem, row["path"])
        if not isinstance(content, bytes):
            found = f"The column {image!r} of the part {part!r} has no encoded image in row {at}, but {row!r:.60}."
            raise DataError(problem, found, "Take a copy that stores the images inside, or load files with ImageFolder.")
        images.append(_decode(problem, name, content, size))
    order = sorted(range(len(labels)), key=labels.__getitem__) if folder else range(len(labels))  # class by class
    return Examples(_stack(problem, part, [images[at] for at in order]), torch.tensor([labels[at] for at in order]).long())


def _decode(problem: str, name: str, content: bytes, size: int | None) -> Tensor:  # (1 or 3, H, W) uint8
    """Decode one image: grey stays one channel, everything else becomes RGB, transparency is dropped."""
    pillow = optional("PIL.Image", "lab", problem)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            image = pillow.open(io.BytesIO(content), formats=_FORMATS)
            if image.format == "PNG":
                image.verify()  # compares checksums, which decoding does not; the image cannot be used after it
                image = pillow.open(io.BytesIO(content), formats=_FORMATS)
            image.load()
    except Exception as error:  # a decoder may fail on damaged bytes in any way
        raise unreadable(problem, name, error) from error
    if image.mode not in ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"):
        found = f"{name} has pixels of Pillow's mode {image.mode!r}."
        raise DataError(problem, found, "Convert it to 8 bits per channel; doing that here would clip the values.")
    if image.mode in ("P", "PA"):
        image = image.convert("RGBA")  # straight to RGB, Pillow warns of a palette with transparency
    image = image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB")
    if size is not None and image.size != (size, size):
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        # cropped, then resized: in one step the filter would use pixels outside the crop
        image = image.crop((left, top, left + side, top + side)).resize((size, size), pillow.Resampling.BILINEAR)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, -1).permute(2, 0, 1).contiguous()


def _stack(problem: str, part: str, images: list[Tensor]) -> Tensor:
    """Join images of one size; where some are grey and some coloured, all become RGB."""
    sizes = sorted({tuple(image.shape[1:]) for image in images})
    if len(sizes) > 1:
        found = f"The images of the part {part!r} have {len(sizes)} sizes, among them {sizes[0]} and {sizes[-1]}."
        raise DataError(problem, found, "Give images of one size; ImageFolder resizes those that are not.")
    if len({image.shape[0] for image in images}) > 1:
        images = [image.expand(3, -1, -1) for image in images]
    return torch.stack(images) if images else torch.empty(0, 1, 0, 0, dtype=torch.uint8)

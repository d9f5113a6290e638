"""Datasets of the Hugging Face Hub, from its cache or a folder; from the network only when asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.data.checks import image_dataset
from segue.data.columns import read_columns
from segue.data.examples import Dataset, Examples
from segue.data.extras import optional
from segue.data.files import existing_folder, located, stored, unreadable
from segue.errors import DataError, nearest

_READERS = ("parquet", "arrow", "imagefolder", "cache")  # formats of plain data; no other reader of `datasets` is let near


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
        stored(self, "id")

    def __call__(self) -> Dataset:
        asked = f"{self} was to be loaded."
        parts = self._parts(asked)
        names = [name for name in (self.train, self.test) if name not in parts]
        if names:
            hint = f"Name the parts with train=... and test=... {nearest(names[0], list(parts))}"
            raise DataError(asked, f"There is no part {names[0]!r}.", hint)
        feature = parts[self.train].features.get(self.label)
        train, test = self._examples(asked, "training", parts[self.train]), self._examples(asked, "test", parts[self.test])
        return image_dataset(asked, train, test, getattr(feature, "num_classes", None))

    def _examples(self, asked: str, part: str, rows: Any) -> Examples:
        wanted = [name for name in rows.column_names if name in (self.image, self.label)]
        # as Arrow's own table: `datasets` would decode every image by itself, with whatever Pillow can open
        table = rows.select_columns(wanted).with_format("arrow")[:]
        return read_columns(asked, part, table, self.image, self.label, follow=True)  # of a folder it notes only the paths

    def _parts(self, asked: str) -> Any:
        datasets = optional("datasets", "hf", asked)
        folder = located(self.id)
        if folder.is_dir() or folder.is_absolute() or str(self.id).startswith("."):
            existing_folder(asked, folder)
            try:
                with offline():
                    if (folder / "dataset_dict.json").is_file():  # written by save_to_disk
                        return datasets.load_from_disk(str(folder))
                    return prepared(asked, datasets.load_dataset_builder(str(folder)))
            except DataError:
                raise
            except Exception as error:  # `datasets` lets the errors of all its readers through
                raise unreadable(asked, folder, error) from error
        try:
            if self.download:
                return prepared(asked, datasets.load_dataset_builder(self.id))
            with offline():
                return prepared(asked, datasets.load_dataset_builder(self.id))
        except DataError:
            raise
        except Exception as error:
            hint = "Pass download=True to allow the download from the Hugging Face Hub."
            if self.download:
                hint = "Check the connection, the id, and that HF_HUB_OFFLINE is not set."
            raise DataError(asked, f"{self.id} cannot be had here ({type(error).__name__}: {error}).", hint) from error


def prepared(asked: str, builder: Any) -> Any:
    reader = type(builder).__module__.split(".")[-1]
    if reader not in _READERS:
        hint = f"Give a dataset in one of the formats {', '.join(_READERS[:3])}."
        raise DataError(asked, f"`datasets` would read it with its reader {reader!r}.", hint)
    builder.download_and_prepare()
    return builder.as_dataset()


@contextmanager
def offline() -> Iterator[None]:
    """Forbid the network to Hugging Face's libraries for a while.

    They look at HF_HUB_OFFLINE once, when they are imported; so what they noted then is changed, and put back.
    """
    asked = "Hugging Face was to be kept offline."
    places: list[Any] = [optional(name, "hf", asked) for name in ("huggingface_hub.constants", "datasets.config")]
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value

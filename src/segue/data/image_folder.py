"""Image files sorted into one folder per class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from segue.data.checks import image_dataset
from segue.data.examples import Dataset, Examples
from segue.data.files import contents, existing_folder, located, stored
from segue.data.pictures import SUFFIXES, decode, stack
from segue.errors import DataError, nearest


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """Load folder/train/<class>/* and folder/test/<class>/* (or folder/val), each image as `size` x `size` pixels.

    Classes are numbered in the order of their folders' names. Of an oblong image the middle is taken.
    """

    folder: str | Path
    size: int = 32

    def __post_init__(self) -> None:
        stored(self, "folder")
        if self.size < 1:
            raise DataError(f"{self} was asked for.", f"size is {self.size}.", "Give 1 or more pixels.")

    def __call__(self) -> Dataset:
        asked = f"{self} was to be loaded."
        folder = existing_folder(asked, located(self.folder))
        train = existing_folder(asked, folder / "train")
        test = folder / "val" if (folder / "val").is_dir() and not (folder / "test").is_dir() else folder / "test"
        classes = _classes(train)
        unknown = sorted(set(_classes(existing_folder(asked, test))) - set(classes))
        if unknown:
            found = f"{test} has a class {unknown[0]!r} that {train} does not have."
            raise DataError(asked, found, f"Both parts need the same classes. {nearest(unknown[0], classes)}")
        return image_dataset(
            asked,
            self._part(asked, "training", train, classes),
            self._part(asked, "test", test, classes),
            len(classes),
        )

    def _part(self, asked: str, part: str, folder: Path, classes: list[str]) -> Examples:
        images, labels = [], []
        for label, name in enumerate(classes):
            if part == "test" and not (folder / name).is_dir():
                continue  # nothing to test this class with
            files = sorted(path for path in (folder / name).iterdir() if _is_image(path))
            if not files:
                found = f"{folder / name} holds no image."
                raise DataError(asked, found, f"Put images there ({', '.join(SUFFIXES)}), or remove the folder.")
            images += [decode(asked, path, contents(asked, path), self.size) for path in files]
            labels += [label] * len(files)
        return Examples(stack(asked, part, images), torch.tensor(labels, dtype=torch.int64))


def _classes(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _is_image(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in SUFFIXES and not path.name.startswith(".")

"""NumPy archives with the names that Keras uses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from segue.data.checks import image_dataset
from segue.data.examples import Dataset, Examples
from segue.data.extras import optional
from segue.data.files import existing_file, located, stored, unreadable
from segue.data.pixels import as_images, as_labels
from segue.errors import DataError, nearest

_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True, kw_only=True)
class Npz:
    """Load x_train, y_train, x_test and y_test from an .npz file; arrays of Python objects are refused."""

    path: str | Path

    def __post_init__(self) -> None:
        stored(self, "path")

    def __call__(self) -> Dataset:
        asked = f"{self} was to be loaded."
        numpy = optional("numpy", "lab", asked)
        path = existing_file(asked, located(self.path))
        try:
            with path.open("rb") as stream, numpy.load(stream, allow_pickle=False) as archive:
                names = list(archive.files)
                arrays = {name: archive[name] for name in _ARRAYS if name in names}
        except Exception as error:  # zip, zlib and NumPy each have their own way to stumble over damaged bytes
            raise unreadable(asked, path, error) from error
        for name in _ARRAYS:
            if name not in arrays:
                raise DataError(asked, f"{path} has no array {name!r}.", f"Save it with numpy.savez. {nearest(name, names)}")
        train, test = (
            Examples(
                as_images(asked, words, arrays[f"x_{part}"]),
                as_labels(asked, words, arrays[f"y_{part}"]),
            )
            for part, words in (("train", "training"), ("test", "test"))
        )
        return image_dataset(asked, train, test)

"""Data sets for experiments and conversions: each source loads files, checks them, and downloads nothing unless asked.

A new source is one file in this folder: a frozen dataclass whose call returns a `Dataset` or a `TextDataset`. Every public
dataclass of the folder is a name of this package.
"""

from dataclasses import is_dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from segue.data.augment import normalise

_FOUND = {
    name: value
    for module in iter_modules(__path__, f"{__name__}.")
    for name, value in vars(import_module(module.name)).items()
    if isinstance(value, type) and is_dataclass(value) and value.__module__ == module.name and not name.startswith("_")
}
globals().update(_FOUND)
__all__ = ["normalise", *_FOUND]


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

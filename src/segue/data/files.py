"""Files: that they are there, and what lies near when they are not."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from segue.errors import DataError, nearest

_LISTED = 1000  # a folder may hold a million images; comparing their names with the missing one would take minutes


class AbsentError(DataError):
    """A file or folder is not there."""


def stored(source: object, *names: str) -> None:
    """Turn the paths in the fields `names` of a frozen source into strings, which JSON can hold."""
    for name in names:
        object.__setattr__(source, name, os.fspath(getattr(source, name)))


def located(path: str | Path) -> Path:
    """Say where a configured path lies on this machine."""
    return Path(path).expanduser()


def existing_file(asked: str, path: Path) -> Path:
    """Return `path` if it is a file, else say which names come nearest."""
    if path.is_file():
        return path
    raise _absent(asked, path, "file")


def existing_folder(asked: str, path: Path) -> Path:
    """Return `path` if it is a folder, else say which names come nearest."""
    if path.is_dir():
        return path
    raise _absent(asked, path, "folder")


def contents(asked: str, path: Path) -> bytes:
    """Read a whole file."""
    try:
        return existing_file(asked, path).read_bytes()
    except OSError as error:
        raise unreadable(asked, path, error) from error


def unreadable(asked: str, path: object, error: BaseException | str) -> DataError:
    """Build the error of a file that is there but damaged."""
    reason = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return DataError(asked, f"{path} cannot be read ({reason}).", "Fetch the file again; it is damaged or cut short.")


def _absent(asked: str, path: Path, kind: str) -> DataError:
    if path.exists():
        return DataError(asked, f"{path} is not a {kind}.", f"Give the path of a {kind}.")
    missing = path
    while not missing.parent.exists() and missing.parent != missing:
        missing = missing.parent
    folder = missing.parent
    names = sorted(entry.name for entry in islice(folder.iterdir(), _LISTED)) if folder.is_dir() else []
    return AbsentError(asked, f"There is no {kind} {path}.", f"Look in {folder}. {nearest(missing.name, names)}")

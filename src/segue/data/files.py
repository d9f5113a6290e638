"""Files and optional packages: found, or an error that names what is near and what to install."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from segue.errors import DataError, MissingExtraError, nearest

_network = True  # whether downloads are allowed
_LISTED = 1000  # a folder may hold a million images; comparing their names with the missing one would take minutes


class AbsentError(DataError):
    """A file or folder does not exist."""


def optional(module: str, extra: str, problem: str) -> ModuleType:
    """Import `module`, or raise an error that names the extra of Segue which installs it.

    >>> optional("json", "lab", "The file cannot be read.").dumps([1])
    '[1]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package
        found = f"This needs {package}, which " + ("is not installed." if missing else f"cannot be imported: {error}.")
        raise MissingExtraError(problem, found, f"pip install segue[{extra}]") from error


def quiet_transformers(name: str) -> Any:
    """Import transformers for the model `name`, without its reports and progress bars."""
    transformers: Any = optional("transformers", "hf", f"The Hugging Face model {name!r} cannot be loaded.")
    transformers.utils.logging.set_verbosity_error()  # it would warn that the new head is untrained, which is intended
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextmanager
def hub_offline() -> Iterator[None]:
    """Keep huggingface_hub, and with it transformers, off the network.

    It reads HF_HUB_OFFLINE once, when it is imported; so the value that it keeps is changed, and restored.
    """
    constants: Any = optional("huggingface_hub.constants", "hf", "Hugging Face's libraries cannot be kept offline.")
    before = constants.HF_HUB_OFFLINE
    try:
        constants.HF_HUB_OFFLINE = True
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def without_network() -> Iterator[None]:
    """Refuse every download in a block: what a folder asks for is not what its user asks for."""
    offline = "HF_HUB_OFFLINE"  # each library reads the variable once, when it is imported
    loaded = [sys.modules[name] for name in ("huggingface_hub.constants", "datasets.config") if name in sys.modules]
    with ExitStack() as stack:
        stack.enter_context(patched(os.environ, offline, "1"))
        for module in loaded:
            stack.enter_context(patched(vars(module), offline, True))
        stack.enter_context(patched(globals(), "_network", False))
        yield


@contextmanager
def patched(values: MutableMapping[str, Any], name: str, value: Any) -> Iterator[None]:
    """Change a value in a block."""
    before = values.get(name)
    values[name] = value
    try:
        yield
    finally:
        if before is None:
            del values[name]
        else:
            values[name] = before


def require_network(problem: str) -> None:
    """Refuse a download in a block of `without_network`."""
    if not _network:
        hint = "Allow it: segue resume DIR --download."
        raise DataError(problem, "It would be downloaded, which only the folder asks for.", hint)


def store_paths(source: object, *names: str) -> None:
    """Turn the paths in the fields `names` of a frozen source into strings, which JSON can hold."""
    for name in names:
        object.__setattr__(source, name, os.fspath(getattr(source, name)))


def located(path: str | Path) -> Path:
    """Return a path with `~` expanded; a relative one that is not here is looked for in the folder SEGUE_DATA, if that is set.

    A configuration then names its data the same on every machine.
    """
    path = Path(path).expanduser()
    elsewhere = Path(os.environ.get("SEGUE_DATA", ".")).expanduser() / path
    return elsewhere if not path.exists() and elsewhere.exists() else path


def existing_file(problem: str, path: str | Path) -> Path:
    """Return the path of a file that exists, `~` expanded, else name the nearest ones."""
    if (path := located(path)).is_file():
        return path
    raise _absent(problem, path, "file")


def existing_folder(problem: str, path: str | Path) -> Path:
    """Return the path of a folder that exists, `~` expanded, else name the nearest ones."""
    if (path := located(path)).is_dir():
        return path
    raise _absent(problem, path, "folder")


def contents(problem: str, path: str | Path) -> bytes:
    """Read a complete file."""
    try:
        return existing_file(problem, path).read_bytes()
    except OSError as error:
        raise unreadable(problem, path, error) from error


def unreadable(problem: str, path: object, error: BaseException | str) -> DataError:
    """Return the error of a file that exists but is damaged."""
    reason = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return DataError(problem, f"{path} cannot be read ({reason}).", "Get the file again; it is damaged or incomplete.")


def _absent(problem: str, path: Path, kind: str) -> DataError:
    if path.exists():
        return DataError(problem, f"{path} is not a {kind}.", f"Give the path of a {kind}.")
    missing = path
    while not missing.parent.exists() and missing.parent != missing:
        missing = missing.parent
    folder = missing.parent
    names = sorted(entry.name for entry in islice(folder.iterdir(), _LISTED)) if folder.is_dir() else []
    return AbsentError(problem, f"There is no {kind} {path}.", f"Look in {folder}. {nearest(missing.name, names)}")

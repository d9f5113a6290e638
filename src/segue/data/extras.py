"""Optional packages, imported at the moment of need."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from segue.errors import MissingExtraError


def optional(module: str, extra: str, asked: str) -> ModuleType:
    """Import `module`, or say which extra of Segue brings it.

    >>> optional("json", "lab", "JSON was to be read.").dumps([1])
    '[1]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package
        found = f"This needs {package}, which " + ("is not installed." if missing else f"cannot be imported: {error}.")
        raise MissingExtraError(asked, found, f"pip install segue[{extra}]") from error

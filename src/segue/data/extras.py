"""Optional packages, imported at the moment of need."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

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


def quiet_transformers(name: str) -> Any:
    """Import transformers for the model `name`, without its reports and progress bars."""
    transformers = optional("transformers", "hf", f"the Hugging Face model {name!r} was to be loaded.")
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()  # its report on the fresh head, which is meant to be fresh
    logging.disable_progress_bar()
    return transformers

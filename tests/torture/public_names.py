"""What a user can call: the names of the API pages, and the public methods of their classes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

PAGES = Path(__file__).parents[2] / "docs" / "api"
PLAIN = re.compile(r"^::: (segue\.\S+)", re.MULTILINE)
WHOLE = re.compile(r"<!-- api: (\S+) -->")


def public_callables() -> dict[str, Callable[..., Any]]:
    """Return every function, class and public method of the API pages by its dotted name."""
    found: dict[str, Callable[..., Any]] = {}
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        places = [*PLAIN.findall(text), *(f"{module}.{name}" for module in WHOLE.findall(text) for name in _names(module))]
        for place in places:
            thing = _at(place)
            if not (inspect.isfunction(thing) or inspect.isclass(thing)) or _is_error(thing):
                continue
            found.setdefault(place, thing)
            found |= {f"{place}.{name}": method for name, method in _methods(thing)}
    return {name: thing for name, thing in found.items() if parameters(thing)}


def parameters(thing: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters that a user gives by name; those behind * and ** belong to someone else."""
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return {}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in signature.parameters.items() if name != "self" and p.kind not in variable}


def _names(module: str) -> list[str]:
    found: ModuleType = import_module(module)
    defined = [n for n, x in vars(found).items() if getattr(x, "__module__", None) == module and not n.startswith("_")]
    return list(getattr(found, "__all__", defined))


def _methods(kind: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    if inspect.isclass(kind):
        for name, value in inspect.getmembers(kind):
            public = not name.startswith("_") and (getattr(value, "__module__", None) or "").startswith("segue")
            if public and (inspect.isfunction(value) or inspect.ismethod(value)):
                yield name, value


def _is_error(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, Exception)


def _at(place: str) -> Any:
    module, _, name = place.rpartition(".")
    return getattr(import_module(module), name)

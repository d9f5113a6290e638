"""Arguments: what a user types, as files, options and calls."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from segue.errors import ConfigError, nearest


def experiment_file(name: str) -> Path:
    """Find the file of an experiment: a file, a folder with runs.py, or a name below experiments/."""
    for path in (Path(name), Path(name) / "runs.py", Path("experiments") / name / "runs.py"):
        if path.is_file() and path.suffix == ".py":
            return path
    known = [str(path.parent) for path in sorted(Path("experiments").glob("*/runs.py"))]
    raise ConfigError(
        f"there is no experiment {name!r}.", nearest(name, known), "an experiment is a folder with a runs.py in it."
    )


def name_values(pairs: list[str] | None) -> dict[str, Any]:
    """Parse name=value pairs; a value is JSON where it can be, and text otherwise."""
    options: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"{pair!r} is not an option.", "It is not of the form name=value.", "give for example seeds=5.")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options


def call_with(function: Any, what: str, options: dict[str, Any]) -> Any:
    """Call a function with options; an unknown or missing option is an error that names those it has."""
    parameters = inspect.signature(function).parameters
    for name in options:
        if name not in parameters:
            raise ConfigError(
                f"{what} has no option {name!r}.", nearest(name, list(parameters)), f"it has {', '.join(parameters)}."
            )
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in options]
    if missing:
        raise ConfigError(f"{what} is incomplete.", f"It needs the option {missing[0]!r}.", f"give --option {missing[0]}=PATH.")
    return function(**options)


def neighbours(folder: Path) -> str:
    """Name the folders that are near one that is not there."""
    others = [str(path) for path in sorted(folder.parent.glob("*")) if path.is_dir()] if folder.parent.is_dir() else []
    return nearest(str(folder), others) if others else "There is no such folder."

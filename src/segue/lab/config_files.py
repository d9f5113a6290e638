"""Configurations in TOML and YAML: the fields are those of the dataclasses, a part names its kind.

What a file leaves out has the default of today. TOML has no null: where None is not the default it is `{ kind = "None" }`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segue import plan as plans
from segue.border import checked
from segue.errors import ConfigError, MissingExtraError
from segue.lab.config import SERIALIZER, Run, part_of
from segue.settings import Serializer, unsaved

NOTHING = {"kind": "None"}
FILES = Serializer(
    kinds={**plans.SERIALIZER.kinds, **SERIALIZER.kinds},
    error=ConfigError,
    hint="an experiment in Python can have it: `segue grid`.",
    reads_old=False,
)


@checked
def save(config: Run, path: Path) -> None:
    """Write a complete configuration."""
    data = _without_defaults(FILES.encode(config))
    if own := unsaved(data):
        fault = f"the configuration cannot be written to {path}."
        raise ConfigError(fault, f"It has parts of your own: {', '.join(own)}.", FILES.hint)
    del data["kind"]
    write(data, path)


def is_complete(data: Mapping[str, Any]) -> bool:
    """Return whether a file describes a run alone, without a preset."""
    needed = {f.name for f in dataclasses.fields(Run) if f.default is f.default_factory is dataclasses.MISSING}
    return needed <= set(data)


def run_of(data: Mapping[str, Any]) -> Run:
    """Return the run that a complete file describes."""
    made: Run = FILES.decode({"kind": "Run", **_with_none(data)}, "config")
    return made


def merged(config: Any, data: Mapping[str, Any], at: str = "config") -> Any:
    """Return a configuration with the settings of a file; a part with its own kind, or another one's fields, is replaced."""
    for name, value in _with_none(data).items():
        old, place = part_of(config, name), f"{at}.{name}"
        kind = FILES.encode(old).get("kind") if dataclasses.is_dataclass(old) else None
        if isinstance(value, dict) and kind is not None and value.get("kind", kind) == kind:
            new = merged(old, {field: given for field, given in value.items() if field != "kind"}, place)
        else:
            new = FILES.decode(value, place)
        config = dataclasses.replace(config, **{name: new})
    return config


def _without_defaults(data: Any) -> Any:
    """Leave out None where it is the default, and write it out elsewhere."""
    if isinstance(data, list):
        return [_without_defaults(item) for item in data]
    if not isinstance(data, dict):
        return data
    kind = FILES.kinds.get(str(data.get("kind")))
    known = {f.name: f.default for f in dataclasses.fields(kind)} if kind is not None else {}
    found = {}
    for name, value in data.items():
        if name == "format" and kind is plans.Plan:
            continue
        if value is not None or known.get(name, 0) is not None:
            found[name] = NOTHING if value is None else _without_defaults(value)
    return found


def _with_none(data: Any) -> Any:
    if isinstance(data, list):
        return [_with_none(item) for item in data]
    if not isinstance(data, Mapping):
        return data
    return None if data == NOTHING else {name: _with_none(value) for name, value in data.items()}


@checked
def read(path: Path) -> dict[str, Any]:
    """Read a file in TOML, or in YAML if PyYAML is installed."""
    fault = f"the configuration {path} cannot be read."
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigError(fault, f"Its name ends with {path.suffix or 'nothing'!r}.", "give a file NAME.toml or NAME.yaml.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(fault, f"{type(error).__name__}: {error}.", "give a text file.") from None
    try:
        found = _from_toml(text) if path.suffix == ".toml" else _yaml(fault).safe_load(text)
    except MissingExtraError:
        raise
    except Exception as error:  # each parser has its own
        said = " ".join(str(error).split())
        raise ConfigError(fault, f"{said:.200}", "correct the file.") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(fault, f"It holds {found!r:.60}, not settings by name.", "write for example `batch = 64`.")
    return found


@checked
def write(data: dict[str, Any], path: Path) -> None:
    """Write plain data as TOML or YAML, by the ending of the name."""
    fault = f"the configuration cannot be written to {path}."
    if path.suffix == ".toml":
        text = toml(data)
    elif path.suffix in (".yaml", ".yml"):
        text = _yaml(fault).safe_dump(data, sort_keys=False, allow_unicode=True)
    else:
        raise ConfigError(fault, f"Its name ends with {path.suffix or 'nothing'!r}.", "give a file NAME.toml or NAME.yaml.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _from_toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found]
    found: dict[str, Any] = tomllib.loads(text)
    return found


def _yaml(fault: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtraError(fault, "PyYAML is not installed.", "pip install pyyaml, or write TOML.") from None
    return yaml


def toml(data: Mapping[str, Any], table: str = "") -> str:
    """Write plain data as TOML: values first, then a table for each part.

    >>> print(toml({"batch": 8, "recipe": {"lr": 1e-3, "betas": [0.9, 0.99]}}), end="")
    batch = 8
    <BLANKLINE>
    [recipe]
    lr = 0.001
    betas = [0.9, 0.99]
    """
    tables = {name: value for name, value in data.items() if isinstance(value, Mapping) and value != NOTHING}
    lines = [f"{_key(name)} = {_toml_value(value)}\n" for name, value in data.items() if name not in tables]
    text = "".join([f"\n[{table}]\n" if table else "", *lines])
    return text + "".join(toml(value, f"{table}.{_key(name)}" if table else _key(name)) for name, value in tables.items())


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(name)} = {_toml_value(item)}" for name, item in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _toml_value(name)

"""Settings as plain data: how plans and run configurations are written to files and read back.

A part is saved under its kind, the public name by which a user writes it: `segue.gates.Blend` is "gates.Blend", wherever the
file with the class is. Each room lists its public names in `__all__`. Only these classes can be named in a file, so reading
one runs no foreign code. What a user wrote leaves its name, marked as unsaved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from segue.errors import SegueError, nearest

# What version 0.1.0 wrote -> what it is called today. `first_names` undoes this for hashes: a rename does not change them, and
# neither does a setting that was added since, while it has the value that stands for what was done without it. A file without
# the setting means that value, whatever the default is today.
RENAMED_KINDS = {"students.Library": "students.FlaLayer"}
RENAMED_FIELDS = {
    "students.SlidingWindow": {"global_tokens": "sinks"},
    "Run": {"looks": "evaluations", "share": "data_fraction"},
    "ImageTask": {"look": "eval_examples"},
    "SentenceTask": {"look": "eval_examples"},
}
DROPPED_PREFIXES = {"students.FlaLayer": {"name": "fla:"}}
FIRST_OPERATORS = (
    *("Fourier", "LinearAttention", "Linformer", "Nystrom", "Performer", "SlidingWindow", "Softmax", "WindowedLinear"),
)
ADDED_FIELDS: dict[str, dict[str, Any]] = {f"students.{name}": {"ignore": []} for name in FIRST_OPERATORS}
ADDED_FIELDS["students.Fourier"]["across"] = "head"
ADDED_FIELDS["students.WindowedLinear"] |= {"sinks": 0, "far": None, "window_dropout": 0.0, "window_dropout_until": 0.5}
ADDED_FIELDS["Plan"] = {"phases": []}
ADDED_FIELDS["SmallViT"] = {"convolutional": False, "weights": None}
ADDED_FIELDS["SentenceTask"] = {"group_by_length": False}
ADDED_FIELDS["phases.Phase"] = {"fresh": False}
ADDED_FIELDS["Recipe"] = {"guard": None, "ema": None, "early_stopping": None}


def public_kinds(module: ModuleType, prefix: str = "") -> dict[str, type[Any]]:
    """Name the dataclasses in a module's `__all__`."""
    public = {name: getattr(module, name) for name in module.__all__}
    return {
        f"{prefix}{name}": made for name, made in public.items() if isinstance(made, type) and dataclasses.is_dataclass(made)
    }


@dataclass(frozen=True, kw_only=True)
class Serializer:
    """Write settings as data that JSON can hold, and rebuild them."""

    kinds: Mapping[str, type[Any]]
    error: type[SegueError]
    hint: str  # what to do about a user's own part; {field} is the setting that holds it
    describes_unsaved: bool = False  # write the fields of a user's own dataclass too: a hash then depends on them
    reads_old: bool = True  # what a file leaves out has the value of version 0.1.0; else the default of today

    def encode(self, value: Any) -> Any:
        """Turn settings into plain data."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, tuple | list):
            return [self.encode(item) for item in value]
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {"mapping": {key: self.encode(item) for key, item in value.items()}}
        if isinstance(value, type) or not dataclasses.is_dataclass(value):
            return {"unsaved": getattr(value, "__qualname__", type(value).__qualname__)}
        kind = next((kind for kind, made in self.kinds.items() if made is type(value)), None)
        if kind is None:
            fields = self.encode_fields(value) if self.describes_unsaved else {}
            return {**fields, "unsaved": type(value).__qualname__}
        return {"kind": kind, **(value.to_dict() if hasattr(value, "to_dict") else self.encode_fields(value))}

    def encode_fields(self, value: Any) -> dict[str, Any]:
        """Turn the settings of a dataclass into plain data."""
        return {f.name: self.encode(getattr(value, f.name)) for f in dataclasses.fields(value)}

    def decode(self, data: Any, at: str) -> Any:
        """Rebuild settings from plain data; `at` is where they are, for errors."""
        if isinstance(data, list):
            return tuple(self.decode(item, at) for item in data)
        if not isinstance(data, dict):
            return data
        if "unsaved" in data:
            raise self.error(
                f"{at} cannot be rebuilt from a file.",
                f"It is your own {data['unsaved']!r}, and only its name is saved.",
                self.hint.format(field=at.partition(".")[2].partition(".")[0]),
            )
        if isinstance(data.get("mapping"), dict):
            return {key: self.decode(item, f"{at}.{key}") for key, item in data["mapping"].items()}
        written = str(data.get("kind"))
        kind = written if written in self.kinds else RENAMED_KINDS.get(written, written)
        if kind not in self.kinds:
            raise self.error(
                f"{at} has the kind {written!r}, which is not one of Segue's.",
                nearest(written, list(self.kinds)),
                "another version of Segue may have written it." if self.reads_old else f"correct {at}.",
            )
        made = self.kinds[kind]
        fields = {name: value for name, value in data.items() if name != "kind"}
        if hasattr(made, "from_dict") and self.reads_old:
            return made.from_dict(fields)
        if kind != written:
            for name, prefix in DROPPED_PREFIXES.get(kind, {}).items():
                fields |= {name: str(fields[name]).removeprefix(prefix)} if name in fields else {}
        found = self.decode_fields(made, kind, {**(ADDED_FIELDS.get(kind, {}) if self.reads_old else {}), **fields}, at)
        try:
            return made(**found)
        except TypeError as error:
            raise self.error(f"{at} is not a complete {kind}.", f"{error}.", "the file may be damaged.") from None

    def decode_fields(self, made: type[Any], kind: str, data: Mapping[str, Any], at: str) -> dict[str, Any]:
        """Rebuild the settings of a class, under the names that they have today."""
        known = {f.name for f in dataclasses.fields(made)}
        found = {}
        for written, value in data.items():
            name = written if written in known else RENAMED_FIELDS.get(kind, {}).get(written, written)
            if name not in known:
                raise self.error(
                    f"{kind} has no setting {written!r}.",
                    nearest(written, sorted(known)),
                    "another version may have written it." if self.reads_old else f"correct {at}.",
                )
            found[name] = self.decode(value, f"{at}.{name}")
        return found


def unsaved(data: Any, at: str = "") -> list[str]:
    """List the parts of encoded settings that are only named, not saved."""
    if isinstance(data, dict):
        if "unsaved" in data:
            return [f"{at} ({data['unsaved']})"]
        inside = data.get("mapping", data)
        return [part for key, value in inside.items() for part in unsaved(value, f"{at}.{key}" if at else key)]
    if isinstance(data, list):
        return [part for value in data for part in unsaved(value, at)]
    return []


def first_names(data: Any) -> Any:
    """Write encoded settings as version 0.1.0 would: by its names, without what was added since and changes nothing."""
    if isinstance(data, list):
        return [first_names(item) for item in data]
    if not isinstance(data, dict):
        return data
    if isinstance(data.get("mapping"), dict):
        return {"mapping": {key: first_names(value) for key, value in data["mapping"].items()}}
    kind = str(data.get("kind"))
    first_field = {new: old for old, new in RENAMED_FIELDS.get(kind, {}).items()}
    added = ADDED_FIELDS.get(kind, {}).items()
    found = {first_field.get(name, name): first_names(value) for name, value in data.items() if (name, value) not in added}
    for name, prefix in DROPPED_PREFIXES.get(kind, {}).items():
        found[name] = prefix + found[name]
    first_kind = {new: old for old, new in RENAMED_KINDS.items()}
    return {**found, "kind": first_kind[kind]} if kind in first_kind else found

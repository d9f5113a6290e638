"""Configurations: the complete, printable, savable description of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from segue import data as sources
from segue.diagnostics.recorder import VARIANCE
from segue.errors import ConfigError, nearest
from segue.lab import models, tasks
from segue.lab.tasks import Task
from segue.plan import Plan
from segue.training.recipe import Recipe

NAMES = ("experiment", "method", "label", "group")  # of a run for people; they do not change its numbers


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of a teacher's training."""

    recipe: Recipe
    head_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """How the model comes to be that is then replaced in parts; the same configuration is trained once."""

    task: Task
    stages: tuple[Stage, ...]
    batch: int = 128
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One replacement: which teacher, which plan, which data, how long."""

    experiment: str
    method: str
    label: str
    group: str = "all"
    plan: Plan
    task: Task
    teacher: Teacher
    recipe: Recipe
    batch: int = 128
    share: float = 1.0  # of the training data, available to the replacement
    looks: tuple[int, ...] | int = 20
    diagnostics: tuple[str, ...] = (VARIANCE,)  # what is measured at the looks beside scores: see diagnostics.recorder
    seed: int = 0

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        parts = [self.method, self.group, f"seed{self.seed}"]
        return "-".join("".join(c if c.isalnum() or c in "._%" else "_" for c in part) for part in parts if part != "all")


KINDS: dict[str, Any] = {
    kind.__name__: kind
    for room in (models, sources, tasks)
    for kind in vars(room).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and not kind.__name__.startswith("_")
} | {kind.__name__: kind for kind in (Recipe, Stage, Teacher, Run)}


def to_dict(value: Any) -> Any:
    """Describe a configuration as plain data."""
    if isinstance(value, Plan):
        return {"kind": "Plan", **value.to_dict()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
        name = type(value).__name__
        return {"kind": name, **fields} if KINDS.get(name) is type(value) else {"unsaved": type(value).__qualname__, **fields}
    if isinstance(value, tuple | list):
        return [to_dict(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"unsaved": getattr(value, "__qualname__", type(value).__qualname__)}


def from_dict(data: Any) -> Any:
    """Rebuild a configuration; only Segue's own kinds can be named, so no foreign code runs."""
    if isinstance(data, list):
        return tuple(from_dict(item) for item in data)
    if not isinstance(data, dict):
        return data
    fields = dict(data)
    kind = fields.pop("kind", fields.get("unsaved"))
    if kind == "Plan":
        return Plan.from_dict(fields)
    if kind not in KINDS:
        raise ConfigError(
            f"a configuration was to be rebuilt from its {kind!r}.",
            f"That is not one of Segue's own. {nearest(str(kind), list(KINDS))}",
            "a run with your own parts goes on by `segue grid` with the file that made it.",
        )
    known = {f.name for f in dataclasses.fields(KINDS[kind])}
    for name in fields:
        if name not in known:
            raise ConfigError(
                f"{kind} has no setting {name!r}.", nearest(name, sorted(known)), "it may come from another version."
            )
    return KINDS[kind](**{name: from_dict(value) for name, value in fields.items()})


def config_hash(config: Run | Teacher) -> str:
    """Hash what decides the numbers of a run."""
    data = {name: value for name, value in to_dict(config).items() if name not in NAMES}
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def changed(config: Any, path: str, value: Any) -> Any:
    """Return a configuration with one setting changed, named by its path.

    >>> changed(Recipe(steps=10), "lr", 0.1).lr
    0.1
    """
    name, _, rest = path.partition(".")
    known = [f.name for f in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else []
    if name not in known:
        raise ConfigError(
            f"the setting {path!r} was to be changed.",
            f"{type(config).__name__} has none of that name. {nearest(name, known)}",
            "settings are named by their path, for example recipe.lr=1e-3.",
        )
    inner = changed(getattr(config, name), rest, value) if rest else value
    if isinstance(inner, list):
        inner = tuple(inner)
    return dataclasses.replace(config, **{name: inner})

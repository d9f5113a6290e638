"""Configurations: the complete, printable, savable description of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from segue import data as sources
from segue.border import Count, Fraction, PositiveInt, Seed, checked
from segue.diagnostics.recorder import VARIANCE
from segue.errors import ConfigError, nearest
from segue.lab.models import SentenceClassifier, SmallViT, Timm
from segue.lab.tasks import ImageTask, SentenceTask, Task
from segue.plan import Plan
from segue.settings import Serializer, first_names, public_kinds
from segue.training.early_stopping import EarlyStopping
from segue.training.ema import Ema
from segue.training.guard import Guard
from segue.training.recipe import Recipe

NAMES = (
    "experiment",
    "method",
    "label",
    "group",
    "reference",
    "choice",
    "alone",
)  # of a run for people; they do not change its numbers


@checked
@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of a teacher's training."""

    recipe: Recipe
    head_only: bool = False


@checked
@dataclass(frozen=True, kw_only=True)
class Teacher:
    """How the model comes to be that is then replaced in parts; the same configuration is trained once."""

    task: Task
    stages: tuple[Stage, ...]  # none: the model of the task is pretrained
    batch: PositiveInt = 128
    seed: Seed = 0


@checked
@dataclass(frozen=True, kw_only=True)
class Choice:
    """How the settings of a method were chosen before its runs: by `segue tune`, on held-out training data."""

    settings: dict[str, Any]  # the chosen values by their paths
    at_edge: tuple[str, ...] = ()  # those whose best value is the smallest or the largest that was tried
    not_varied: tuple[str, ...] = ()  # those for which no trial was left
    trials: PositiveInt
    steps: PositiveInt | None = None  # of a trial, where the recipe counts steps
    seeds: PositiveInt  # of a trial
    hold_out: PositiveInt  # examples, of the training part
    score: float | None  # on them, mean over the seeds of the best trial


@checked
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
    batch: PositiveInt = 128
    data_fraction: Fraction = 1.0  # of the training data, available to the replacement
    evaluations: tuple[Count, ...] | Count = 20  # at which steps, or how many
    diagnostics: tuple[str, ...] = (VARIANCE,)  # measured at every evaluation: see diagnostics.recorder
    seed: Seed = 0
    reference: str | None = None  # the method that the experiment compares the others with, named beforehand
    choice: Choice | None = None  # how the settings were chosen; None: by hand
    alone: bool = False  # it has the machine for itself, for its seconds: without diagnostics, which change no result

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        parts = [self.method, self.group, f"seed{self.seed}"]
        return "-".join("".join(c if c.isalnum() or c in "._%" else "_" for c in part) for part in parts if part != "all")


MODELS, TRAINING = (SmallViT, Timm, SentenceClassifier), (Plan, Recipe, Guard, Ema, EarlyStopping)
SETTINGS = (ImageTask, SentenceTask, *MODELS, *TRAINING, Stage, Teacher, Choice, Run)
SERIALIZER = Serializer(
    kinds=public_kinds(sources) | {kind.__name__: kind for kind in SETTINGS},
    error=ConfigError,
    hint="a run with your own parts resumes by `segue grid` and the file that made it.",
    describes_unsaved=True,
)


def to_dict(value: Any) -> Any:
    """Describe a configuration as plain data."""
    return SERIALIZER.encode(value)


def from_dict(data: Any) -> Any:
    """Rebuild a configuration; only Segue's own kinds can be named, so no foreign code runs."""
    return SERIALIZER.decode(data, "config")


def config_hash(config: Run | Teacher) -> str:
    """Hash what decides the numbers of a run.

    A changed value, a new setting or a removed one changes the hash, and so does the class of a part. Names for people, renamed
    settings and moved files do not, nor does an added setting that is listed as having no effect by default.
    """
    data = {name: value for name, value in first_names(to_dict(config)).items() if name not in NAMES}
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def changed(config: Any, path: str, value: Any) -> Any:
    """Return a configuration with one setting changed, named by its path; parts of a tuple have their index as name.

    A dictionary is a part as `to_dict` writes it.

    >>> changed(Recipe(steps=10), "lr", 0.1).lr
    0.1
    >>> changed(Recipe(steps=10), "betas.1", 0.99).betas
    (0.9, 0.99)
    >>> changed(Recipe(steps=10), "ema", {"kind": "Ema", "decay": 0.9}).ema
    Ema(decay=0.9, final=False)
    """
    name, _, rest = path.partition(".")
    old = part_of(config, name)
    inner = changed(old, rest, value) if rest else from_dict(value) if isinstance(value, dict) else value
    if isinstance(inner, list):
        inner = tuple(inner)
    if isinstance(config, tuple):
        return tuple(inner if index == int(name) else part for index, part in enumerate(config))
    return dataclasses.replace(config, **{name: inner})


def setting(config: Any, path: str) -> Any:
    """Return the setting that a path names.

    >>> setting(Recipe(steps=10), "betas.1")
    0.999
    """
    for name in path.split("."):
        config = part_of(config, name)
    return config


def part_of(config: Any, name: str) -> Any:
    """Return one setting, and refuse a name that there is not."""
    known: dict[str, Any] = {}
    if isinstance(config, tuple):
        known = {str(index): part for index, part in enumerate(config)}
    elif dataclasses.is_dataclass(config):
        known = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    if name not in known:
        raise ConfigError(
            f"{type(config).__name__} has no setting {name!r}.",
            nearest(name, list(known)),
            "settings are named by their path, for example recipe.lr=1e-3.",
        )
    return known[name]

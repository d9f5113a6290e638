"""Experiments: where runs come from, and what `segue tune` changes in them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from segue.border import Seed, checked
from segue.errors import ConfigError, SegueError, nearest
from segue.lab.config import Choice, Run, changed


@checked
@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings that replace those of an experiment, in the runs of one method and group."""

    method: str
    group: str
    settings: dict[str, Any]  # by path
    seed: Seed | None = None  # only in the run of this seed
    choice: Choice | None = None  # how they were chosen

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Change:
        """Read a change from grid.json."""
        try:
            known = {f: saved[f] for f in ("method", "group", "settings", "seed")}
            return cls(**known, choice=saved["choice"] and choice_from_dict(saved["choice"]))
        except (KeyError, TypeError) as error:
            fault = "a change in grid.json must have a method, a group, settings, a seed and a choice."
            raise ConfigError(fault, f"Reading it ends with {error!r:.80}.", "repeat `segue grid`.") from None

    def __call__(self, run: Run) -> Run:
        """Return the run with the settings, if it is meant."""
        if (run.method, run.group) != (self.method, self.group) or self.seed not in (None, run.seed):
            return run
        for path, value in self.settings.items():
            run = changed(run, path, value)
        return replace(run, choice=self.choice or run.choice)


def choice_from_dict(saved: Mapping[str, Any]) -> Choice:
    """Read a choice from JSON."""
    known: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    return Choice(**known)


@checked
@dataclass(frozen=True)
class Experiment:
    """Where a list of runs comes from: a file with a function `runs`, and the options it gets.

    Each worker reads the file itself, so a run may hold anything that Python can express, and nothing is pickled.
    """

    place: str  # a file, or the name of a module
    options: dict[str, Any] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()  # applied to the runs that `runs` returns

    @classmethod
    @checked
    def from_dict(cls, saved: dict[str, Any]) -> Experiment:
        """Read an experiment from grid.json."""
        place, options, changes = saved.get("place"), saved.get("options"), saved.get("changes", [])
        if not (isinstance(place, str) and isinstance(options, dict) and isinstance(changes, list)):
            found = f"They are {place!r:.40}, {options!r:.40} and {changes!r:.40}."
            raise ConfigError("grid.json must have a place, its options and changes.", found, "repeat `segue grid`.")
        return cls(place, options, tuple(Change.from_dict(change) for change in changes))

    def to_dict(self) -> dict[str, Any]:
        """Return what grid.json says of an experiment."""
        known: dict[str, Any] = {"place": self.place, "options": self.options}
        return known | ({"changes": [asdict(change) for change in self.changes]} if self.changes else {})

    def resolved(self) -> Experiment:
        """Return the experiment with a path that other current folders understand."""
        return replace(self, place=str(Path(self.place).resolve())) if self.place.endswith(".py") else self

    def runs(self) -> list[Run]:
        """Return the runs, with the changes applied."""
        module = self._module()
        function = getattr(module, "runs", None)
        if not callable(function):
            raise ConfigError(
                f"the experiment {self.place} has no function `runs`.",
                "Segue calls it to get the runs.",
                "write `def runs(seeds=3): return [...]`, a function that returns a list of Run.",
            )
        parameters = inspect.signature(function).parameters
        for name in self.options:
            if name not in parameters:
                fault = f"the experiment {self.place} has no option {name!r}."
                raise ConfigError(fault, nearest(name, list(parameters)), "see its `runs`.")
        if missing := [p.name for p in parameters.values() if p.default is p.empty and p.name not in self.options]:
            fault = f"the experiment {self.place} needs the option {missing[0]!r}."
            raise ConfigError(fault, "It has no default.", f"give -o {missing[0]}=VALUE; the head of the file says which.")
        runs = self._run(lambda: function(**self.options))
        if not (isinstance(runs, list | tuple) and runs and all(isinstance(run, Run) for run in runs)):
            raise ConfigError(
                f"`runs` of the experiment {self.place} must return a list of Run.",
                f"It returns {runs!r:.60}.",
                "return [preset.run(variant, seed=seed), ...].",
            )
        found = self._with_reference(list(runs), getattr(module, "REFERENCE", None))
        for change in self.changes:
            found = [change(run) for run in found]
        names = [run.name for run in found]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(
                f"the experiment {self.place} has two runs called {min(twice)!r}.",
                "A run's name is its method, group and seed.",
                "give the two runs different groups.",
            )
        return found

    def _with_reference(self, runs: list[Run], reference: object) -> list[Run]:
        """Note in every run which method the experiment compares the others with, if it names one."""
        if reference is None:
            return runs
        methods = sorted({run.method for run in runs})
        if not isinstance(reference, str) or (reference not in methods and not self.options):  # options may leave methods out
            fault = f"REFERENCE of the experiment {self.place} must be a method of its runs, got {reference!r:.60}."
            raise ConfigError(fault, nearest(str(reference), methods), "name the method that the others are compared with.")
        return [replace(run, reference=run.reference or reference) for run in runs]

    def _module(self) -> Any:
        if not self.place.endswith(".py"):
            try:
                return importlib.import_module(self.place)
            except ModuleNotFoundError as error:
                if error.name is None or not self.place.startswith(error.name):
                    raise
                raise self._absent("module") from None
        if not Path(self.place).is_file():
            raise self._absent("file")
        spec = importlib.util.spec_from_file_location(f"experiment_{Path(self.place).parent.name}", self.place)
        assert spec is not None
        assert spec.loader is not None
        loader = spec.loader
        _make_importable(Path(self.place))
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses of the file look themselves up
        self._run(lambda: loader.exec_module(module))
        return module

    def _run(self, code: Callable[[], Any]) -> Any:
        """Run code of the experiment; what it raises is a mistake in its file."""
        try:
            return code()
        except SegueError:
            raise
        except (Exception, SystemExit) as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.place]
            line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
            raise ConfigError(
                f"the experiment {self.place} fails.",
                f"It raises {type(error).__name__} in line {line}: {error}",
                "correct the file; `python FILE` shows more if its head is at fault.",
            ) from error

    def _absent(self, kind: str) -> ConfigError:
        return ConfigError(
            f"there is no experiment {self.place}.",
            f"No {kind} has that name.",
            "give a file with a function `runs`, or the name of a module that has one.",
        )


def _make_importable(file: Path) -> None:
    """Let a file inside a package import its neighbours by their full names, as `python -m` does."""
    folder = file.resolve().parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    if folder != file.resolve().parent and str(folder) not in sys.path:
        sys.path.append(str(folder))

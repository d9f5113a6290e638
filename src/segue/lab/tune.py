"""Tuning: for every method the same number of trials over its rates and the weights of its own losses.

A trial is a run like any other, in a folder of its own, scored on training examples that are held out. Its seeds are not those
of the experiment. The teacher is the experiment's and may have seen the held-out examples; methods are not compared by them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from segue.border import Fraction, PositiveInt, Rule, checked
from segue.errors import ConfigError, ResultError, nearest
from segue.lab.config import Choice, Run, config_hash, setting
from segue.lab.experiment import Change, Experiment, choice_from_dict
from segue.lab.grid import Engine, Jobs, Outcome, run_jobs
from segue.lab.run import is_finished
from segue.lab.search import FEWEST, Axis, Point, Scores, best, on_line, replay
from segue.lab.tasks import Task
from segue.phases import KINDS, Rates, at, distill_of, guidance_of, holds
from segue.plan import Plan
from segue.reporting import records as results
from segue.sites import Site

FORMAT = 1
FILE = "tuned.json"
DIVERGED = "diverged.json"  # in the folder of a run that ended in inf or NaN
FIRST_SEED = 1000  # of the trials
PLACES = 100  # in a run, at which is asked whether a loss acts
RATE_FACTOR, WEIGHT_FACTOR = 2.0, 4.0  # between neighbouring values

Trials = Annotated[int, Rule(f"an integer of at least {FEWEST}", lambda value: value >= FEWEST)]
Share = Annotated[float, Rule("a number above 0 and below 1", lambda value: 0 < value < 1)]


@checked
@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How settings are searched: the same for every method."""

    trials: Trials = 8
    seeds: PositiveInt = 1  # runs of each trial
    steps_share: Fraction = 1.0  # of the experiment's steps
    hold_out: Share = 0.2  # of the training data

    @classmethod
    @checked
    def from_dict(cls, saved: Mapping[str, Any]) -> Tuning:
        """Read the settings of a search from tune.json."""
        try:
            return cls(**saved)
        except TypeError as error:
            found = f"Reading its settings ends with {error}."
            raise ConfigError("tune.json cannot be read.", found, "repeat `segue tune`; finished trials are kept.") from None


@dataclass(frozen=True)
class Arm:
    """One method in one group, and what its trials vary."""

    run: Run  # the first of the experiment's
    axes: tuple[Axis, ...]
    fixed: dict[str, Any]  # settings of every trial
    seeds: tuple[int, ...]

    def settings(self, point: Point) -> dict[str, float]:
        """Return the settings at a point."""
        return {axis.path: axis.value(power) for axis, power in zip(self.axes, point, strict=True)}

    def changes(self, point: Point) -> list[Change]:
        """Return what makes the experiment's run a trial, for each seed."""
        values = self.settings(point)
        name = ", ".join(f"{path} {value:g}" for path, value in values.items())
        group = name if self.run.group == "all" else f"{self.run.group}, {name}"
        return [
            Change(
                method=self.run.method,
                group=self.run.group,
                seed=self.run.seed,
                settings={
                    **self.fixed,
                    **values,
                    "group": group,
                    **dict.fromkeys(("seed", "plan.seed", "recipe.seed"), seed),
                },
            )
            for seed in self.seeds
        ]


@checked
def tune(
    experiment: Experiment, out: Path, *, tuning: Tuning, workers: PositiveInt = 1, engine: Engine = "local"
) -> list[Outcome]:
    """Carry out the trials and write the choices to tuned.json; return the runs that failed, without which none is made.

    Proposals are a function of the trials that have ended, so an interrupted search resumes to the same choice.
    """
    arms = arms_of(experiment, tuning)
    known: dict[str, float | None] = {}
    while True:
        replays = [replay(len(arm.axes), tuning.trials, partial(_score, arm, out, known)) for arm in arms]
        jobs: Jobs = {}
        runs: dict[str, Run] = {}
        for arm, (_, waiting) in zip(arms, replays, strict=True):
            for change in (change for point in waiting for change in arm.changes(point)):
                if (run := change(arm.run)).name not in known:
                    jobs[run.name], runs[run.name] = replace(experiment, changes=(change,)), run
        if not jobs:
            break
        done = sum(len(tried) for tried, _ in replays)
        title = f"tune, {done} of {tuning.trials * len(arms)} trials"
        outcomes = run_jobs(title, jobs, out, workers=workers, engine=engine)
        for outcome in outcomes:
            if "TrainingError" in outcome.why:
                mark = {"why": outcome.why, "config_hash": config_hash(runs[outcome.name])}
                results.write_json(mark, out / outcome.name / DIVERGED)
        if failed := [outcome for outcome in outcomes if not (outcome.ok or _diverged(runs[outcome.name], out))]:
            return failed
    methods = [_described(arm, tried, known) for arm, (tried, _) in zip(arms, replays, strict=True)]
    results.write_json({"format": FORMAT, **experiment.to_dict(), **asdict(tuning), "methods": methods}, out / FILE)
    return []


def arms_of(experiment: Experiment, tuning: Tuning) -> list[Arm]:
    """Return each method of each group once, with its axes and with what all its trials have."""
    first: dict[tuple[str, str], Run] = {}
    for run in experiment.runs():
        first.setdefault((run.group, run.method), run)
    seeds = tuple(range(FIRST_SEED, FIRST_SEED + tuning.seeds))
    sizes: list[tuple[Task, int]] = []  # tasks need not be hashable
    arms = []
    for run in first.values():
        if not any(task == run.task for task, _ in sizes):
            sizes.append((run.task, _training_examples(run)))
        total = next(size for task, size in sizes if task == run.task)
        arms.append(Arm(run, axes_of(run), _fixed(run, total, tuning), seeds))
    return arms


def axes_of(run: Run) -> tuple[Axis, ...]:
    """Return what is tuned: learning rates, then the weights of the plan's own losses."""
    weights = [path for part in ("guidance", "distill") if (path := _weight(run.plan, part))]
    return (
        *(Axis(path, setting(run, path), RATE_FACTOR) for path in _rates(run)),
        *(Axis(path, setting(run, path), WEIGHT_FACTOR) for path in weights),
    )


def _rates(run: Run) -> list[str]:
    """Return the paths of the learning rates: the recipe's where a phase follows it, and those of phases."""
    phases = run.plan.phases
    found = {"recipe.lr": run.recipe.lr} if not phases or any(phase.lr is None for phase in phases) else {}
    found |= {f"plan.phases.{index}.lr": phase.lr for index, phase in enumerate(phases) if phase.lr is not None}
    paths: list[str] = []
    for path, lr in found.items():
        kinds = [kind for kind in KINDS if getattr(lr, kind) is not None] if isinstance(lr, Rates) else []
        paths += [f"{path}.{kind}" for kind in kinds] or [path]
    return paths


def _weight(plan: Plan, part: str) -> str | None:
    """Return the path of a loss' weight, inside its wrappers; None if there is none above 0 that acts beside another loss."""
    if not {"guidance": _guides_blend, "distill": _distils_beside_another_loss}[part](plan):
        return None
    loss, path = getattr(plan, part), f"plan.{part}"
    while dataclasses.is_dataclass(loss):
        names = {f.name for f in dataclasses.fields(loss)}
        if "weight" in names:
            return f"{path}.weight" if getattr(loss, "weight", 0) > 0 else None
        loss, path = getattr(loss, "then", None), f"{path}.then"
    return None


def _guides_blend(plan: Plan) -> bool:
    """Return whether guidance acts outside local fits; alone, its weight changes nothing for AdamW."""
    site, progress = Site(name="any"), [index / PLACES for index in range(PLACES)]
    return any(guidance_of(plan, one, site) > 0 and not holds(plan, one, site) for one in progress)


def _distils_beside_another_loss(plan: Plan) -> bool:
    """Return whether distillation ever acts beside another loss; alone, its weight changes nothing for AdamW."""
    if plan.distill is None:
        return False
    site = Site(name="any")
    for progress in (index / PLACES for index in range(PLACES)):
        task = at(plan.phases, progress)[0].task if plan.phases else 1.0
        if distill_of(plan, progress, site) > 0 and (task > 0 or guidance_of(plan, progress, site) > 0):
            return True
    return False


def _training_examples(run: Run) -> int:
    if not hasattr(run.task, "hold_out"):
        raise ConfigError(
            f"the task {type(run.task).__name__} cannot hold out training data.",
            "It has no setting hold_out, and settings are never chosen by the test part.",
            "give your task a field `hold_out`: evaluate on so many training examples instead of the test part.",
        )
    everything: Task = replace(run.task, hold_out=0)  # type: ignore[type-var]
    return everything.load().examples


def _fixed(run: Run, total: int, tuning: Tuning) -> dict[str, Any]:
    """Return the settings of every trial: held-out data, as many examples to train on as before where they remain, steps."""
    hold_out = max(1, round(tuning.hold_out * total))
    recipe = run.recipe
    length = (
        {"recipe.epochs": recipe.epochs and recipe.epochs * tuning.steps_share}
        if recipe.steps is None
        else {"recipe.steps": max(1, round(recipe.steps * tuning.steps_share))}
    )
    return {
        "task.hold_out": hold_out,
        "data_fraction": min(1.0, run.data_fraction * total / (total - hold_out)),
        **length,
        "evaluations": 1,
        "diagnostics": [],
    }


def _score(arm: Arm, out: Path, known: dict[str, float | None], point: Point) -> tuple[bool, float | None]:
    """Return whether a trial has ended, and its mean score; None if a seed diverged. Note in `known` what is read."""
    runs = [change(arm.run) for change in arm.changes(point)]
    for run in runs:
        folder = out / run.name
        if run.name in known:
            continue
        if is_finished(run, folder):
            result = results.read(folder / results.FILE)
            known[run.name] = result.train_info.final[result.train_info.score]
        elif _diverged(run, out):
            known[run.name] = None
    return all(run.name in known for run in runs), mean([known.get(run.name) for run in runs])


def _diverged(run: Run, out: Path) -> bool:
    """Return whether a run of this very configuration, which is not kept in its folder, ended in inf or NaN."""
    mark = out / run.name / DIVERGED
    return mark.exists() and bool(results.read_json(mark, "config_hash")["config_hash"] == config_hash(run))


def mean(scores: list[float | None]) -> float | None:
    """Average scores; None if one is missing."""
    finite = [score for score in scores if score is not None]
    return sum(finite) / len(finite) if len(finite) == len(scores) else None


def _described(arm: Arm, tried: Scores, known: dict[str, float | None]) -> dict[str, Any]:
    """Say which settings a method gets, and by which trials."""
    chosen = best(tried)
    lines = {axis.path: on_line(tried, chosen, index) for index, axis in enumerate(arm.axes)}
    ends = {path for index, (path, line) in enumerate(lines.items()) if chosen[index] in (line[0], line[-1])}
    choice = Choice(
        settings=arm.settings(chosen),
        at_edge=tuple(path for path, line in lines.items() if path in ends and len(line) > 1),
        not_varied=tuple(path for path, line in lines.items() if len(line) == 1),
        trials=len(tried),
        steps=arm.fixed.get("recipe.steps"),
        seeds=len(arm.seeds),
        hold_out=arm.fixed["task.hold_out"],
        score=tried[chosen],
    )
    return {
        "experiment": arm.run.experiment,
        "config_hash": config_hash(arm.run),
        "method": arm.run.method,
        "label": arm.run.label,
        "group": arm.run.group,
        "choice": asdict(choice),
        "fixed": arm.fixed,
        "trials": [
            {
                "settings": arm.settings(point),
                "score": score,
                "runs": {name: known[name] for name in (change(arm.run).name for change in arm.changes(point))},
            }
            for point, score in tried.items()
        ],
    }


@checked
def read(path: Path) -> list[Change]:
    """Read the choices of tuned.json."""
    return [change for change, _ in _read(path)]


def _read(path: Path) -> list[tuple[Change, dict[str, Any]]]:
    """Read the choices of tuned.json, each with all that is written of it."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}.", "It has the settings of each method.", "`segue tune` writes it.")
    saved = results.read_json(path, "format", "methods")
    if saved["format"] != FORMAT:
        raise ResultError(
            f"{path} has a format that this version does not read.",
            f"Its format is {saved['format']!r}, this version of Segue reads {FORMAT}.",
            "read it with the version that wrote it, or repeat `segue tune`.",
        )
    try:
        return [
            (
                Change(
                    method=one["method"],
                    group=one["group"],
                    settings=one["choice"]["settings"],
                    choice=choice_from_dict(one["choice"]),
                ),
                one,
            )
            for one in saved["methods"]
        ]
    except (KeyError, TypeError) as error:
        raise ResultError(
            f"{path} is not what `segue tune` writes.",
            f"Reading it ends with {type(error).__name__}: {error}.",
            "repeat `segue tune`; finished trials are kept.",
        ) from None


@checked
def tuned(experiment: Experiment, path: Path) -> Experiment:
    """Return an experiment with the settings of tuned.json, which must be of the same one and have some for each method."""
    read = _read(path)
    known = {(change.method, change.group): saved for change, saved in read}
    compared: set[tuple[str, str]] = set()
    for run in experiment.runs():
        key = (run.method, run.group)
        if key not in known:
            raise ConfigError(
                f"{path} has no settings for the method {run.method!r} of the group {run.group!r}.",
                nearest(f"{run.method} of {run.group}", [f"{method} of {group}" for method, group in sorted(known)]),
                "tune the same experiment, with the same options.",
            )
        if key not in compared:  # the first run of each, as when it was tuned
            compared.add(key)
            _require_same_experiment(run, known[key], path)
    return replace(experiment, changes=tuple(change for change, _ in read))


def _require_same_experiment(run: Run, saved: Mapping[str, Any], path: Path) -> None:
    """Refuse settings that were tuned for other runs; a file from before they were noted cannot be compared."""
    name, noted = saved.get("experiment", run.experiment), saved.get("config_hash", config_hash(run))
    if name != run.experiment:
        found = f"It was tuned for the experiment {name!r}, this one is {run.experiment!r}."
    elif noted != config_hash(run):
        found = f"The runs of the method {run.method!r} of the group {run.group!r} have other settings now, or other options."
    else:
        return
    hint = "tune this experiment, with the same options."
    raise ConfigError(f"the settings in {path} are of another experiment.", found, hint)

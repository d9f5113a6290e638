"""`segue resume`: what a folder holds, and what continues it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer

from segue.cli import tune
from segue.cli.arguments import neighbours
from segue.cli.grid import train_grid
from segue.cli.run import ended
from segue.cli.terminal import command_line, console, say
from segue.convert.options import Conversion
from segue.data.files import without_network
from segue.errors import ConfigError, printable
from segue.lab import consent
from segue.lab.config import Run, from_dict
from segue.lab.experiment import Experiment
from segue.lab.run import run as train
from segue.lab.tune import Tuning
from segue.reporting.records import read_json


def resume(
    folder: Path,
    *,
    convert: Callable[..., None],
    workers: int | None,
    run_file: bool,
    download: bool,
    checkpoint: Path | None,
    allow_changes: Sequence[str],
) -> int:
    """Continue a conversion, a grid, a search of settings or a run, and return the exit code."""
    network = nullcontext() if download else without_network()
    given: dict[str, Any] = {"resume": checkpoint, "allow_changes": tuple(allow_changes)}
    if (settings := folder / "training" / "settings.json").exists():
        if (folder / "segue.json").exists():
            say(f"{folder} is finished: there is nothing to resume.\nNext: {command_line('eval', folder)}")
            return 0
        with network:
            convert(Conversion.from_dict(read_json(settings)), folder, **given)
        return 0
    if place := next((folder / name for name in ("grid.json", "tune.json") if (folder / name).exists()), None):
        if checkpoint or allow_changes:
            raise ConfigError(
                "a grid resumes each of its runs from its own latest checkpoint.",
                "--checkpoint and --allow-changes are of one run.",
                f"give the folder of that run: {command_line('resume', folder / 'RUN')}.",
            )
        return _resume_many(place, workers, run_file)
    if (folder / "config.json").exists():
        config = from_dict(read_json(folder / "config.json", "config")["config"])
        if not isinstance(config, Run):
            raise ConfigError(
                f"{folder} is not a run.", f"Its config.json holds a {type(config).__name__}.", "give a run's folder."
            )
        with network:
            result = train(config, folder, **given)
        say(f"{ended(result)}\nNext: {command_line('report', folder)}")
        return 0
    raise ConfigError(
        f"{folder} is not a run, a grid, a search of settings or a conversion.",
        f"It has no config.json, grid.json, tune.json or training/settings.json. {neighbours(folder)}",
        "give the folder that `segue run`, `segue grid`, `segue tune` or `segue convert` wrote to.",
    )


def _resume_many(place: Path, workers: int | None, run_file: bool) -> int:
    known = read_json(place, "place", "options", "workers", "engine")
    experiment = Experiment.from_dict(known)
    _require_consent(experiment, place, run_file)
    if place.name == "grid.json":
        return train_grid(experiment, place.parent, workers or known["workers"], known["engine"])
    tuning = Tuning.from_dict(read_json(place, "tuning")["tuning"])
    return tune.show(experiment, place.parent, console, tuning, workers or known["workers"], known["engine"])


def _require_consent(experiment: Experiment, named_in: Path, run_file: bool) -> None:
    """Run a file that only the folder names if the user says so, or has said so before."""
    folder = named_in.parent
    if run_file or consent.is_shipped(experiment) or consent.is_known(experiment, folder):
        return
    place = experiment.place
    if sys.stdin.isatty() and sys.stderr.isatty():
        question = f"{named_in} names the experiment {place}, which is code. Run it?"
        if typer.confirm(printable(question), default=False, err=True):
            return
    raise ConfigError(
        f"the experiment {place} is not run.",
        "It is code, the folder names it, and you have not run it, as it is now, in this folder.",
        f"read it, then: {command_line('resume', folder, '--run-file')}",
    )

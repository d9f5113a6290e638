"""`segue run`: one run, from a preset, a file and options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from segue.cli.arguments import call_with, name_values
from segue.cli.report import watching
from segue.cli.terminal import command_line, resumed_by, say
from segue.errors import ConfigError
from segue.lab import config_files, presets, variants
from segue.lab.config import Run, changed
from segue.lab.run import run as train
from segue.reporting.records import Result

FROM_FILE = ("method", "seed", "data_fraction")  # what a file may say instead of the command line


def configured(file: Path | None, given: dict[str, Any], settings: dict[str, Any]) -> Run:
    """Return the run: a complete file, or a preset with what a file names; single settings win over both."""
    data = {} if file is None else config_files.read(file)
    if data and config_files.is_complete(data):
        if doubled := [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]:
            raise ConfigError(
                f"{file} describes a complete run.",
                f"{doubled[0]} would describe it a second time.",
                "leave the option out, or change one setting: --set seed=1.",
            )
        config = config_files.run_of(data)
    else:
        config = config_files.merged(_from_preset(given, data), data)
    for path, value in settings.items():
        config = changed(config, path, value)
    return config


def _from_preset(given: dict[str, Any], data: dict[str, Any]) -> Run:
    for field in FROM_FILE:
        given = {**given, field: data.get(field) if given[field] is None else given[field]}
    name = given["method"] if given["method"] in (None, *variants.ALL) or "plan" not in data else None
    found = variants.find(["local_fit" if name is None else str(name)])
    if len(found) > 1:
        raise ConfigError(
            f"{name!r} stands for {len(found)} methods.", "A run has one method.", "`segue grid` trains many runs."
        )
    preset = given["preset"] or "demo"
    chosen = call_with(getattr(presets, preset), f"the preset {preset}", name_values(given["options"]))
    made: Run = chosen.run(found[0], seed=given["seed"] or 0, data_fraction=given["data_fraction"])
    return made


def show(config: Run, out: Path, *, trackers: tuple[str, ...], opens: bool = False) -> None:
    """Train, and say how good the students are and what comes next."""
    folder = out / config.name
    with resumed_by("resume", folder), watching(folder, opens=opens):
        result = train(config, folder, keep_model=True, trackers=trackers)
    if int(os.environ.get("RANK", 0)) == 0:
        say(f"{ended(result)}\n{folder}\nNext: {command_line('report', out)}")


def ended(result: Result) -> str:
    """Say how good the students of a finished run are, beside their teacher."""
    score = result.train_info.score
    return f"students alone: {score} {result.final:.4f} (teacher {result.train_info.teacher[score]:.4f})"

"""`segue grid`: many runs, what failed, and what comes next."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from segue.cli.report import watching
from segue.cli.terminal import command_line, console, resumed_by, say
from segue.lab import consent
from segue.lab.experiment import Experiment
from segue.lab.grid import Engine, describe_grid, run_grid
from segue.reporting.records import write_json


def train_grid(experiment: Experiment, folder: Path, workers: int, engine: Engine, *, opens: bool = False) -> int:
    """Train a grid, print what failed, and return the exit code."""
    experiment.runs()  # raises its errors before anything is written
    known = describe_grid(experiment, workers=workers, engine=engine)  # so does this
    consent.remember(experiment, folder)
    write_json(known, folder / "grid.json")
    with resumed_by("resume", folder), watching(folder, opens=opens):
        outcomes = run_grid(experiment, folder, workers=workers, engine=engine)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    for outcome in failed:
        console.print(Text.assemble(("failed", "bold red"), f": {outcome.name}\n{outcome.why}"), soft_wrap=True)
    if failed:
        say(f"{len(failed)} runs failed; their logs are in {folder}/<run>/log.txt.")
        say(f"Next: {command_line('resume', folder)} tries them again.")
        return 1
    say(f"All runs are finished. Next: {command_line('report', folder)}")
    return 0

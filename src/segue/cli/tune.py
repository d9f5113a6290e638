"""segue tune: the trials, then a table of what each method gets."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from segue.cli.terminal import command_line, resumed_by
from segue.lab import consent
from segue.lab.experiment import Experiment
from segue.lab.grid import Engine, describe_grid
from segue.lab.tune import FILE, Tuning, arms_of, tune
from segue.reporting.records import read_json, write_json

SETTINGS = "tune.json"  # how the trials are made, for `segue resume`


def show(experiment: Experiment, out: Path, console: Console, tuning: Tuning, workers: int, engine: Engine) -> int:
    """Carry out the trials, print the choices, and return the exit code."""
    arms = arms_of(experiment, tuning)  # raises its errors before anything is written
    described = describe_grid(experiment, workers=workers, engine=engine)
    consent.remember(experiment, out)
    write_json({**described, "tuning": asdict(tuning)}, out / SETTINGS)
    console.print(f"{len(arms)} methods with {tuning.trials} trials each; results in {out}", soft_wrap=True)
    with resumed_by("resume", out):
        failed = tune(experiment, out, tuning=tuning, workers=workers, engine=engine)
    for outcome in failed:
        console.print(f"failed: {outcome.name}\n{outcome.why}", soft_wrap=True)
    if failed:
        console.print(f"{len(failed)} runs failed; their logs are in {out}/<run>/log.txt.", soft_wrap=True)
        console.print(f"Next: {command_line('resume', out)} tries them again.", soft_wrap=True)
        return 1
    console.print(table(read_json(out / FILE, "methods")["methods"]))
    console.print(f"{out / FILE}\nNext: {command_line('grid', *_named(experiment), '--tuned', out / FILE)}", soft_wrap=True)
    return 0


def _named(experiment: Experiment) -> list[str]:
    """Return what a command calls an experiment: its folder, or else its file, and the options."""
    place = Path(experiment.place)
    place = place.parent if place.name == "runs.py" else place
    if place.is_absolute() and place.is_relative_to(Path.cwd()):
        place = place.relative_to(Path.cwd())
    return [str(place), *(word for name, value in experiment.options.items() for word in ("-o", f"{name}={value}"))]


def table(methods: list[dict[str, Any]]) -> Table:
    """Return what was chosen for each method, with what was tried."""
    made = Table(title="Best trials on held-out training data", box=box.SIMPLE_HEAD)
    for heading in ("Method", "Setting", "Chosen", "Tried", ""):
        made.add_column(heading, no_wrap=heading in ("Setting", "Chosen"))
    for one in methods:
        choice = one["choice"]
        group = "" if one["group"] == "all" else f", {one['group']}"
        score = "diverged" if choice["score"] is None else f"{choice['score']:.4f}"
        name = f"{one['label']}{group} ({score})"
        for path, value in choice["settings"].items():
            tried = sorted({trial["settings"][path] for trial in one["trials"]})
            edge = "at an edge" if path in choice["at_edge"] else "not varied" if path in choice["not_varied"] else ""
            made.add_row(name, path, f"{value:g}", " ".join(f"{each:g}" for each in tried), edge)
            name = ""
    return made

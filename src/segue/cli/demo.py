"""The demo: the paper's seven methods and Segue's local fit on embedded digits, in minutes.

Command: segue demo (or `make demo`); about three minutes on two cores, two runs at a time, one seed.
Expected: without training the accuracy drops to chance, every method recovers most of it, and one seed proves nothing.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from segue.lab import presets, variants
from segue.lab.config import Run
from segue.lab.experiment import Experiment
from segue.lab.grid import run_grid
from segue.lab.report.findings import overview
from segue.lab.report.page import write
from segue.lab.report.source import read_grid
from segue.lab.report.summary import Summary, summarize
from segue.lab.report.tables import columns
from segue.reporting import records as results
from segue.reporting.formatting import duration

SHOWN_METHODS = (*variants.PAPER, variants.METHODS["local_fit"])
SHOWN = ("final", "area", "epochs_1", "step_flops")  # columns in the terminal; the report has all


def runs(seeds: int = 1, steps: int = 320, teacher_steps: int = 500, depth: int = 6) -> list[Run]:
    """Return the runs of the paper's methods, and of the one that is best here, with the demo's preset."""
    preset = presets.demo(steps=steps, teacher_steps=teacher_steps, depth=depth)
    return [preset.run(variant, seed=seed) for seed in range(seeds) for variant in SHOWN_METHODS]


def show(out: Path, console: Console, *, options: dict[str, Any], workers: int) -> int:
    """Train the demo, print its table and the path of the report, and return the exit code."""
    begun = time.monotonic()
    failed = [outcome for outcome in run_grid(Experiment(__name__, options), out, workers=workers) if not outcome.ok]
    for outcome in failed:
        console.print(f"failed: {outcome.name}\n{outcome.why}")
    if failed:
        return 1
    source = read_grid(out)
    found, summary = source.results, summarize(source.results)
    page = write(source, summary, out, "Segue's demo")
    show_summary(summary, console)
    console.print(f"- Replaced without training, the students' {found[0].train_info.score} is {_swapped(found):.3f}.")
    console.print(f"- {_held(found)}", soft_wrap=True)
    console.print(
        f"\n{duration(time.monotonic() - begun)} in all. Next: open the report, with figures:\n{page}", soft_wrap=True
    )
    return 0


def _swapped(found: list[results.Result]) -> float:
    """Return the mean score right after replacement, before training."""
    swaps = [result.train_info.points[0].students[result.train_info.score] for result in found]
    return sum(swaps) / len(swaps)


def _held(found: list[results.Result]) -> str:
    """Say what share of the teacher's score the students hold at the end, by the run that holds most."""
    score = found[0].train_info.score
    best = max(found, key=lambda run: run.train_info.final[score])
    share = best.train_info.final[score] / best.train_info.teacher[score]
    return f"With {best.run_info.label}, the students alone hold {share:.1%} of the teacher's {score}."


def show_summary(summary: Summary, console: Console) -> None:
    """Print a table for every group, then the findings."""
    for group in summary.groups:
        setting = "" if group.name == "all" else f"{group.name}: "
        title = f"{setting}students alone; teacher {summary.score_format.value(group.teacher)}"
        table = Table(title=title, box=box.SIMPLE_HEAD)
        chosen = [column for column in columns(group, summary.score_format) if column.key in SHOWN]
        table.add_column("Method", no_wrap=True)
        for column in chosen:
            table.add_column(column.heading, justify="right")
        for method in group.methods:
            table.add_row(method.label, *(_unbroken(column.cell(method).text) for column in chosen))
        console.print(table)
    for finding in overview(summary):
        console.print(f"- {finding}", soft_wrap=True)


def _unbroken(text: str) -> str:
    """Keep a number, its interval and its unit on one line."""
    return text.replace(" ", "\u00a0")

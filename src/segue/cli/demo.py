"""The demo: the paper's seven methods on embedded digits, in minutes.

Command: segue demo (or `make demo`); about three minutes on two cores, two runs at a time, one seed.
Expected: the plain swap drops the accuracy to chance, every method recovers most of it, and one seed decides nothing.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from segue.cli import results as terminal
from segue.lab import presets as scales
from segue.lab import variants
from segue.lab.config import Run
from segue.lab.grid import Experiment, run_grid
from segue.lab.report.page import build
from segue.lab.report.summary import summarize
from segue.reporting import records as results
from segue.reporting.formatting import duration


def runs(seeds: int = 1, steps: int = 320, teacher_steps: int = 500, depth: int = 6) -> list[Run]:
    """Return the paper's methods at the demo's scale."""
    scale = scales.demo(steps=steps, teacher_steps=teacher_steps, depth=depth)
    return [scale.run(variant, seed=seed) for seed in range(seeds) for variant in variants.PAPER]


def show(out: Path, console: Console, *, options: dict[str, Any], workers: int) -> int:
    """Carry out the demo, print its table and where the report lies; return the exit code."""
    begun = time.monotonic()
    failed = [outcome for outcome in run_grid(Experiment(__name__, options), out, workers=workers) if not outcome.ok]
    for outcome in failed:
        console.print(f"failed: {outcome.name}\n{outcome.why}", markup=False)
    if failed:
        return 1
    page = build(out, title="Segue's demo")
    found = results.read_all(out)
    terminal.show(summarize(found), console)
    console.print(f"- Swapped without training, the students' {found[0].train_info.score} is {_swapped(found):.3f}.")
    console.print(f"\n{duration(time.monotonic() - begun)} in all. The report, with figures:\n{page}", soft_wrap=True)
    return 0


def _swapped(found: list[results.Result]) -> float:
    """Return the mean score right after the plain swap."""
    swaps = [result.train_info.points[0].students[result.train_info.score] for result in found]
    return sum(swaps) / len(swaps)

"""Run the cells of an entry in a process of its own: one that hangs or dies takes only its cell with it."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.helpers.processes import FreshProcess
from tests.matrix.cells import CRASHED, STUDENTS, Trials
from tests.matrix.entries import all_entries
from tests.matrix.record import Running

PATIENCE = 60  # seconds for a cell
STARTING = threading.Lock()  # two threads would change the environment of the processes' origin at once


class OutOfTime(BaseException):
    """Not an Exception, so that no code takes it for its own."""


def run_entry(entry: str, students: list[str], running: Running, cells: Callable[..., None] | None = None) -> str:
    """Run the cells of an entry, each recorded at once, and return what they came to in one line."""
    begun, left = time.time(), list(students)
    while left:
        log = running.path.parent / "logs" / entry.replace(" ", "-").replace("/", "-")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        with STARTING:
            child = FreshProcess(cells or run_cells, entry, left, running.path, log=log)
        child.process.join(timeout=30 + 2 * PATIENCE * len(left))
        if child.process.exitcode is None:
            child.process.kill()
            child.process.join()
        done = {cell["student"] for cell in running.read()[1] if cell["entry"] == entry}
        left = [name for name in left if name not in done]
        if left:  # the process ended in this cell
            lines = child.error.strip().splitlines()
            said = f"the process ended with {child.process.exitcode}. {lines[-1] if lines else ''}"
            running.add({"entry": entry, "student": left.pop(0), "outcome": CRASHED, "stage": "process", "detail": said})
    found = Counter(cell["outcome"] for cell in running.read()[1] if cell["entry"] == entry)
    return f"{time.time() - begun:6.1f}s {entry:45} " + ", ".join(f"{count} {name}" for name, count in found.items())


def run_cells(entry: str, students: list[str], path: Path) -> None:
    """Run cells in this process, and record each."""
    quiet()
    trials, running = Trials(all_entries()[entry]), Running(path)
    for student in STUDENTS:
        if student.name in students:
            running.add({"entry": entry, "student": student.name, **timed(trials, student)})


def timed(trials: Trials, student: Any) -> dict[str, Any]:
    """Run one cell for as long as a cell may take."""
    begun = time.time()
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(PATIENCE)
    try:
        found = trials.run(student)
    except OutOfTime:
        found = {"outcome": CRASHED, "stage": trials.stage, "detail": f"no end after {PATIENCE} seconds"}
    finally:
        signal.alarm(0)
    return {**found, "seconds": round(time.time() - begun, 2)}


def quiet() -> None:
    """Leave out what packages print; and torch's fast path, whose last bits are others."""
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.backends.mha.set_fastpath_enabled(False)


def _out_of_time(*_: Any) -> None:
    raise OutOfTime

"""Kill trainings, grids and conversions at random, resume them, and compare with undisturbed ones bit for bit."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from segue.checkpoint import folders
from segue.cli import main
from segue.training.tasks import Classification
from tests.convert import small_models
from tests.helpers.processes import ROOT
from tests.lab import test_grid
from tests.torture import traps
from tests.torture.campaign import HUNG, LOST, SILENT, Attempt, Bench, Outcome, one_line
from tests.torture.traps import SIGNALS, WORKER, Facts
from tests.training import fit_cases

LIMIT = 240.0  # seconds, for what hangs
LEFT_BY = {"SIGKILL": (-9,), "SIGTERM": (-15, 143), "SIGINT": (-2, 130, 1), "operation": (-9,), "bytes": (-25,), WORKER: (1,)}


@dataclass(frozen=True)
class Work:
    """Something that can be killed, started again and compared."""

    name: str
    target: Callable[..., Any]  # target(folder, *args), in a fresh process
    args: tuple[Any, ...]
    compare: Callable[[Path, Path], None]  # (a finished folder, an undisturbed one)
    most_kills: int = 4
    hows: tuple[str, ...] = (*SIGNALS, "operation", "operation", "bytes")
    before: Callable[[Path], Any] = lambda folder: None  # a fact about a folder that was left, for `resumed`
    resumed: Callable[[Path, Any], str] = lambda folder, fact: ""  # what is wrong with how it resumed
    after_kill: Callable[[Path], None] = lambda folder: None


def undisturbed(work: Work, bench: Bench) -> tuple[Path, Facts]:
    """Return the folder of an undisturbed run and its facts, made once."""
    folder = bench.kept / work.name
    if not folder.with_name(f"{folder.name}.facts").exists():
        process = traps.begin(work.target, folder, *work.args, trap=None, log=bench.kept / "log")
        code = traps.finish(process, None, LIMIT)
        assert code == 0, f"{code} {process.error}"
    return folder, traps.facts(folder)


def attempts_of(works: list[Work], bench: Bench) -> Iterator[Attempt]:
    """Yield attempts to kill one of these."""
    for chance in bench.chances():
        yield _attempt(chance.choice(works), bench, chance)


def _attempt(work: Work, bench: Bench, chance: random.Random) -> Attempt:
    kills = chance.randint(1, work.most_kills)
    return Attempt(f"{work.name}, {kills} kills", lambda place: kill_and_resume(work, bench, place / "run", kills, chance))


def kill_and_resume(work: Work, bench: Bench, folder: Path, kills: int, chance: random.Random) -> Outcome:
    """Kill a run so many times unless it ends before, let it end, and compare it with an undisturbed one."""
    reference, facts = undisturbed(work, bench)
    log, done = folder.with_name("log"), []
    for number in range(kills + 1):
        trap = facts.trap(chance, work.hows) if number < kills else None
        case = ", then ".join([work.name, *map(str, done)])
        known = work.before(folder)
        process = traps.begin(work.target, folder, *work.args, trap=trap, log=log)
        code = traps.finish(process, trap, LIMIT)
        work.after_kill(folder)
        if code is None:
            return Outcome(f"{case}, {trap}", HUNG, "the process does not end")
        if code == 0:
            try:
                work.compare(folder, reference)
            except (AssertionError, OSError, ValueError, LookupError) as error:
                return Outcome(case, LOST, f"it ends otherwise than undisturbed: {one_line(error)}")
            return Outcome(case, *((LOST, why) if (why := work.resumed(folder, known)) else ()))
        if trap is None:
            return Outcome(case, LOST, f"it does not resume ({code}): {last_line(process.error)}")
        if code not in LEFT_BY[trap.how] or (code == 1 and trap.how == "SIGINT" and "KeyboardInterrupt" not in process.error):
            return Outcome(f"{case}, {trap}", SILENT, f"it ended with {code}: {last_line(process.error)}")
        done.append(trap)
    raise AssertionError("the last run has no trap")


def last_line(text: str) -> str:
    """Return what an error says of itself: the text of a traceback from the line that names it."""
    lines = text.strip().splitlines()
    named = [index for index, line in enumerate(lines) if line[:1].isalpha() and not line.startswith("Traceback")]
    return one_line(" ".join(lines[named[-1] :])) if named else one_line(text)


# Trainings


class Counted(Classification):
    """A loss that counts its calls, and so the steps of a run."""

    calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        type(self).calls += 1
        return super().__call__(model, batch)


def train(folder: Path, name: str) -> None:
    """Train a case, or resume it, and write where it began."""
    Counted.calls = 0
    torch.manual_seed(99)  # whatever was drawn before must not matter
    fit_cases.train(name, folder, loss=Counted(label_smoothing=0.1))
    begun = fit_cases.TOTAL - Counted.calls // fit_cases.CASES[name]["recipe"].accumulate
    (folder / "begun").write_text(str(begun))


def steps_left(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints that a run has left, that which `latest` names first."""
    place = folder / "checkpoints"
    found = {path.name: int(path.name.partition("-")[0]) for path in folders.checkpoints(place) if not folders.damage(path)}
    named = (place / "latest").read_text() if (place / "latest").exists() else ""
    return [step for name, step in sorted(found.items(), key=lambda item: (item[0] != named, -item[1]))]


def resumed_where(folder: Path, left: list[int]) -> str:
    begun = int((folder / "begun").read_text())
    expected = left[0] if left else 0
    return "" if begun >= expected else f"it resumed at step {begun} although checkpoints of steps {left} are complete"


TRAININGS = {
    name: Work(f"fit {name}", train, (name,), fit_cases.assert_alike, before=steps_left, resumed=resumed_where)
    for name in fit_cases.CASES
}


def trainings(bench: Bench) -> Iterator[Attempt]:
    return attempts_of(list(TRAININGS.values()), bench)


# Grids


GRID = """
from tests.helpers.tiny_runs import config


def runs():
    return [config("dcr_dfg"), config("theseus", seed=1)]
"""


def command(*arguments: Any) -> None:
    """Be the command: signals and exit codes are its own."""
    sys.argv = ["segue", *map(str, arguments)]
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        main()
    except SystemExit as left:
        if left.code:
            raise


def run_grid(folder: Path, place: str) -> None:
    """Train a grid in worker processes."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command("grid", place, "--out", folder, "--workers", 2)


def compare_grids(folder: Path, reference: Path) -> None:
    names = sorted(path.parent.name for path in reference.glob("*/result.json"))
    assert len(names) == 2
    for name in names:
        assert test_grid.numbers(folder, name) == test_grid.numbers(reference, name), name


def wait_for_workers(folder: Path) -> None:
    """Wait until the workers of a killed grid have saved and gone: they notice within a second."""
    end = time.monotonic() + LIMIT
    while (left := workers_of(folder)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left, f"workers are left: {left}"


def workers_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = process.cmdline()
            if "segue.lab.grid" in line and str(folder) in line:
                found.append(process)
    return found


def grids(bench: Bench) -> Iterator[Attempt]:
    place = bench.kept / "runs.py"
    place.write_text(GRID)
    hows = ("SIGKILL", "SIGTERM", "SIGINT", "operation", WORKER, WORKER)
    return attempts_of([Work("grid", run_grid, (str(place),), compare_grids, 2, hows, after_kill=wait_for_workers)], bench)


# Conversions


def convert(folder: Path, base: str, texts: str) -> None:
    command("convert", base, *small_models.options("llama", texts, folder, student=small_models.STUDENT, steps=6))


def compare_conversions(folder: Path, reference: Path) -> None:
    small_models.assert_same_conversion(folder, reference)
    assert not (folder / ".unfinished").exists()
    assert json.loads((folder / "manifest.json").read_text())["files"].keys() == small_models.manifest.listed(reference).keys()


def conversions(bench: Bench) -> Iterator[Attempt]:
    base, texts = bench.kept / "base", bench.kept / "text.txt"
    if not base.exists():
        small_models.save("llama", base)
        texts.write_text(small_models.text())
    return attempts_of([Work("convert", convert, (str(base), str(texts)), compare_conversions, 2)], bench)

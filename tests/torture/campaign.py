"""A campaign: parts that attack Segue, each for its share of the time, and one record of what became of every attempt.

Each part runs in a process of its own, two at a time. One that hangs or dies takes only its attempt with it: the attempt is
recorded as hung, or as ended without a reason, and the part continues with the next one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from tests.helpers.processes import ROOT

RIGHT = "right"  # refused in three lines, read with the identical result, resumed bit for bit
ACCEPTED = "accepted wrongly"
LOST = "lost"
CHANGED = "changed although it failed"
HUNG = "hung"
FOREIGN = "foreign error"
SILENT = "without a reason"
VERDICTS = (RIGHT, ACCEPTED, LOST, CHANGED, HUNG, FOREIGN, SILENT)
AT_ONCE = 2  # parts
PATIENCE = 300.0  # seconds without an outcome, after which an attempt counts as hung


@dataclass(frozen=True)
class Outcome:
    """What became of one attempt."""

    case: str  # what was tried
    verdict: str = RIGHT
    detail: str = ""


@dataclass(frozen=True)
class Attempt:
    """Something to try in an empty folder."""

    case: str
    run: Callable[[Path], Outcome | Iterable[Outcome]]


@dataclass(frozen=True)
class Bench:
    """Where a part works, from which attempt on, and for how long."""

    part: str
    place: Path
    seed: int
    seconds: float
    begin: int = 0

    def chances(self) -> Iterator[random.Random]:
        """Yield the randomness of every attempt, which depends on the seed and its number alone."""
        for index in count(self.begin):
            yield random.Random(f"{self.seed} {self.part} {index}")

    @property
    def kept(self) -> Path:
        """A folder for what all attempts share."""
        folder = self.place / "kept"
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@dataclass(frozen=True)
class Part:
    """One row of the table."""

    name: str
    share: float  # of the time
    entry: str  # module:function; imported by the process that runs it alone
    about: str  # what is tried and what counts as right, for the page

    def attempts(self, bench: Bench) -> Iterator[Attempt]:
        """Yield what this part tries."""
        module, _, function = self.entry.partition(":")
        found: Iterator[Attempt] = getattr(import_module(f"tests.torture.{module}"), function)(bench)
        return found


class Record:
    """One line of JSON for every outcome; several processes append to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, part: str, outcome: Outcome) -> None:
        line = json.dumps({"part": part, **asdict(outcome)}) + "\n"
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())

    def read(self) -> list[dict[str, Any]]:
        """Return every outcome; a kill may have cut the last line."""
        found = []
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found


def run_part(part: Part, bench: Bench, record: Record) -> None:
    """Attack until the time is over, once at least."""
    end = time.monotonic() + bench.seconds
    now, folder = bench.place / "now", bench.place / "attempt"
    for index, attempt in enumerate(part.attempts(bench), bench.begin):
        if index > bench.begin and time.monotonic() > end:
            break
        now.write_text(json.dumps([index, attempt.case]), encoding="utf-8")
        clear(folder)
        folder.mkdir(parents=True)
        try:
            outcome = attempt.run(folder)
            outcomes = [outcome] if isinstance(outcome, Outcome) else list(outcome)
        except Exception as error:  # of the judge, which must not hide what it was about to find
            print(traceback.format_exc(), file=sys.stderr)
            outcomes = [Outcome(attempt.case, SILENT, f"the campaign itself failed: {one_line(error)}")]
        for outcome in outcomes:
            record.add(part.name, outcome)
    clear(folder)
    now.unlink(missing_ok=True)


def run(parts: list[Part], folder: Path, *, seed: int, minutes: float) -> list[dict[str, Any]]:
    """Run every part in a process of its own, and return all outcomes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    record = Record(folder / "record.jsonl")
    shares = sum(part.share for part in parts)

    def work(part: Part) -> None:
        place = folder / part.name.replace(" ", "-")
        place.mkdir()
        _supervise(part, Bench(part.name, place, seed, 60 * minutes * AT_ONCE * part.share / shares), record)

    with ThreadPoolExecutor(AT_ONCE) as lanes:
        list(lanes.map(work, sorted(parts, key=lambda part: -part.share)))  # the longest first
    return record.read()


def _supervise(part: Part, bench: Bench, record: Record) -> None:
    """Run a part to the end of its time, and start it again behind an attempt that hangs or kills it."""
    end = time.monotonic() + bench.seconds
    begin, now = 0, bench.place / "now"
    while begin == 0 or time.monotonic() < end:
        command = _command(part, bench, begin, max(1.0, end - time.monotonic()))
        with (bench.place / "log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            hangs = _watch(process, now)
        if hangs:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        if code == 0:
            return
        index, case = json.loads(now.read_text(encoding="utf-8")) if now.exists() else (begin, "to begin")
        last = (bench.place / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        verdict = HUNG if hangs else SILENT
        record.add(part.name, Outcome(case, verdict, f"the process ended with {code}: {' '.join(last)[:160]}"))
        now.unlink(missing_ok=True)
        begin = index + 1


def _command(part: Part, bench: Bench, begin: int, seconds: float) -> list[str]:
    settings = {"part": part.name, "out": bench.place.parent, "seed": bench.seed, "begin": begin, "seconds": seconds}
    return [sys.executable, "-m", "tests.torture", *(f"--{name}={value}" for name, value in settings.items())]


def _watch(process: subprocess.Popen[bytes], now: Path) -> bool:
    """Wait for a part; return whether one of its attempts hangs."""
    begun = time.time()
    while process.poll() is None:
        time.sleep(0.2)
        with suppress(FileNotFoundError):
            begun = max(begun, now.stat().st_mtime)
        if time.time() - begun > PATIENCE:
            return True
    return False


def clear(folder: Path) -> None:
    """Remove a folder whatever stands in it."""
    shutil.rmtree(folder, ignore_errors=True)


def one_line(error: BaseException | str) -> str:
    """Shorten an error to one line."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:240]


def is_three_lines(error: BaseException) -> bool:
    """Tell whether an error says what is wrong, what was found, and what to do."""
    lines = str(error).splitlines()
    return len(lines) == 3 and lines[2].startswith("  Hint: ")

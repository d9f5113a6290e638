"""A full disk: a small tmpfs where mounting is permitted, ENOSPC from writes and fsync otherwise.

All of an attempt is in one fresh process with a mount namespace of its own, so that nothing of it is left, whatever happens.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from segue.checkpoint import folders
from segue.errors import SegueError
from tests.helpers.processes import FreshProcess
from tests.torture import kills, traps
from tests.torture.campaign import FOREIGN, HUNG, LOST, SILENT, Attempt, Bench, Outcome, is_three_lines, one_line
from tests.torture.kills import last_line, undisturbed
from tests.training import fit_cases

LIMIT = 120.0
NEW_NAMESPACE = 0x00020000  # CLONE_NEWNS
NAMES = ("dcr_dfg", "theseus", "everything trains", "a plain model", "accumulated")
WAYS = ("tmpfs", "tmpfs", "write", "fsync", "open")
CALLS = {"write": 60, "fsync": 30, "open": 30}  # about as many as a training makes
PLENTY = 64 << 20
OURS = "model.txt"  # which the case writes, not fit


def mount(place: Path, size: int) -> bool:
    """Mount a tmpfs of so many bytes that only this process sees; return whether that is permitted."""
    place.mkdir(parents=True, exist_ok=True)
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NAMESPACE) != 0:
        return False
    commands = (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)])
    return all(subprocess.run(command, capture_output=True).returncode == 0 for command in commands)


class Full:
    """Let a write, an fsync or the opening of a file fail for lack of space, from a certain one on."""

    def __init__(self, folder: Path, way: str, number: int) -> None:
        self.folder, self.way, self.left, self.full = str(folder), way, number, True
        self.open, self.fsync = io.open, os.fsync
        io.open, os.fsync = self._open, self._fsync  # Path.open and Path.write_text look it up there

    def check(self, way: str) -> None:
        if self.full and way == self.way:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = not set("wax+").isdisjoint(mode) and self.folder in str(file) and not str(file).endswith(OURS)
        if writes:
            self.check("open")
        made = self.open(file, mode, *args, **kwargs)
        return _FullFile(made, lambda: self.check("write")) if writes and self.way == "write" else made

    def _fsync(self, handle: int) -> None:
        self.check("fsync")
        self.fsync(handle)


class _FullFile:
    """A file whose writes may fail after half of what they are given."""

    def __init__(self, file: Any, check: Callable[[], None]) -> None:
        self._file, self._check = file, check

    def write(self, data: Any) -> int:
        try:
            self._check()
        except OSError:
            self._file.write(data[: len(data) // 2])
            raise
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _FullFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()


def steps_left(folder: Path) -> list[int]:
    place = folder / "checkpoints"
    return sorted(int(path.name.partition("-")[0]) for path in folders.checkpoints(place) if not folders.damage(path))


def fill_and_resume(folder: Path, name: str, way: str, number: int, report: Path) -> None:
    """Train until the disk is full, look at what is left, make space, and train to the end."""
    disk, found = folder.parent / "disk", {"way": way, "error": "", "kind": "", "left": [], "seen": []}
    place, full = disk / "run", None
    if way == "tmpfs" and not mount(disk, number):
        found["way"], way, number = "write, because mounting is not permitted", "write", number % 40
    if way != "tmpfs":
        disk.mkdir(exist_ok=True)
        full = Full(place, way, number)

    class Seen(kills.Counted):
        """A loss that notes which checkpoints there are."""

        def __call__(self, model: Any, batch: Any) -> Any:
            found["seen"] = steps_left(place) or found["seen"]
            return super().__call__(model, batch)

    try:
        fit_cases.train(name, place, loss=Seen(label_smoothing=0.1))
    except Exception as error:
        kind = "segue" if isinstance(error, SegueError) else "foreign"
        found |= {"error": one_line(error), "kind": kind if kind == "foreign" or is_three_lines(error) else "lines"}
    found["left"] = steps_left(place)
    report.write_text(json.dumps(found))
    if full is not None:
        full.full = False
    else:
        subprocess.run(["mount", "-o", f"remount,size={PLENTY}", str(disk)], check=True)
    fit_cases.train(name, place)
    shutil.copytree(place, folder)


def attempt(name: str, way: str, bench: Bench, place: Path, chance: random.Random) -> Outcome:
    reference, _ = undisturbed(kills.TRAININGS[name], bench)
    size = sum(path.stat().st_size for path in reference.rglob("*") if path.is_file())
    number = int(size * chance.uniform(0.05, 1.6)) if way == "tmpfs" else chance.randrange(CALLS[way])
    folder, report = place / "run", place / "report"
    process = FreshProcess(fill_and_resume, folder, name, way, number, report, log=place / "log")
    code = traps.finish(process, None, LIMIT)
    case = f"fit {name}, {way} {number}"
    if code is None:
        return Outcome(case, HUNG, "the process does not end")
    if not report.exists():
        return Outcome(case, SILENT, f"it ended with {code}: {last_line(process.error)}")
    found = json.loads(report.read_text())
    case = f"fit {name}, {found['way']} {number}"
    if found["seen"] and max(found["left"], default=0) < max(found["seen"]):
        return Outcome(case, LOST, f"checkpoints of steps {found['seen']} were there, {found['left']} are left")
    if code != 0:
        return Outcome(case, LOST, f"it does not resume: {last_line(process.error)}")
    try:
        fit_cases.assert_alike(folder, reference)
    except AssertionError as error:
        return Outcome(case, LOST, f"it ends otherwise than undisturbed: {one_line(error)}")
    if found["kind"] in ("foreign", "lines"):
        return Outcome(case, FOREIGN, found["error"])
    return Outcome(case)


def attempts(bench: Bench) -> Iterator[Attempt]:
    for chance in bench.chances():
        name, way = chance.choice(NAMES), chance.choice(WAYS)
        yield Attempt(f"fit {name}, {way}", lambda place, n=name, w=way, c=chance: attempt(n, w, bench, place, c))

"""Ways to die: at a moment, at a file operation, in the middle of a write. The trap is set in the process that dies."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.processes import FreshProcess

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
WORKER = "SIGKILL of a worker"


@dataclass(frozen=True)
class Trap:
    """How a process dies: by a signal after some seconds, or by kill -9 before a file operation or within a write."""

    how: str  # a signal, to it or to a process that it has started, "operation" or "bytes"
    number: float

    def __str__(self) -> str:
        at = f"{self.number:.0f}" if self.how in ("operation", "bytes") else f"{self.number:.2f} s"
        return f"{self.how} {at}"


@dataclass(frozen=True)
class Facts:
    """What an undisturbed process took, so that traps are set inside it."""

    seconds: float
    operations: int  # on files of its folder
    largest: int  # bytes of a file

    def trap(self, chance: random.Random, hows: tuple[str, ...] = (*SIGNALS, "operation", "bytes")) -> Trap:
        how = chance.choice(hows)
        if how == "operation":
            return Trap(how, chance.randrange(max(1, self.operations)))
        if how == "bytes":
            return Trap(how, int(self.largest * chance.random() ** 2))  # small files too
        return Trap(how, self.seconds * chance.random())


def begin(target: Callable[..., Any], folder: Path, *args: Any, trap: Trap | None, log: Path) -> FreshProcess:
    """Start target(folder, *args) in a fresh process with a trap; without one, it leaves its facts."""
    log.unlink(missing_ok=True)
    return FreshProcess(_enter, target, folder, args, trap, log=log)


def finish(process: FreshProcess, trap: Trap | None, limit: float) -> int | None:
    """Send the signal of a trap, wait, and return the exit code; None if it does not end."""
    if trap is not None and trap.how in (*SIGNALS, WORKER):
        while not process.entered and process.process.exitcode is None:
            time.sleep(0.001)  # a signal before that meets Python's own start, which says nothing
        process.process.join(timeout=trap.number)
        with suppress(ProcessLookupError, psutil.Error):
            if trap.how == WORKER:
                [worker.kill() for worker in psutil.Process(process.pid).children()[:1]]
            elif process.process.exitcode is None:
                os.kill(process.pid, getattr(signal, trap.how))
    process.process.join(timeout=limit)
    if process.process.exitcode is None:
        process.process.kill()
        process.process.join()
        return None
    return process.process.exitcode


def facts(folder: Path) -> Facts:
    """Read what an undisturbed process has left."""
    return Facts(**json.loads(_facts_of(folder).read_text()))


def _facts_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.facts")


def _enter(target: Callable[..., Any], folder: Path, args: tuple[Any, ...], trap: Trap | None) -> None:
    begun = time.monotonic()
    if trap is not None and trap.how == "bytes":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the system kills the process inside the write
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(trap.number), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    operations = _count(folder, int(trap.number) if trap is not None and trap.how == "operation" else None)
    target(folder, *args)
    if trap is None:
        largest = max((path.stat().st_size for path in folder.rglob("*") if path.is_file()), default=1)
        found = {"seconds": time.monotonic() - begun, "operations": operations[0], "largest": largest}
        own = _facts_of(folder).with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(found))
        own.replace(_facts_of(folder))  # at once: two processes may end together


def _count(folder: Path, deadly: int | None) -> list[int]:
    """Count the operations on files of a folder, and die before a certain one."""
    counted = [0]

    def operation() -> None:
        if counted[0] == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        counted[0] += 1

    def hear(event: str, args: tuple[Any, ...]) -> None:
        opened = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if (opened or event in CHANGES) and str(folder) in str(args[0]):
            operation()

    def synced(handle: int, fsync: Callable[[int], None] = os.fsync) -> None:
        operation()
        fsync(handle)

    sys.addaudithook(hear)
    os.fsync = synced
    return counted

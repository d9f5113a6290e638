"""What a call does besides returning: how long it takes, what it executes, what it writes outside of a folder."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXECUTES = (
    "socket.connect",
    "socket.getaddrinfo",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "pickle.find_class",
)
WRITES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "shutil.rmtree")
FOLDER_ARGUMENT = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.rename": 2}  # the place of dir_fd
_seen: list[list[str]] = []  # of those who watch now
_inside: list[str] = []
_hooked: list[bool] = []


class HungError(BaseException):
    """A call takes too long; no exception that code catches."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Stop what takes too long."""

    def stop(*_: Any) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """List what is executed, and what is written outside of a folder."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_hear)  # for good: a process cannot take it back
    seen: list[str] = []
    _seen.append(seen)
    _inside.append(str(folder))
    try:
        yield seen
    finally:
        _seen.pop()
        _inside.pop()


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if not _seen:
        return
    if event in EXECUTES:
        _seen[-1].append(f"{event} {args!r:.120}")
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    if (writes or event in WRITES) and isinstance(args[0], str | bytes | os.PathLike):
        path = os.path.realpath(
            _absolute(os.fsdecode(args[0]), args[FOLDER_ARGUMENT[event]] if event in FOLDER_ARGUMENT else -1)
        )
        if not path.startswith((os.path.realpath(_inside[-1]), "/dev/")) and "__pycache__" not in path:
            _seen[-1].append(f"{event} {path}")


def _absolute(path: str, folder: int) -> str:
    """Return a path that may be relative to an open folder."""
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path) if folder >= 0 and not os.path.isabs(path) else path


class Bomb:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = str(sentinel)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.sentinel,)


def bomb(sentinel: Path) -> bytes:
    """Return a pickle that leaves a mark when it is executed."""
    return pickle.dumps(Bomb(sentinel))

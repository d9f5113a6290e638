"""One process at a time in a folder: a lock that ends with its process, and whose file says who holds it."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

from segue.checkpoint.ranks import on_rank_0
from segue.core import files
from segue.errors import CheckpointError, printable

FILE = ".lock"
_owners: dict[Path, tuple[int, int]] = {}  # the process (a fork has its own) and the thread that hold a lock


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a folder in a `with` block; refuse, or wait, while another process or thread holds it.

    Whoever holds it may enter again: a run holds the folder in which its fit() trains, and fit() the one it saves to.
    """
    from filelock import FileLock, Timeout  # comes with torch; imported late, so that `import segue` stays quick

    try:
        made = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a file, or no permission
        raise _not_locked(folder, error) from None
    path, me = folder.resolve() / FILE, (os.getpid(), threading.get_ident())
    if _owners.get(path) == me:
        yield
        return
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not wait:
            raise CheckpointError(
                f"{folder} is in use by another process.",
                f"{_holder(path)} holds its lock.",
                "wait until it ends, stop it, or give another folder. Nothing was changed.",
            ) from None
        print(printable(f"{folder}: waiting for {_holder(path)}"), file=sys.stderr, flush=True)
        lock.acquire(poll_interval=0.2)
    except OSError as error:
        raise _not_locked(folder, error) from None
    _owners[path] = me
    try:
        with suppress(OSError):  # a full disk: the lock holds without a name in it
            path.write_text(_about_me(), encoding="utf-8")
        yield
    finally:
        with suppress(OSError):  # a full disk, a deleted folder
            path.write_text("", encoding="utf-8")
        with suppress(OSError):
            if made and [place.name for place in folder.iterdir()] == [FILE]:  # nothing came of it: the folder goes again
                path.unlink()
                for place in made:
                    place.rmdir()
        del _owners[path]
        lock.release()


@contextmanager
def locked_on_rank_0(folder: Path | None, *, wait: bool = False) -> Iterator[None]:
    """Hold a folder for all processes that were launched together; if it is refused, it is refused in all of them."""
    with ExitStack() as stack:
        if folder is not None:
            on_rank_0(lambda: stack.enter_context(locked(folder, wait=wait)), f"{folder} is not available.")
        yield


def _not_locked(folder: Path, error: OSError) -> CheckpointError:
    todo = f"make it writable, or give another folder; {FILE} may be deleted."
    return CheckpointError(f"{folder} cannot be locked.", f"{error}.", todo)


def _about_me() -> str:
    since = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"process {os.getpid()} on {platform.node()}, since {since}: {' '.join(sys.argv)[:200]}"


def _holder(path: Path) -> str:
    """Say who holds a lock, as far as its file is readable."""
    try:
        said = files.content(path, 4096).decode("utf-8", "replace").strip()
    except OSError:
        said = ""
    return said or "another process"

"""One process at a time in a folder; the lock goes with the process, however it dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no lock, so start a grid there only once
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file at a path, waiting for it as long as another process does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        while fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.2)  # not a blocking call, so that a signal gets through
        yield

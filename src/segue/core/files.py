"""Files that are safe to read: regular ones below a stated size, opened without waiting; and why one cannot be written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from segue.errors import CheckpointError, SegueError

LARGEST_TEXT = 256 << 20  # bytes of a JSON file; the random states of 10,000 ranks are 140 MB


def opened(path: Path) -> BinaryIO:
    """Open a regular file for reading; a FIFO or a device, which may never answer, is refused at once."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path.name} is not a regular file")
    return os.fdopen(handle, "rb")


def content(path: Path, most: int = LARGEST_TEXT) -> bytes:
    """Read a regular file of at most this many bytes."""
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(f"{path.name} has more than {most:,} bytes")
        return file.read(most)


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Say what could not be written, and why: the system's own error often names no file."""
    try:
        yield
    except SegueError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{place} cannot be written.",
            f"{error.strerror or error}.",
            "make space, or the folder writable, then resume: what was complete before is still there.",
        ) from error

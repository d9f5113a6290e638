"""Files that are safe to read: regular ones below a stated size, opened without waiting."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

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

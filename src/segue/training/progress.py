"""A progress line: it renews itself in a terminal, and comes as few whole lines in a log file."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 20
LINES_IN_A_LOG = 10


class Progress:
    """Say how far a piece of work is, what it shows, and how long it will still take.

    >>> say = Progress("teacher", total=2, out=sys.stdout)
    >>> say(2, "loss 0.31")
    teacher [####################] 100%  loss 0.31
    """

    def __init__(self, name: str, total: int, *, done: int = 0, out: TextIO | None = None) -> None:
        self.name = name
        self.total = total
        self.out = sys.stderr if out is None else out
        self.terminal = self.out.isatty()
        self.begun = time.monotonic()
        self.at_begin = done
        self.written = 0.0  # when, in a terminal; how many lines, in a log
        self.longest = 0

    def __call__(self, done: int, text: str = "") -> None:
        """Show what is done so far."""
        finished = done >= self.total
        if self.terminal:
            now = time.monotonic()
            if not finished and now - self.written < 0.1:
                return
            self.written = now
            line = self._line(done, text)
            self.longest = max(self.longest, len(line))
            print(f"\r{line:<{self.longest}}", end="\n" if finished else "", file=self.out, flush=True)
        elif finished or done * LINES_IN_A_LOG // self.total > self.written:
            self.written = done * LINES_IN_A_LOG // self.total
            print(self._line(done, text), file=self.out, flush=True)

    def _line(self, done: int, text: str) -> str:
        share = min(1.0, done / max(1, self.total))
        bar = "#" * round(WIDTH * share) + "." * (WIDTH - round(WIDTH * share))
        left = self._left(done)
        return f"{self.name} [{bar}] {share:4.0%}  {text}{f'  {left} left' if left else ''}".rstrip()

    def _left(self, done: int) -> str:
        fresh = done - self.at_begin
        if fresh <= 0 or done >= self.total:
            return ""
        return duration((time.monotonic() - self.begun) / fresh * (self.total - done))


def duration(seconds: float) -> str:
    """Write a time as people say it.

    >>> duration(75), duration(8000)
    ('1 min 15 s', '2 h 13 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"

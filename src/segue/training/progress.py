"""Progress: a tqdm bar in a terminal or a notebook, a few complete lines in a log file."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any, TextIO

from segue.errors import printable

LINES_IN_A_LOG = 10
RECENT = 20  # updates whose pace the time left follows: the parts of a run are not equally fast
COLUMNS = 80  # of a terminal that does not say how many it has: a longer line would not be rewritten but added
RIGHT = "{n_fmt}/{total_fmt} [{elapsed}<LEFT, {rate_fmt}{postfix}]"


class Progress:
    """Show how much of a piece of work is done; without a name, show nothing.

    >>> progress = Progress("reading", total=2, out=sys.stdout)
    >>> progress(2, "loss 0.31")  # doctest: +ELLIPSIS
    reading: 100% 2/2 [00:00<00:00, ...it/s, loss 0.31]
    """

    def __init__(
        self,
        name: str | None,
        total: int,
        *,
        done: int = 0,
        pauses: int = 0,
        costs: Sequence[float] | None = None,
        out: TextIO | None = None,
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tqdm's own, in a notebook without ipywidgets: there the bar is one line of text
            from tqdm.auto import tqdm  # type: ignore[import-untyped]  # imported late: the core does without it

        self.name, self.total, self.initial = name and printable(name), total, done
        self.out = sys.stderr if out is None else out
        notebook = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)
        rewrites = notebook or self.out.isatty() or type(self.out).__module__.startswith("ipykernel")
        self.terminal = name is not None and rewrites
        width = {"dynamic_ncols": True} if notebook or _columns(self.out) else {"ncols": COLUMNS}
        self.bar: Any = tqdm(desc=self.name, total=total, initial=done, file=self.out, disable=not self.terminal, **width)
        self.begun = time.monotonic()
        self.lines = 0
        self.pauses = pauses  # to come
        self.paused_for: list[float] = []  # seconds
        self.work = list(
            accumulate(costs or [1.0] * total, initial=0.0)
        )  # after each piece, in units of which only ratios count
        self.recent = deque([(0.0, done)], maxlen=RECENT + 1)  # seconds of work, and what was done by then

    def __call__(self, done: int, text: str = "") -> None:
        """Show what is done so far."""
        text, elapsed = printable(text), time.monotonic() - self.begun
        self.recent.append((elapsed - sum(self.paused_for), done))
        right = RIGHT.replace("LEFT", self.bar.format_interval(self.seconds_left))
        if self.terminal:
            self.bar.bar_format = "{l_bar}{bar}| " + right
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(done - self.bar.n)
        elif self.name is not None and (done >= self.total or done * LINES_IN_A_LOG // self.total > self.lines):
            self.lines = done * LINES_IN_A_LOG // self.total
            settings = {"prefix": self.name, "postfix": text, "initial": self.initial}
            settings |= {"bar_format": "{desc}: {percentage:3.0f}% " + right, "rate": 1 / self.pace if self.pace else None}
            print(self.bar.format_meter(done, self.total, elapsed, **settings), file=self.out, flush=True)
        if done >= self.total:
            self.close()

    @property
    def pace(self) -> float:
        """Seconds for one piece of work lately, without pauses."""
        (begun, first), (now, done) = self.recent[0], self.recent[-1]
        return (now - begun) / (done - first) if done > first else 0.0

    @property
    def _pace_of_work(self) -> float:
        (begun, first), (now, done) = self.recent[0], self.recent[-1]
        return (now - begun) / (self.work[done] - self.work[first]) if done > first else 0.0

    @property
    def seconds_left(self) -> float:
        """The time that the rest takes, with the pauses to come."""
        pause = sum(self.paused_for) / len(self.paused_for) if self.paused_for else 0.0
        return self._pace_of_work * (self.work[-1] - self.work[self.recent[-1][1]]) + pause * self.pauses

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do something else, such as an evaluation: its time does not count for the pace."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.paused_for.append(time.monotonic() - begun)
            self.pauses = max(0, self.pauses - 1)
            if self.terminal:
                self.bar.last_print_t += self.paused_for[-1]

    def close(self) -> None:
        """Leave the bar as it is."""
        self.bar.close()

    def hidden(self) -> AbstractContextManager[Any]:
        """Clear the bar while something else is printed."""
        return self.bar.external_write_mode(file=self.out) if self.terminal else nullcontext()


def _columns(out: TextIO) -> int:
    try:
        return os.get_terminal_size(out.fileno()).columns
    except (OSError, ValueError):  # no terminal, or a notebook's stream
        return 0

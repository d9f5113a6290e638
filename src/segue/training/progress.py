"""Progress: a tqdm bar in a terminal or a notebook, a few complete lines in a log file."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO

from segue.errors import printable

LINES_IN_A_LOG = 10


class Progress:
    """Show how much of a piece of work is done; without a name, show nothing.

    >>> progress = Progress("reading", total=2, out=sys.stdout)
    >>> progress(2, "loss 0.31")  # doctest: +ELLIPSIS
    reading: 100% 2/2 [00:00<00:00, ...it/s, loss 0.31]
    """

    def __init__(self, name: str | None, total: int, *, done: int = 0, out: TextIO | None = None) -> None:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]  # imported late: the core does without it

        self.name, self.total, self.initial = name and printable(name), total, done
        self.out = sys.stderr if out is None else out
        notebook = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)
        self.terminal = name is not None and (notebook or self.out.isatty())
        self.bar: Any = tqdm(
            desc=self.name, total=total, initial=done, file=self.out, disable=not self.terminal, dynamic_ncols=True
        )
        self.begun = time.monotonic()
        self.lines = 0

    def __call__(self, done: int, text: str = "") -> None:
        """Show what is done so far."""
        text = printable(text)
        if self.terminal:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(done - self.bar.n)
        elif self.name is not None and (done >= self.total or done * LINES_IN_A_LOG // self.total > self.lines):
            self.lines = done * LINES_IN_A_LOG // self.total
            settings = {"ncols": 0, "prefix": self.name, "postfix": text, "initial": self.initial}
            print(self.bar.format_meter(done, self.total, time.monotonic() - self.begun, **settings), file=self.out, flush=True)
        if done >= self.total:
            self.close()

    def close(self) -> None:
        """Leave the bar as it is."""
        self.bar.close()

    def hidden(self) -> AbstractContextManager[Any]:
        """Clear the bar while something else is printed."""
        return self.bar.external_write_mode(file=self.out) if self.terminal else nullcontext()

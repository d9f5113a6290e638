"""Ctrl-C and SIGTERM while training: the step in hand is finished, saved, and then the process stops."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any


class Interruption:
    """Take note of a signal instead of dying in the middle of a step; a second Ctrl-C stops at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.caught = 0  # the number of the signal
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():  # only there can handlers be set
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.caught = self.caught or number  # launchers send SIGTERM more than once

    @staticmethod
    def leave(number: int, message: str) -> None:
        """Stop as the signal would have stopped the process, once everything is saved, and say so."""
        print(f"\nInterrupted: {message}", file=sys.stderr, flush=True)
        if number == signal.SIGINT:
            raise KeyboardInterrupt(message)
        raise SystemExit(128 + number)

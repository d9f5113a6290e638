"""Stop and resume: signals that end a training after its step, and the checkpoints that it continues from."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from segue.checkpoint import folders
from segue.checkpoint import state as checkpoint
from segue.errors import CheckpointError, SegueWarning, printable

if TYPE_CHECKING:
    from segue.training.fit import Loop

CHECKPOINTS = 10  # per run, unless the user says how often


class Interruption:
    """Note a signal instead of stopping in the middle of a step; a second Ctrl-C stops at once."""

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
        """Stop as the signal would have stopped the process, and say so."""
        print(printable(f"\nInterrupted: {message}"), file=sys.stderr, flush=True)
        if number == signal.SIGINT:
            raise KeyboardInterrupt(message)
        raise SystemExit(128 + number)


class Checkpoints:
    """The checkpoints of one training, in the folder of fit()."""

    def __init__(self, folder: Path | None, every: int | None, total: int, *, resume: bool) -> None:
        self.folder = folder
        self.place = Path() if folder is None else folder / "checkpoints"
        self.every = every or max(1, total // CHECKPOINTS)
        self.exist = folder is not None and folders.exist(self.place)
        if self.exist and not resume:
            raise CheckpointError(
                f"{folder} already contains a training.",
                "fit() does not overwrite it.",
                "continue it with resume=True, or give another folder. Nothing was changed.",
            )

    def save(self, loop: Loop) -> None:
        """Write the state of a training."""
        if self.folder is None:
            return
        parts: dict[str, Any] = {"optimizer": loop.raw_optimizer, "lr_scheduler": loop}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SegueWarning)  # a resume builds the students that cannot be saved by name
            if loop.handover is not None:
                loop.checkpoint = checkpoint.save(loop.handover, self.place, **parts)
            else:
                loop.checkpoint = checkpoint.save_training(loop.model, loop.done, self.place, **parts)

    def load(self, loop: Loop) -> None:
        """Set a training to the step of the latest checkpoint."""
        parts: dict[str, Any] = {"optimizer": loop.raw_optimizer, "lr_scheduler": loop}
        loop.stream.skip(checkpoint.saved_step(self.place) * loop.recipe.accumulate)  # before the random states are set
        if loop.handover is not None:
            checkpoint.load_(loop.handover, self.place, **parts)
            loop.done = loop.handover.steps_done
        else:
            loop.done = checkpoint.load_training_(loop.model, self.place, **parts)
        loop.checkpoint = self.place

    def __str__(self) -> str:
        return "nothing is saved (fit has no folder)" if self.folder is None else f"resume from {self.folder}"

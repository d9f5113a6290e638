"""Stop and resume: signals that end a training after its step, and the checkpoints that it continues from."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from segue.checkpoint import changes, folders
from segue.checkpoint import state as checkpoint
from segue.checkpoint.packing import TensorBag
from segue.checkpoint.ranks import on_rank_0
from segue.errors import CheckpointError, SegueWarning, printable
from segue.plan import encode
from segue.training.tasks import Classification

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
    def leave(number: int, message: str, *, silent: bool = False) -> None:
        """Stop as the signal would have stopped the process, and say so."""
        if not silent:
            print(printable(f"\nInterrupted: {message}"), file=sys.stderr, flush=True)
        if number == signal.SIGINT:
            raise KeyboardInterrupt(message)
        raise SystemExit(128 + number)


MOST_ACCUMULATED = 1_000_000  # batches in a step, in a checkpoint that can be right
FREE = ("steps", "epochs", "compile", "shard", "on_nan", "guard")  # of a recipe: the length is compared as total_steps


def settings_of(loop: Loop) -> dict[str, Any]:
    """Return what shapes a training besides the plan and its length, by name, as plain data."""
    recipe = {f.name: _plain(getattr(loop.recipe, f.name)) for f in dataclasses.fields(loop.recipe) if f.name not in FREE}
    settings = {f"recipe.{name}": value for name, value in recipe.items()}
    if isinstance(loop.loss_fn, Classification):  # a loss of the user's own cannot be compared
        settings["loss.label_smoothing"] = loop.loss_fn.label_smoothing
    cached = None if loop.handover is None else loop.handover.auxiliary.cached
    settings["teacher_cache"] = None if cached is None else cached.index  # type: ignore[attr-defined]
    readers = 1 if loop.processes.split else loop.processes.world
    batches = {"per_epoch": loop.stream.per_epoch, "first": loop.stream.first, "processes": readers}
    return settings | {f"batches.{name}": value for name, value in batches.items()}


def _plain(setting: Any) -> Any:
    found = encode(setting)
    if isinstance(found, dict) and "unsaved" in found and dataclasses.is_dataclass(setting):  # a plan has no such part
        return {"kind": type(setting).__name__, **dataclasses.asdict(setting)}  # type: ignore[arg-type]
    return found


class Checkpoints:
    """The checkpoints of one training, in the folder of fit()."""

    def __init__(
        self,
        folder: Path | None,
        every: int | None,
        total: int,
        *,
        resume: bool | str | os.PathLike[str],
        allow_changes: Sequence[str],
    ) -> None:
        self.folder = folder
        self.place = Path() if folder is None else folder / "checkpoints"
        self.source = self.place if isinstance(resume, bool) else Path(resume)
        self.allow_changes = tuple(allow_changes)
        self.every = every or max(1, total // CHECKPOINTS)
        there = folder is not None and folders.exist(self.place)
        self.exist = there or not isinstance(resume, bool)
        if there and resume is False:
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
        """Set a training to the step of its latest checkpoint, or of the given one."""
        saved, handover = folders.read(self.source), loop.handover
        checkpoint.require_kind(saved, "training" if handover is None else "handover")
        with folders.understood(saved.folder):
            state = TensorBag(saved.tensors).unpack(saved.state["lr_scheduler"], "lr_scheduler")
            was = {"total_steps": state["total_steps"], **state.get("settings", {})}  # 0.1.0 saved no more
            was |= {} if handover is None else checkpoint.settings_of(saved.state["segue"])
        now = {"total_steps": loop.total, **settings_of(loop)}
        now |= {} if handover is None else checkpoint.settings_of(handover.describe())
        changes.require_known(self.allow_changes, [*now])
        first = {"batches.first": was.pop("batches.first")} if "batches.first" in was else {}
        self._require_same(was, now)
        loop.stream.skip(self._batches_taken(saved, state, loop))  # before the random states are set
        self._require_same(first, settings_of(loop))
        parts: dict[str, Any] = {"optimizer": loop.raw_optimizer, "lr_scheduler": loop}
        allowed = [name.partition(".")[2] for name in now if changes.allows(self.allow_changes, name)]
        set_each_step = ("lr", "weight_decay") if loop.phases else ("lr",)
        may = (*self.allow_changes, *(f"optimizer.{name}" for name in (*set_each_step, *allowed)))
        if handover is not None:
            checkpoint.restore_handover_(handover, saved, may, **parts)
            loop.done = handover.steps_done
        else:
            loop.done = checkpoint.restore_training_(loop.model, saved, may, **parts)
        loop.checkpoint = saved.folder

    @staticmethod
    def _batches_taken(saved: folders.Checkpoint, state: dict[str, Any], loop: Loop) -> int:
        """Return how many batches the saved run has read: an earlier resume may have changed how many are in a step."""
        step = checkpoint.step_of(saved)
        with folders.understood(saved.folder):
            taken = state.get("batches", step * loop.recipe.accumulate)  # saved if it is another number
            if isinstance(taken, bool) or not isinstance(taken, int) or not step <= taken <= step * MOST_ACCUMULATED:
                raise ValueError(f"{taken!r:.20} batches in {step} steps")
        return taken

    def _require_same(self, was: dict[str, Any], now: dict[str, Any]) -> None:
        """Compare in the process that wrote: with batches of their own, the others began with other ones."""
        on_rank_0(lambda: changes.require_same(was, now, self.allow_changes), "the training does not resume.")

    def __str__(self) -> str:
        return "nothing is saved (fit has no folder)" if self.folder is None else f"saved in {self.folder}"

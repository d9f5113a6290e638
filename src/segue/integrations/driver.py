"""What the callbacks share: begin a handover, hand out its losses, resume it, end it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from segue.core.handover import Handover, replace_
from segue.core.tensor_files import fingerprint
from segue.errors import CheckpointError, HandoverError, SegueWarning
from segue.plan import Plan

KEY = "segue"  # where a framework's checkpoint holds our state


class Driver:
    """Drive one handover from the events of a framework."""

    def __init__(self, plan: Plan, *, finalize: bool = True) -> None:
        self.plan = plan
        self.finalize = finalize  # put the students in place of the seams when training ends
        self.running = False
        self._handover: Handover | None = None
        self._aux: Tensor | None = None  # of the last training forward, for the log
        self._undo: list[Callable[[], Any]] = []  # what else was changed for the handover

    @property
    def handover(self) -> Handover:
        """The handover that this callback drives."""
        if self._handover is None:
            raise HandoverError(
                "the callback was asked for its handover.",
                "It has not seen a model yet.",
                "give the callback to the trainer first: Trainer(..., callbacks=[HandoverCallback(plan)]).",
            )
        return self._handover

    @property
    def has_aux_loss(self) -> bool:
        """Whether the plan adds guidance or distillation to the loss."""
        return self.plan.guidance is not None or self.plan.distill is not None

    def begin_(self, model: nn.Module) -> None:
        """Put the seams into a model."""
        self._handover = replace_(model, self.plan)
        self.running = True

    def aux_loss(self, mask: Tensor | None) -> Tensor:
        """Return guidance and distillation for the last forward."""
        loss = self.handover.aux_loss(mask)
        self._aux = loss.detach()
        return loss

    def numbers(self) -> dict[str, float | Tensor]:
        """Return what is worth a line in the log: the mean alpha, and the last auxiliary loss."""
        alphas = self.handover.alphas.values()
        mean = sum(alphas) / len(alphas)
        return {"alpha": mean} if self._aux is None else {"alpha": mean, "aux_loss": self._aux}

    def state(self) -> dict[str, Any]:
        """Return what a resume needs beside the weights, as plain data."""
        original = self.handover.auxiliary.original
        frozen = None if original is None else fingerprint(original.state_dict())
        return {**self.handover.describe(), "original": frozen, **self.schedule_state()}

    def schedule_state(self) -> dict[str, Any]:
        """Return the part of the state that moves: what a schedule that adapts has seen."""
        state_dict = getattr(self.plan.schedule, "state_dict", None)
        return {"schedule": None if state_dict is None else state_dict()}

    def start(self, total_steps: int) -> dict[str, Any]:
        """Begin at step 0 of a run whose length is known now, and return the state that a checkpoint must keep."""
        self.handover.total_steps = total_steps
        self.handover.resume_at(0)
        return self.state()

    def resume(self, saved: dict[str, Any] | None, step: int, total_steps: int) -> dict[str, Any]:
        """Go on at a step of an earlier process, after the framework has loaded the weights; return the state to keep."""
        if saved is None:
            raise CheckpointError(
                f"a handover was to go on at step {step}.",
                "The checkpoint holds no handover: it was written without this callback.",
                "resume from a checkpoint of the same script, or begin anew.",
            )
        self.handover.total_steps = total_steps
        now = self.state()
        for what, found, hint in (
            ("plan", "Its plan is another one.", "give the callback the plan that it had."),
            ("total_steps", f"It was to take {saved['total_steps']} steps, this one {total_steps}.", "give the same length."),
            ("teachers", "Its teachers had other weights.", "load the same pretrained model first."),
            ("original", "It distilled from other weights.", "build the model as before: the same files, the same seed."),
        ):
            if now[what] != saved[what]:
                raise CheckpointError(f"a handover was to go on at step {step}.", found, hint)
        if saved["schedule"] is not None:
            self.plan.schedule.load_state_dict(saved["schedule"])  # type: ignore[attr-defined]
        self.handover.resume_at(step)
        return now

    def end_(self) -> None:
        """Finish the handover if its teachers have no share any more."""
        sharing = [name for name, alpha in self.handover.alphas.items() if alpha > 0]
        if sharing:
            warnings.warn(
                f"training ended at step {self.handover.steps_done} of {self.handover.total_steps} while {len(sharing)} of "
                f"{len(self.handover.sites)} teachers still had a share; the handover was left open. Resume, or call "
                "callback.handover.finalize_(force=True).",
                SegueWarning,
                stacklevel=2,
            )
            return
        model = self.handover.finalize_()
        self.running = False
        for undo in self._undo:
            undo()
        config: Any = getattr(model, "config", None)
        shortened = any(site.is_span for site in self.handover.sites)  # then transformers builds the model as it is now
        if hasattr(config, "to_json_string") and not shortened:  # Hugging Face: config.json takes the record along
            config.segue = model.segue

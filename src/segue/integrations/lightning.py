"""A handover inside Lightning's Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import wraps
from typing import Any

from torch import Tensor, nn

from segue.core import randomness
from segue.core.blending import padding_mask
from segue.errors import HandoverError, MissingExtraError, SegueWarning
from segue.integrations.driver import KEY, Driver
from segue.plan import Plan

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # type: ignore[assignment]
    except ImportError:
        raise MissingExtraError(
            "segue.integrations.lightning was imported.", "Lightning is not installed.", "pip install segue[lightning]"
        ) from None


class HandoverCallback(Driver, Callback):
    """Drive a handover from Lightning: `Trainer(callbacks=[HandoverCallback(plan)])`.

    `module` names the part of the LightningModule that `training_step` calls (`self.model(...)`); sites are relative to it.
    It is changed before `configure_optimizers`. Guidance and distillation are added to what `training_step` returns.
    Lightning's own checkpoints continue bit for bit, random states included. When `fit` ends, the students stand alone
    (`finalize=False` leaves the handover open); `callback.handover` is the running handover.
    """

    def __init__(self, plan: Plan, *, module: str = "model", finalize: bool = True) -> None:
        super().__init__(plan, finalize=finalize)
        self.module = module
        self._loaded: dict[str, Any] | None = None  # what a checkpoint held
        self._kept: dict[str, Any] = {}  # what the next one will hold

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put the seams into the model, before weights are loaded and optimizers made."""
        if stage != "fit" or self._handover is not None:
            return
        if not pl_module.automatic_optimization:
            raise HandoverError(
                "a HandoverCallback was given to a module with manual optimization.",
                "Only that module knows its loss and its steps.",
                "drive the handover yourself: segue.replace_ in __init__, aux_loss() and step() in training_step.",
            )
        model = getattr(pl_module, self.module, None)
        if not isinstance(model, nn.Module):
            parts = ", ".join(name for name, _ in pl_module.named_children()) or "none"
            raise HandoverError(
                f"the model at {type(pl_module).__name__}.{self.module} was to be changed.",
                f"There is none yet; the module has these parts: {parts}.",
                "make it in __init__ and name it: HandoverCallback(plan, module='...').",
            )
        self.begin_(model)
        model.train()  # Lightning leaves modes as they are, and a pretrained model comes in evaluation
        warnings.filterwarnings("ignore", r"Found \d+ module\(s\) in eval mode")  # teachers and a frozen backbone: on purpose
        self._undo.append(model.register_load_state_dict_pre_hook(_allow_released).remove)  # type: ignore[no-untyped-call]
        if self.has_aux_loss:
            self._wrap_training_step(pl_module)

    def _wrap_training_step(self, pl_module: Any) -> None:
        plain = pl_module.training_step

        @wraps(plain)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            if not self.running or result is None:
                return result
            batch = args[0] if args else kwargs.get("batch")
            aux = self.aux_loss(padding_mask(batch))
            return {**result, "loss": result["loss"] + aux} if isinstance(result, Mapping) else result + aux

        pl_module.training_step = training_step
        self._undo.append(lambda: delattr(pl_module, "training_step"))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Learn how long the run is, and go on where a checkpoint was written."""
        if self.running:
            self._take_place(trainer)

    def _take_place(self, trainer: Any) -> None:
        total = trainer.estimated_stepping_batches
        if not 0 < total < float("inf"):
            raise HandoverError(
                "a handover was to begin.",
                "Lightning does not know how many steps the run has.",
                "tell it: Trainer(max_steps=...) or Trainer(max_epochs=...).",
            )
        step = trainer.global_step
        if step and trainer.max_steps != -1:
            warnings.warn(
                "Lightning does not find its exact place in the data again when max_steps ends a run: the resumed run may "
                "differ from an undisturbed one. Give max_epochs instead.",
                SegueWarning,
                stacklevel=2,
            )
        self._kept = self.resume(self._loaded, step, int(total)) if step else self.start(int(total))
        if self._loaded is not None and self._loaded["mid_epoch"]:
            randomness.restore_this_rank(self._loaded["random"])  # again: the loader was made meanwhile, and drew

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Move the handover on, once per optimizer step."""
        if self.running and trainer.global_step > self.handover.steps_done:
            self.handover.step()
            pl_module.log_dict(self.numbers())

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put what a resume needs beside the weights into Lightning's checkpoint."""
        if self.running and self._kept:
            random = randomness.states_of_every_rank()  # which Lightning does not keep
            checkpoint[KEY] = {**self._kept, **self.schedule_state(), "random": random, "mid_epoch": not trainer.is_last_batch}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take it out again, and let the loaders of the next epoch draw as they would have."""
        self._loaded = checkpoint.get(KEY)
        if self._loaded is not None:
            randomness.restore_this_rank(self._loaded["random"])

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the students alone in the model, after the last checkpoint."""
        if self.running and self.finalize:
            if self._loaded is not None and not self._kept:  # of a run that had been at its end
                self._take_place(trainer)
            self.end_()


def _allow_released(model: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Fill in the teachers that a checkpoint no longer holds, because they were released."""
    for name, value in model.state_dict().items():
        if ".teacher." in name:
            state.setdefault(prefix + name, value)

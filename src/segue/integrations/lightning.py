"""A handover inside Lightning's Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from segue.border import checked
from segue.core import randomness
from segue.core.blending import padding_mask
from segue.errors import HandoverError, MissingExtraError, SegueWarning
from segue.integrations.driver import KEY, Driver
from segue.plan import Plan
from segue.training.guard import Guard

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # type: ignore[assignment]
    except ImportError:
        raise MissingExtraError(
            "segue.integrations.lightning needs Lightning.", "It is not installed.", "pip install segue[lightning]"
        ) from None

__all__ = ["HandoverCallback"]


def __dir__() -> list[str]:
    return sorted(__all__)


class HandoverCallback(Driver, Callback):
    """Drive a handover from Lightning: `Trainer(callbacks=[HandoverCallback(plan)])`.

    `module` names the part of the LightningModule that `training_step` calls (`self.model(...)`); sites are relative to it.
    It is changed before `configure_optimizers`. Guidance and distillation are added to what `training_step` returns.
    Lightning's own checkpoints resume bit for bit, random states included. When `fit` ends, the students are alone in the
    model (`finalize=False` leaves the handover open); `callback.handover` is the running handover. A checkpoint of another
    plan or length is refused, unless `allow_changes=("plan.schedule",)` names what differs. `guard=segue.Guard()` undoes steps
    that go wrong; `callback.events` lists them.
    """

    @checked
    def __init__(
        self,
        plan: Plan,
        *,
        module: str = "model",
        guard: Guard | None = None,
        finalize: bool = True,
        allow_changes: Sequence[str] = (),
    ) -> None:
        super().__init__(plan, guard=guard, finalize=finalize, allow_changes=allow_changes)
        self.module = module
        self._loaded: dict[str, Any] | None = None  # from a checkpoint
        self._kept: dict[str, Any] = {}  # for the next checkpoint

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put the seams into the model, before weights are loaded and optimizers created."""
        if stage != "fit" or self._handover is not None:
            return
        if not pl_module.automatic_optimization:
            raise HandoverError(
                "HandoverCallback does not support manual optimization.",
                f"{type(pl_module).__name__} takes its optimizer steps itself.",
                "drive the handover yourself: segue.replace_ in __init__, aux_loss() and step() in training_step.",
            )
        model = getattr(pl_module, self.module, None)
        if not isinstance(model, nn.Module):
            parts = ", ".join(name for name, _ in pl_module.named_children()) or "none"
            raise HandoverError(
                f"{type(pl_module).__name__}.{self.module} is not a model.",
                f"The module has these parts: {parts}.",
                "create the model in __init__ and name it: HandoverCallback(plan, module='...').",
            )
        self.start_(model)
        model.train()  # Lightning does not change modes, and a pretrained model is in eval mode
        warnings.filterwarnings("ignore", r"Found \d+ module\(s\) in eval mode")  # teachers and a frozen backbone
        self._undo.append(model.register_load_state_dict_pre_hook(_allow_released).remove)  # type: ignore[no-untyped-call]
        if self.changes_loss or self.guard is not None:
            self._wrap_training_step(pl_module)

    def _wrap_training_step(self, pl_module: Any) -> None:
        plain = pl_module.training_step

        @wraps(plain)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            mask = padding_mask(args[0] if args else kwargs.get("batch"))
            if self.takes_updates:
                with self.handover.features(mask) as features:
                    result = plain(*args, **kwargs)
                trainer = pl_module.trainer
                each = trainer.gradient_clip_algorithm == "value"
                aux = self.update(features, trainer.optimizers[0], trainer.gradient_clip_val, each=each)
            else:
                result = plain(*args, **kwargs)
                if not self.running or result is None:
                    return result
                aux = self.aux_loss(mask)
            named = isinstance(result, Mapping)
            loss = self.handover.weighted(result["loss"] if named else result) + aux
            self.note(loss)
            return {**result, "loss": loss} if named else loss

        pl_module.training_step = training_step
        self._undo.append(lambda: delattr(pl_module, "training_step"))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Read the length of the run, and continue where the checkpoint was written."""
        if not self.running:
            return
        total = trainer.estimated_stepping_batches
        if not 0 < total < float("inf"):
            raise HandoverError(
                "a handover needs to know the number of steps.",
                f"Lightning estimates {total}.",
                "limit the run: Trainer(max_epochs=...) or Trainer(max_steps=...).",
            )
        step = trainer.global_step
        if step and trainer.max_steps != -1:
            warnings.warn(
                "the resumed run may differ from an uninterrupted one: with max_steps, Lightning does not return to its exact "
                "place in the data. Give max_epochs instead.",
                SegueWarning,
                stacklevel=2,
            )
        self.refuse_unfit(accumulate=trainer.accumulate_grad_batches, scaled=trainer.precision == "16-mixed")
        self._kept = self.set_step(step, int(total), self._loaded)
        for optimizer in trainer.optimizers:
            self.handover.schedule_rates(optimizer)
            self.watch(optimizer, None if self._loaded is None else self._loaded.get("guard"))
        if self._loaded is not None and self._loaded["mid_epoch"]:
            randomness.restore_this_rank(self._loaded["random"])  # again: creating the loader drew from them

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Let the guard judge the step."""
        self.judge()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take a step of the handover, once per optimizer step."""
        if self.running and trainer.global_step > self.handover.steps_done:
            if any(alpha > 0 for alpha in self.handover.alphas.values()):
                _forget_scores(trainer)
            self.handover.step()
            pl_module.log_dict(self.metrics())

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add to Lightning's checkpoint what a resume needs in addition to the weights."""
        if self.running and self._kept:
            random = randomness.states_of_every_rank()  # which Lightning does not save
            checkpoint[KEY] = {**self._kept, **self.schedule_state(), "random": random, "mid_epoch": not trainer.is_last_batch}
            if self._guarded is not None:
                checkpoint[KEY]["guard"] = self._guarded.state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Read it, and restore the random states from which the loaders of the next epoch draw."""
        self._loaded = checkpoint.get(KEY)
        if self._loaded is not None:
            randomness.restore_this_rank(self._loaded["random"])

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Finalize the handover, after the last checkpoint."""
        if self.running and self.finalize:
            if self._loaded is not None and not self._kept:  # of a run that was already at its end
                self.on_train_start(trainer, pl_module)
            self.finish_()


def _forget_scores(trainer: Any) -> None:
    """Let early stopping count from takeover on: a good score of the blend is its teachers'."""
    for stopping in trainer.early_stopping_callbacks:
        stopping.wait_count = 0
        stopping.best_score = torch.tensor(torch.inf if stopping.mode == "min" else -torch.inf)


def _allow_released(model: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Fill in the teachers that a checkpoint does not contain, because they were released."""
    for name, value in model.state_dict().items():
        if ".teacher." in name:
            state.setdefault(prefix + name, value)

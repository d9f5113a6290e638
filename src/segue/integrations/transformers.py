"""A handover inside Hugging Face's Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from segue.border import checked
from segue.core.blending import padding_mask
from segue.core.local_fit import Features
from segue.errors import HandoverError, MissingExtraError, PlanError
from segue.integrations.driver import KEY, Driver
from segue.integrations.peft import base_of, is_peft, save_students_with_adapters
from segue.plan import Plan
from segue.training.guard import Guard

try:
    from transformers import TrainerCallback
except ImportError:
    raise MissingExtraError(
        "segue.integrations.transformers needs Transformers.", "It is not installed.", "pip install segue[hf]"
    ) from None


__all__ = ["HandoverCallback"]


def __dir__() -> list[str]:
    return sorted(__all__)


GUARD = f"{KEY}_guard"


class HandoverCallback(Driver, TrainerCallback):
    """Drive a handover from a stock Trainer: `Trainer(..., callbacks=[HandoverCallback(plan)])`.

    The model is changed when Trainer is created, so its optimizer has the students. Guidance and distillation are added to the
    model's loss. Trainer's own checkpoints resume bit for bit. When training ends, the students are alone in the model
    (`finalize=False` leaves the handover open); `callback.handover` is the running handover. A checkpoint of another plan or
    length is refused, unless `allow_changes=("plan.schedule",)` names what differs. `guard=segue.Guard()` undoes steps that go
    wrong; `callback.events` lists them.
    """

    @checked
    def __init__(
        self, plan: Plan, *, guard: Guard | None = None, finalize: bool = True, allow_changes: Sequence[str] = ()
    ) -> None:
        super().__init__(plan, guard=guard, finalize=finalize, allow_changes=allow_changes)
        self._batches = 1  # in the current optimizer step
        self._world = 1  # Trainer's factor of the loss if it counts tokens over all processes
        self._optimizer: Any = None
        self._clip: float | None = None
        self._features: Features | None = None  # of a forward from which students learn after it
        self._reached: list[bool] = []  # for each auxiliary loss since the last step: whether a backward reached it

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        """Put the seams into the model, before Trainer creates its optimizer."""
        _refuse_engines(args)
        if optimizer is not None:
            raise HandoverError(
                "HandoverCallback does not support an optimizer of your own.",
                f"Trainer has a {type(optimizer).__name__}, which was built before the students.",
                "let Trainer create it: TrainingArguments(optim=...), or optimizer_cls_and_kwargs=. Nothing was changed.",
            )
        if is_peft(model) and self.plan.train == "students" and any(p.requires_grad for p in model.parameters()):
            raise PlanError(
                'Plan(train="students") does not train PEFT adapters.',
                "The model has adapters, which this plan would freeze.",
                'use Plan(train="all"): what PEFT has frozen stays frozen. Nothing was changed.',
            )
        self.start_(base_of(model))
        if is_peft(model):
            save_students_with_adapters(model, self)
        elif hasattr(model, "save_pretrained"):  # also after training: Trainer and Segue load the model's own names only
            model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
        if self.changes_loss or self.guard is not None:
            model = self.handover.model
            model.forward = forward = _RecordedForward(model, self)
            self._undo += [forward.leave, model.register_forward_hook(self._add_aux_loss, with_kwargs=True).remove]

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        """Read the length of the run, and continue where the checkpoint was written."""
        if self._handover is None or self._handover.model is not base_of(model):
            raise HandoverError(
                "the HandoverCallback does not know the model that is trained.",
                "It was added after Trainer was created, or Trainer creates models itself (model_init).",
                "give both at once: Trainer(model, ..., callbacks=[HandoverCallback(plan)]).",
            )
        if not self.running:
            return  # a second training, of the finished model
        self.refuse_unfit(accumulate=args.gradient_accumulation_steps, scaled=args.fp16)
        self._clip = args.max_grad_norm
        self._world = args.world_size if args.average_tokens_across_devices else 1
        saved = state.stateful_callbacks.get(KEY)
        state.stateful_callbacks[KEY] = self.set_step(state.global_step, state.max_steps, saved)
        raw = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        self.handover.schedule_rates(raw)
        self.watch(raw, raw.param_groups[0].pop(GUARD, None))
        if self.guard is not None:
            self._watching.append(raw.register_state_dict_post_hook(self._save_guard))

    def on_step_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Count the batches of this step: the last one of an epoch may have fewer."""
        self._optimizer = optimizer
        self._batches = args.gradient_accumulation_steps
        try:
            length = len(train_dataloader)
        except TypeError:
            return
        steps = math.ceil(length / self._batches)
        if (state.global_step + 1) % steps == 0:
            self._batches = length - (steps - 1) * self._batches

    def _save_guard(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Save the guard in Trainer's own file for tensors: settings of a group come back with the optimizer's state."""
        if self.running and self._guarded is not None:
            state["param_groups"][0][GUARD] = self._guarded.state_dict()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let the guard judge the step."""
        self.judge()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take a step of the handover, once per optimizer step."""
        if not self.running:
            return
        if not all(self._reached):
            raise self._outside_the_model()
        self._reached = []
        if any(alpha > 0 for alpha in self.handover.alphas.values()):  # a good score of the blend is its teachers'
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        self.handover.step()
        state.stateful_callbacks[KEY].update(self.schedule_state())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add alpha and the auxiliary loss to what is logged of a step."""
        if self.running and "loss" in logs:
            metrics = {name: float(value) for name, value in self.metrics().items()}
            logs.update(metrics)
            state.log_history[-1].update(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Finalize the handover."""
        if self.running and self.finalize:
            self.finish_()

    def record_features(self, forward: Callable[[], Any], mask: Tensor | None) -> Any:
        """Let a forward of a local phase be that of the original model, and end it where nothing more of it is needed."""

        def complete() -> Any:
            with torch.no_grad(), self.handover.as_teacher():
                return forward()

        output = None
        with self.handover.features(mask, complete=not self.ends_early) as self._features:
            output = forward()
        return loss_alone(complete, next(self.handover.parameters()).device) if output is None else output

    def _add_aux_loss(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Add to the model's loss, so that each batch counts as in `segue.fit` whatever Trainer does to the loss later."""
        if not (self.running and model.training and torch.is_grad_enabled()):
            return output
        named = isinstance(output, dict)
        loss = output.get("loss") if named else output[0] if isinstance(output, tuple) else None
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise self._outside_the_model()
        features, self._features = self._features, None
        aux = self.aux_loss(padding_mask(kwargs)) if features is None else self.update(features, self._optimizer, self._clip)
        if aux.requires_grad:
            self._watch(aux)
        counted = kwargs.get("num_items_in_batch") is not None  # then Trainer does not divide by the number of batches
        parts = self._batches * self._world if counted else 1
        loss = self.handover.weighted(loss) + aux / parts
        if self.guard is not None:
            self._watch(loss)
            self.note(loss * parts)
        if not named:
            return (loss, *output[1:])
        output["loss"] = loss
        return output

    def _watch(self, aux: Tensor) -> None:
        flags, index = self._reached, len(self._reached)
        flags.append(False)

        def reached(gradient: Tensor) -> None:
            flags[index] = True

        aux.register_hook(reached)  # type: ignore[no-untyped-call]

    def _outside_the_model(self) -> HandoverError:
        what, otherwise = (
            ("guidance and distillation cannot be added to the loss.", "use a plan without guidance and distill")
            if self.changes_loss
            else ("the guard cannot see the loss.", "leave guard out")
        )
        return HandoverError(
            what,
            "Trainer does not use a loss of the model: label_smoothing_factor, compute_loss_func, or a model without one.",
            f"let the model compute it (labels in the batch), or {otherwise}.",
        )


class _RecordedForward:
    """Stand for the forward of a model in training; in a copy of the model, its own forward is back."""

    def __init__(self, model: nn.Module, callback: HandoverCallback) -> None:
        self.model, self.callback = model, callback
        self.__wrapped__ = model.forward  # whose signature Trainer reads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = partial(self.__wrapped__, *args, **kwargs)
        learns = self.callback.takes_updates or self.callback.ends_early
        records = learns and self.model.training and torch.is_grad_enabled()
        return self.callback.record_features(plain, padding_mask(kwargs)) if records else plain()

    def __reduce__(self) -> tuple[Any, ...]:
        return MethodType, (type(self.model).forward, self.model)

    def leave(self) -> None:
        """Give the model its forward back, unless something else was put over it, through which this one does nothing."""
        if vars(self.model).get("forward") is self:
            del self.model.forward


def loss_alone(complete: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Return the output of a forward that ended early: a loss of 0. Whoever asks for more, such as logits, lets it run."""

    class Output(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            for key, value in complete().items():
                self.setdefault(key, value)
            if name not in self:
                raise KeyError(name)
            return self[name]

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            try:
                return self[name]
            except KeyError:
                raise AttributeError(name) from None

    return Output(loss=torch.zeros((), device=device))


def _refuse_engines(args: Any) -> None:
    """Refuse what wraps, copies or compiles the model in a way that the seams do not support."""
    for asked, found, hint in (
        (args.n_gpu > 1, "Trainer would copy the model to several devices.", "launch one process per device with torchrun"),
        (args.fsdp, "FSDP must shard every teacher and student on its own.", "train by segue.fit and Recipe(shard=True)"),
        (args.deepspeed, "DeepSpeed is not tested with a handover.", "train with DDP"),
        (args.torch_compile, "The losses at the sites cannot be compiled.", "leave torch_compile out"),
    ):
        if asked:
            raise HandoverError("HandoverCallback does not support this setting.", found, f"{hint}. Nothing was changed.")

"""A handover inside Hugging Face's Trainer."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from segue.core.blending import padding_mask
from segue.errors import HandoverError, MissingExtraError, PlanError
from segue.integrations.driver import KEY, Driver
from segue.integrations.peft import base_of, carry_students, is_peft
from segue.plan import Plan

try:
    from transformers import TrainerCallback
except ImportError:
    raise MissingExtraError(
        "segue.integrations.transformers was imported.", "Transformers is not installed.", "pip install segue[hf]"
    ) from None


class HandoverCallback(Driver, TrainerCallback):
    """Drive a handover from a stock Trainer: `Trainer(..., callbacks=[HandoverCallback(plan)])`.

    The model is changed when Trainer is made, so its optimizer holds the students. Guidance and distillation join the model's
    loss. Trainer's own checkpoints continue bit for bit. When training ends, the students stand alone (`finalize=False` leaves
    the handover open); `callback.handover` is the running handover.
    """

    def __init__(self, plan: Plan, *, finalize: bool = True) -> None:
        super().__init__(plan, finalize=finalize)
        self._batches = 1  # of the optimizer step that runs
        self._world = 1  # what Trainer multiplies the loss by where it counts tokens over all processes
        self._joined: list[bool] = []  # for each auxiliary loss since the last step: whether backward passed it

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        """Put the seams into the model, before Trainer makes its optimizer."""
        _refuse_engines(args)
        if optimizer is not None:
            raise HandoverError(
                "Trainer was given an optimizer together with a HandoverCallback.",
                "It was built before the students and cannot hold them.",
                "let Trainer make it: TrainingArguments(optim=...), or optimizer_cls_and_kwargs=. Nothing was changed.",
            )
        if is_peft(model) and self.plan.train == "students" and any(p.requires_grad for p in model.parameters()):
            raise PlanError(
                'a model with PEFT adapters was to be trained by a Plan(train="students").',
                "That freezes all but the students, and so the adapters.",
                'plan with train="all": what PEFT has frozen stays frozen. Nothing was changed.',
            )
        self.begin_(base_of(model))
        if is_peft(model):
            carry_students(model, self)
        elif hasattr(model, "save_pretrained"):  # for good, under the model's own names: Trainer and Segue load no others
            model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
        if self.has_aux_loss:
            hook = self.handover.model.register_forward_hook(self._add_aux_loss, with_kwargs=True)
            self._undo.append(hook.remove)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Learn how long the run is, and go on where a checkpoint was written."""
        if self._handover is None or self._handover.model is not base_of(model):
            raise HandoverError(
                "a HandoverCallback was to follow a training.",
                "It was not there when Trainer was made, or Trainer makes models of its own (model_init).",
                "give both at once: Trainer(model, ..., callbacks=[HandoverCallback(plan)]).",
            )
        if not self.running:
            return  # a second training, of the finished model
        self._world = args.world_size if args.average_tokens_across_devices else 1
        if state.global_step:
            saved = state.stateful_callbacks.get(KEY)
            state.stateful_callbacks[KEY] = self.resume(saved, state.global_step, state.max_steps)
        else:
            state.stateful_callbacks[KEY] = self.start(state.max_steps)

    def on_step_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Count the batches of the step that begins: the last one of an epoch may have fewer."""
        self._batches = args.gradient_accumulation_steps
        try:
            length = len(train_dataloader)
        except TypeError:
            return
        steps = math.ceil(length / self._batches)
        if (state.global_step + 1) % steps == 0:
            self._batches = length - (steps - 1) * self._batches

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move the handover on, once per optimizer step."""
        if not self.running:
            return
        if not all(self._joined):
            raise _outside_the_model()
        self._joined.clear()
        if any(alpha > 0 for alpha in self.handover.alphas.values()):  # the best of a blend is its teacher's merit
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        self.handover.step()
        state.stateful_callbacks[KEY].update(self.schedule_state())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add alpha and the auxiliary loss to what is logged of a step."""
        if self.running and "loss" in logs:
            numbers = {name: float(value) for name, value in self.numbers().items()}
            logs.update(numbers)
            state.log_history[-1].update(numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the students alone in the model."""
        if self.running and self.finalize:
            self.end_()

    def _add_aux_loss(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Join the model's loss, so that each batch counts as in `segue.fit` whatever Trainer does to the loss later."""
        if not (self.running and model.training and torch.is_grad_enabled()):
            return output
        named = isinstance(output, dict)
        loss = output.get("loss") if named else output[0] if isinstance(output, tuple) else None
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise _outside_the_model()
        aux = self.aux_loss(padding_mask(kwargs))
        if aux.requires_grad:
            self._watch(aux)
        if kwargs.get("num_items_in_batch") is not None:  # then Trainer leaves the division by the batches to the model
            aux = aux / (self._batches * self._world)
        if not named:
            return (loss + aux, *output[1:])
        output["loss"] = loss + aux
        return output

    def _watch(self, aux: Tensor) -> None:
        index = len(self._joined)
        self._joined.append(False)

        def passed(gradient: Tensor) -> None:
            self._joined[index] = True

        aux.register_hook(passed)  # type: ignore[no-untyped-call]


def _outside_the_model() -> HandoverError:
    return HandoverError(
        "guidance or distillation was to join the loss that the model returns.",
        "Trainer takes its loss from elsewhere: label_smoothing_factor, compute_loss_func, or a model that returns none.",
        "let the model compute it (labels in the batch), or plan without guidance and distill.",
    )


def _refuse_engines(args: Any) -> None:
    """Refuse what takes the model apart in a way that the seams do not survive."""
    for asked, found, hint in (
        (
            args.n_gpu > 1,
            "It would copy the model to several devices in one process.",
            "start it with torchrun, one process per device",
        ),
        (bool(args.fsdp), "FSDP must shard every teacher and student on its own.", "train by segue.fit and Recipe(shard=True)"),
        (bool(args.deepspeed), "DeepSpeed has not been tried with a handover.", "train with DDP"),
        (bool(args.torch_compile), "The losses at the sites are not made to be compiled.", "leave torch_compile out"),
    ):
        if asked:
            raise HandoverError("a HandoverCallback was given to Trainer.", found, f"{hint}. Nothing was changed.")

"""Non-finite values in training: find where inf or NaN appears first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue.core.blending import padding_mask
from segue.core.handover import Handover
from segue.core.tensor_files import local
from segue.core.views import eager_mode
from segue.errors import TrainingError
from segue.sites import is_seam
from segue.training.distributed import Processes
from segue.training.places import owner, plain_name
from segue.training.tasks import LossFn, output_mask
from segue.training.trace import Trace, finite


@dataclass(frozen=True)
class MicroBatch:
    """A batch of a step, and the random states in which its forward begins."""

    batch: Any
    random: list[Tensor]

    @classmethod
    def of(cls, batch: Any) -> MicroBatch:
        return cls(batch, [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())])

    def restore_random(self) -> None:
        cpu, *cuda = self.random
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@dataclass(frozen=True)
class Search:
    """Look for the place where a step becomes inf or NaN: in the batch, a module, a weight, the loss or a gradient."""

    model: nn.Module
    handover: Handover | None
    loss_fn: LossFn
    processes: Processes
    autocast: Callable[[], AbstractContextManager[Any]]
    sharded: bool = False

    def find(self, batches: list[MicroBatch], loss: float) -> str:
        """Say it, in all processes alike."""
        bad = [micro for micro in batches if not finite(micro.batch)]
        if said := self.processes.first("The batch itself contains inf or NaN" if bad else None):
            return said
        forwards = [self._repeat(micro) for micro in batches]  # all of them: processes stay in step
        if said := self.processes.first(next((found for found in forwards if found is not None), None)):
            return said
        if not math.isfinite(loss):
            return (
                "The same forward, repeated, is finite in every module, and so is its loss: what made it inf or NaN does not "
                "repeat itself (compiled code, a random number, a counter)"
            )
        return self.processes.first(self._summed_gradient(repeated=not self.sharded)) or (
            "Every gradient is finite; only their norm is too large for its type"
        )

    def _repeat(self, micro: MicroBatch) -> str | None:
        """Run the forward and backward of a batch again, with every module watched."""
        micro.restore_random()
        trace = Trace(self._modules(), gradients=not self.sharded)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        parts: dict[str, Tensor] = {}
        with trace.watching(trained), eager_mode():
            try:
                with self.autocast():
                    parts["the loss function returns"] = self.loss_fn(self.model, micro.batch)
                    if self.handover is not None:
                        counted = output_mask(self.loss_fn, micro.batch)
                        parts |= self.handover.losses(padding_mask(micro.batch), output_mask=counted)
            except Exception as error:
                said = f"The same forward, repeated to find the place, raises {type(error).__name__}: {error}"
                return self._in_forward(trace) or said
            if not all(finite(part) for part in parts.values()):
                return self._in_forward(trace) or _in_loss(parts)
            if self.sharded:
                return None
            try:
                torch.autograd.grad([x for x in parts.values() if x.requires_grad], list(trained.values()), allow_unused=True)
            except RuntimeError:  # reentrant activation checkpointing has no such backward
                return self._summed_gradient(repeated=False)
            return self._in_backward(trace)

    def _modules(self) -> dict[nn.Module, str]:
        """Return everything that a forward calls, by name; a name that is not the model's begins with the name of its root."""
        original = None if self.handover is None else self.handover.auxiliary.original
        roots = {"": self.model, "the frozen original": original, "the loss function": self.loss_fn}
        return {
            module: f"{root}/{name}" if root else name
            for root, top in roots.items()
            if isinstance(top, nn.Module)
            for name, module in top.named_modules()
        }

    def _in_forward(self, trace: Trace) -> str | None:
        module = trace.forward
        if module is None:
            return None
        for kind, named in (("weight", module.named_parameters()), ("buffer", _with_nan(module.named_buffers()))):
            if (name := _first(named)) is not None:
                whole = ".".join(part for part in (trace.modules[module], name) if part)
                return f"The {kind} {self._named(whole)!r}{self._owner(whole)} is inf or NaN"
        if is_seam(module):
            return f"The blend at site {trace.modules[module]!r} of two finite outputs is inf or NaN"
        return f"{self._described(trace, module)} turns finite input into inf or NaN"

    def _in_backward(self, trace: Trace) -> str | None:
        if trace.parameter is not None:
            name = trace.parameter
            return f"The gradient of {self._named(name)!r}{self._owner(name)} is inf or NaN"
        if trace.backward is not None:
            return f"{self._described(trace, trace.backward)} turns a finite gradient into inf or NaN"
        return "The loss is finite, but the gradient that it passes to the model is inf or NaN" if trace.from_loss else None

    def _summed_gradient(self, *, repeated: bool) -> str | None:
        """Name the last parameter of the model whose gradient is inf or NaN: gradients spread from the end backwards."""
        gradients = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
        if (name := _first(reversed(gradients))) is None:
            return None
        but = "; the same backward, repeated, is finite" if repeated else ""
        return f"The gradient of {self._named(name)!r}{self._owner(name)} is inf or NaN{but}"

    def _described(self, trace: Trace, module: nn.Module) -> str:
        name = trace.modules[module]
        if not name:
            return f"The model itself ({type(module).__name__}), in code outside its modules,"
        return f"The module {self._named(name)!r} ({type(module).__name__}){self._owner(name)}"

    def _named(self, name: str) -> str:
        return plain_name(name.rpartition("/")[2], None if "/" in name else self.handover)

    def _owner(self, name: str) -> str:
        return f" of {name.partition('/')[0]}" if "/" in name else owner(name, self.handover)


def _in_loss(parts: dict[str, Tensor]) -> str | None:
    for name, value in parts.items():
        if not finite(value):
            what, _, site = name.partition("/")
            said = f"the {what} at site {site!r} is" if site else {"distill": "the distillation loss is"}.get(name, name)
            return f"Every module turns finite input into finite output; {said} {value.item():g}"
    return None


def _first(named: Iterable[tuple[str, Tensor]]) -> str | None:
    return next((name for name, tensor in named if not bool(torch.isfinite(local(tensor)).all())), None)


def _with_nan(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Leave out what may be infinite on purpose, as masks are."""
    return [(name, tensor) for name, tensor in named if bool(torch.isnan(tensor).any())]


def error(where: str, step: int, loss: float, norm: float, checkpoint: Path | None) -> TrainingError:
    """Build the error: which step, where, and what to resume from."""
    good = f"the last good checkpoint is {checkpoint}; " if checkpoint else "there is no checkpoint (give fit a folder); "
    return TrainingError(
        f"step {step} has no finite update: loss {loss:.6g}, gradient norm {norm:.6g}.",
        f"{where}.",
        f"{good}lower lr or clip, or skip such steps with Recipe(on_nan='skip').",
    )

"""Measuring: set a running handover aside, look at it, and give it back as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from segue.core.seam import Watch
from segue.core.surgery import evaluating, plain_attention
from segue.core.tensor_files import full

if TYPE_CHECKING:
    from segue.core.handover import Handover

STATE = ("view", "watch", "hold", "closed", "reached", "blind", "records", "teacher_gradient", "may_skip")


@contextmanager
def set_aside(handover: Handover) -> Iterator[None]:
    """Let a block switch the seams as it likes, in evaluation and without compiled code; all of it comes back afterwards."""
    seams = list(handover.seams.values())
    before = [{name: getattr(seam, name) for name in STATE} for seam in seams]
    weights = [(seam.weight_now, seam.mean_now) for seam in seams]
    refuses, handover.refuses_unreached = handover.refuses_unreached, False
    for seam in seams:
        seam.records, seam.watch, seam.reached = [], Watch.NOTHING, set()
    try:
        with evaluating(handover.model), plain_attention(), _eagerly():
            yield
    finally:
        handover.refuses_unreached = refuses
        for seam, state, weight in zip(seams, before, weights, strict=True):
            for name, value in state.items():
                setattr(seam, name, value)
            seam.set_weight(*weight)


def gradients(
    model: nn.Module, outputs: Sequence[Tensor], parameters: Sequence[Tensor], directions: Sequence[Tensor] | None = None
) -> list[Tensor | None]:
    """Return the gradients of outputs, leaving `.grad` alone; None where nothing depends on a parameter."""
    if not outputs:
        return [None] * len(parameters)
    if not any(hasattr(parameter, "full_tensor") for parameter in parameters):
        return list(torch.autograd.grad(outputs, parameters, directions, allow_unused=True))
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]  # FSDP hands out gradients in backward() only
    try:
        for parameter, _ in kept:
            parameter.grad = None
        torch.autograd.backward(outputs, directions)
        return [None if parameter.grad is None else full(parameter.grad) for parameter in parameters]
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _eagerly() -> AbstractContextManager[Any]:
    """Leave compiled code out; where nothing was compiled, do not load torch's compiler to say so."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()

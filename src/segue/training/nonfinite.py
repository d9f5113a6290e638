"""Non-finite values in training: find where inf or NaN appears first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue.core.blending import tensors
from segue.core.handover import Handover
from segue.core.tensor_files import local
from segue.errors import TrainingError
from segue.training.distributed import Processes
from segue.training.tasks import LossFn


def find(
    model: nn.Module, handover: Handover | None, batches: list[Any], loss: float, loss_fn: LossFn, processes: Processes
) -> str:
    """Say where inf or NaN appears first: in a batch, a weight, at a site, in the loss, or in a gradient."""
    before = _before_the_forward(model, handover, batches)
    known = torch.tensor(0.0 if before is None else 1.0)
    if processes.total(known).item() > 0:  # all processes run the forward below, or none
        return before or "Another process has inf or NaN in its part of the batch or in the weights"
    if handover is not None:
        sites = [_first_output(handover, batch, loss_fn) for batch in batches]  # all: processes stay in step
        if (site := next((site for site in sites if site is not None), None)) is not None:
            return f"The student's output at site {site!r} is inf or NaN"
    if not math.isfinite(loss):
        return "The outputs at the sites are finite; the loss is not"
    gradients = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    if (name := _first(reversed(gradients))) is not None:  # they spread from the end of the model backwards
        return f"The gradient of {_plain(name)!r} is inf or NaN{_at_site(name, handover)}"
    return "The gradient is inf or NaN in another process"


def _before_the_forward(model: nn.Module, handover: Handover | None, batches: list[Any]) -> str | None:
    if any(not bool(torch.isfinite(tensor).all()) for tensor in tensors(batches) if tensor.is_floating_point()):
        return "The batch itself contains inf or NaN"
    if (name := _first(model.named_parameters())) is not None:
        return f"The weight {_plain(name)!r} is inf or NaN{_at_site(name, handover)}"
    return None


def _first(named: Iterable[tuple[str, Tensor]]) -> str | None:
    return next((name for name, tensor in named if not bool(torch.isfinite(local(tensor)).all())), None)


def _first_output(handover: Handover, batch: Any, loss_fn: LossFn) -> str | None:
    """Run the forward again and return the first site whose student returns inf or NaN."""
    found: list[str] = []

    def listen(name: str) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if any(not bool(torch.isfinite(t).all()) for t in tensors(output) if t.is_floating_point()):
                found.append(name)

        return after

    handles = [seam.student.register_forward_hook(listen(name)) for name, seam in handover.seams.items()]
    try:
        with torch.no_grad(), handover.as_student():
            loss_fn(handover.model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _plain(name: str) -> str:
    return name.replace(".student.", ".")


def _at_site(name: str, handover: Handover | None) -> str:
    names = [] if handover is None else [site for site in handover.seams if name.startswith(f"{site}.")]
    return f", at site {names[0]!r}" if names else ""


def error(where: str, step: int, loss: float, norm: float, checkpoint: Path | None) -> TrainingError:
    """Build the error: which step, where, and what to resume from."""
    good = f"the last good checkpoint is {checkpoint}; " if checkpoint else "there is no checkpoint (give fit a folder); "
    return TrainingError(
        f"step {step} has no finite update: loss {loss:.6g}, gradient norm {norm:.6g}.",
        f"{where}.",
        f"{good}lower lr or clip, or skip such steps with Recipe(on_nan='skip').",
    )

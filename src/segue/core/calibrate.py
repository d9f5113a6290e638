"""Calibration: fit students to the outputs of their teachers on a few batches, before training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from segue.core.backbone import evaluating, plain_attention
from segue.core.blending import call_arguments, calling, captured_outputs, first_floating
from segue.core.seam import Seam
from segue.core.surgery import unreached
from segue.core.tensor_files import sharded_like
from segue.errors import DataError, PlanError, StudentError
from segue.students.attention.cache_copy import copy_caches
from segue.students.initialisation import LeastSquares, RegressionSums
from segue.students.layers import layers_of

if TYPE_CHECKING:
    from segue.core.handover import Handover


@dataclass(frozen=True)
class Fitted:
    """How far a student was from its teacher on the calibration batches: |difference| / |teacher|, before and after."""

    before: float
    after: float


def calibrate(
    handover: Handover,
    batches: Iterable[Any],
    method: LeastSquares,
    mask: Callable[[Any], Tensor | None],
    sites: Iterable[str] | None = None,
) -> dict[str, Fitted]:
    """Fit every student's output projection, or that of some sites, on the stream of the original model."""
    seams = {name: handover.seams[name] for name in (handover.seams if sites is None else sites)}
    maps = {name: method.projection(seam.student, seam.site) for name, seam in seams.items()}
    listeners = [_Listener(seam, maps[name]) for name, seam in seams.items()]
    run_original(handover, batches, mask, listeners)
    for listener in listeners:
        if listener.sums is None:
            raise unreached(listener.seam.site.name)
    return {listener.seam.site.name: listener.fit(method.ridge) for listener in listeners}


class Listener(Protocol):
    """What listens to one site while batches run through the original model."""

    mask: Tensor | None  # of the batch

    def leave(self) -> None: ...


def run_original(
    handover: Handover, batches: Iterable[Any], mask: Callable[[Any], Tensor | None], listeners: Sequence[Listener]
) -> None:
    """Run batches through the original model; the listeners leave at the end."""
    empty = True
    try:
        with torch.no_grad(), handover.as_teacher() as model, evaluating(model), plain_attention():
            for batch in batches:
                empty = False
                padding = mask(batch)
                if not isinstance(padding, Tensor | None):
                    raise PlanError(
                        f"calibrate(mask=...) must return a tensor or None, got {type(padding).__name__}.",
                        "It is called with each batch.",
                        "return 1 where a token counts and 0 where it is padding.",
                    )
                for listener in listeners:
                    listener.mask = padding
                args, kwargs = call_arguments(batch)
                with calling("batch"):
                    model(*args, **kwargs)
    finally:
        for listener in listeners:
            listener.leave()
    if empty:
        raise DataError("there are no batches.", "The iterable yields nothing.", "give one that yields at least one batch.")


class _Listener:
    """Run a student on the inputs of its teacher, and sum up the inputs and targets of its last linear map."""

    def __init__(self, seam: Seam, linear: nn.Linear) -> None:
        self.seam, self.linear = seam, linear
        self.mask: Tensor | None = None
        self.sums: RegressionSums | None = None
        layers = layers_of(seam.require_teacher())
        self._handles = [
            layers[0].register_forward_pre_hook(self._before, with_kwargs=True),
            layers[-1].register_forward_hook(self._after),
            linear.register_forward_hook(self._record),
        ]

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, _linear: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._features, self._mapped = args[0], output

    def _before(self, _teacher: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = copy_caches(args, kwargs)
        with evaluating(self.seam.student), captured_outputs():  # the model must not take them for its own
            self._output = first_floating(self.seam.student(*args, **kwargs), self.seam.site)

    def _after(self, _teacher: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        target = first_floating(output, self.seam.site)
        if self._mapped.numel() != self._output.numel() or not torch.equal(self._mapped.flatten(), self._output.flatten()):
            raise StudentError(
                f"LeastSquares() cannot fit the student at site {self.seam.site.name!r}.",
                "Its output is not the output of the linear map to fit: something comes after it.",
                "name the student's last linear map, or leave calibration out. Nothing was changed.",
            )
        x, y = self._features.flatten(0, -2), target.reshape(-1, target.shape[-1])
        guess = self._output.reshape(-1, target.shape[-1])
        if self.mask is not None and self.mask.numel() == len(x):
            real = self.mask.flatten().bool().to(x.device)
            x, y, guess = x[real], y[real], guess[real]
        if self.sums is None:
            self.sums = RegressionSums(x.shape[1], y.shape[1], x.device)
        self.sums.add(x, y, guess)

    def fit(self, ridge: float) -> Fitted:
        assert self.sums is not None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for part in self.sums.all():
                torch.distributed.all_reduce(part)
        weight, bias, left = self.sums.solve(ridge, self.linear.bias is not None)
        size = self.sums.square.item() or 1.0
        with torch.no_grad():
            self.linear.weight.copy_(sharded_like(weight.to(self.linear.weight.dtype), self.linear.weight))
            if bias is not None:
                self.linear.bias.copy_(sharded_like(bias.to(self.linear.bias.dtype), self.linear.bias))
        return Fitted((self.sums.missed.item() / size) ** 0.5, (left / size) ** 0.5)

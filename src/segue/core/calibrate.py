"""Calibration: fit students to the outputs of their teachers on a few batches, before training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from segue.core.backbone import evaluating, plain_attention
from segue.core.blending import call_arguments, calling
from segue.core.modes import View, Watch
from segue.core.surgery import unreached
from segue.core.tensor_files import full, sharded_like
from segue.core.views import isolated
from segue.errors import DataError, PlanError
from segue.students.calibration import Calibration, Observer, Stream

if TYPE_CHECKING:
    from segue.core.handover import Handover

Values: TypeAlias = list[tuple[nn.Parameter, Tensor]]


@dataclass(frozen=True)
class Fitted:
    """How far a student is from its teacher before and after: |difference| / |teacher|, by `calibrate` on held-out samples."""

    before: float
    after: float


def calibrate(
    handover: Handover,
    batches: Iterable[Any],
    method: Calibration,
    mask: Callable[[Any], Tensor | None],
    sites: Iterable[str] | None = None,
) -> dict[str, Fitted]:
    """Fit all students, or those of some sites, on the stream that the method chooses; a failure leaves them as they were."""
    seams = {name: handover.seams[name] for name in (handover.seams if sites is None else sites)}
    observers = {name: method.observer(seam.require_teacher(), seam.student, seam.site) for name, seam in seams.items()}
    passes = [list(observers)] if method.stream == "teacher" else [[name] for name in observers]
    given = batches if len(passes) == 1 else list(batches)
    fitted: dict[str, Fitted] = {}
    with torch.no_grad(), undone_on_failure() as earlier:
        for names in passes:
            _observe(handover, given, {name: observers[name] for name in names}, method.stream, mask)
            for name in names:
                fitted[name] = _fit(seams[name].student, observers[name], earlier)
    return fitted


def _observe(
    handover: Handover,
    batches: Iterable[Any],
    observers: Mapping[str, Observer],
    stream: Stream,
    mask: Callable[[Any], Tensor | None],
) -> None:
    """Pass the batches through the model, and show the observers what both sides return."""
    seen: set[str] = set()
    handles = [handle for observer in observers.values() for handle in observer.hooks()]
    try:
        with isolated(handover):
            for name, seam in handover.seams.items():
                compared = {"watch": Watch.PAIR, "measuring": True} if name in observers else {}
                seam.configure(view=View.STUDENT if stream == "student" else View.BLEND, hold=stream == "teacher", **compared)
            for padding, args, kwargs in calls_of(batches, mask):
                with calling("batch"):
                    handover.model(*args, **kwargs)
                for name, observer in observers.items():
                    seam = handover.seams[name]
                    for teacher, student in seam.records:
                        seen.add(name)
                        observer.observe(teacher, student, padding)
                    seam.records = []
    finally:
        for handle in handles:
            handle.remove()
    torch.clear_autocast_cache()  # weights that were cast without a gradient must not be used with one
    for name in observers:
        if name not in seen:
            raise unreached(name)


def calls_of(
    batches: Iterable[Any], mask: Callable[[Any], Tensor | None]
) -> Iterator[tuple[Tensor | None, tuple[Any, ...], dict[str, Any]]]:
    """Yield the padding mask of every batch and what the model is called with; refuse that there are none."""
    empty = True
    for batch in batches:
        empty = False
        padding = mask(batch)
        if not isinstance(padding, Tensor | None):
            raise PlanError(
                f"calibrate(mask=...) must return a tensor or None, got {type(padding).__name__}.",
                "It is called with each batch.",
                "return 1 where a token counts and 0 where it is padding.",
            )
        yield padding, *call_arguments(batch)
    if empty:
        raise DataError("there are no batches.", "The iterable yields nothing.", "give one that yields at least one batch.")


class Listener(Protocol):
    """What listens to one site while batches run through the original model."""

    mask: Tensor | None  # of the batch

    def leave(self) -> None: ...


def run_original(
    handover: Handover, batches: Iterable[Any], mask: Callable[[Any], Tensor | None], listeners: Sequence[Listener]
) -> None:
    """Run batches through the original model; the listeners leave at the end."""
    try:
        with torch.no_grad(), handover.as_teacher() as model, evaluating(model), plain_attention():
            for padding, args, kwargs in calls_of(batches, mask):
                for listener in listeners:
                    listener.mask = padding
                with calling("batch"):
                    model(*args, **kwargs)
    finally:
        for listener in listeners:
            listener.leave()


def _fit(student: nn.Module, observer: Observer, earlier: Values) -> Fitted:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for part in observer.sums():
            torch.distributed.all_reduce(part)
    parameters = dict(student.named_parameters())
    values, before, after = observer.fit({name: full(parameter.detach()) for name, parameter in parameters.items()})
    for name, value in values.items():
        set_(parameters[name], value, earlier)
    return Fitted(before, after)


@torch.no_grad()
def set_(parameter: nn.Parameter, value: Tensor, earlier: Values) -> None:
    """Give a parameter a value, and note the one that it had."""
    earlier.append((parameter, parameter.detach().clone()))
    parameter.copy_(sharded_like(value.to(parameter.device, parameter.dtype), parameter))


@contextmanager
def undone_on_failure() -> Iterator[Values]:
    """Write the values that were noted back, if a `with` block fails or is interrupted."""
    earlier: Values = []
    try:
        yield earlier
    except BaseException:
        with torch.no_grad():
            for parameter, value in reversed(earlier):
                parameter.copy_(value)
        raise

"""Views of a running handover: one side alone, both sides compared, and the handover isolated for a measurement."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from segue.core.backbone import evaluating, plain_attention
from segue.core.modes import View, Watch
from segue.core.seam import Seam
from segue.core.tensor_files import full
from segue.errors import HandoverError
from segue.similarity import Similarities, Similarity, measured, samples

if TYPE_CHECKING:
    from segue.core.handover import Handover

ISOLATED = ("reached", "blind", "records", "teacher_gradient")  # with its state, all that a measurement may change in a seam


class OneThread:
    """Refuse forwards of other threads while one thread shows a view, which all of them would see.

    A view is a state of the model, as its training mode is. Compiled code does not notice other threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None  # that shows a view
        self._depth = 0
        self._changes, self._changed_by = 0, 0
        self._forwards: dict[int, int] = {}  # for each thread in a forward, how many changes there had been

    def __reduce__(self) -> Any:
        return OneThread, ()  # a copy of a model is in no thread's hands

    @contextmanager
    def shows(self) -> Iterator[None]:
        """Let this thread show a view, and no other one."""
        me = threading.get_ident()
        with self._lock:
            if self._thread not in (None, me):
                raise _other_thread()
            self._thread = me
            self._depth += 1
            self._changes, self._changed_by = self._changes + 1, me
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                self._thread = me if self._depth else None
                self._changes, self._changed_by = self._changes + 1, me

    def before_forward(self) -> None:
        """Refuse a forward that would see the view of another thread."""
        me = threading.get_ident()
        if self._thread is not None and self._thread != me:
            raise _other_thread()
        self._forwards[me] = self._changes

    def after_forward(self) -> None:
        """Refuse the output of a forward during which another thread has shown a view."""
        me = threading.get_ident()
        if self._forwards.pop(me, self._changes) != self._changes and self._changed_by != me:
            raise _other_thread()


def _other_thread() -> HandoverError:
    return HandoverError(
        "two threads use a model while one of them shows a view of it.",
        "as_student(), as_teacher() and what measures with them change what the model shows, for all threads.",
        "let one thread at a time use the model, or give the other a model of its own: copy.deepcopy(handover).model.",
    )


@contextmanager
def viewing(handover: Handover, view: View) -> Iterator[nn.Module]:
    """Show one side at every site, to this thread."""
    with handover.one_thread.shows():
        before = [(seam, seam.state.view) for seam in handover.seams.values()]
        try:
            for seam, _ in before:
                seam.configure(view=view)
            yield handover.model
        finally:
            for seam, earlier in before:
                seam.configure(view=earlier)


@contextmanager
def recording(seams: Iterable[Seam], watch: Watch) -> Iterator[None]:
    """Record outputs at the sites for a measurement, apart from those for the losses."""
    before = [(seam, seam.state, seam.records, seam.blind) for seam in seams]
    for seam, *_ in before:
        seam.records = []
        seam.configure(watch=watch, measuring=True)
    try:
        yield
    finally:
        for seam, state, records, blind in before:
            seam.records, seam.blind = records, blind
            seam.configure(watch=state.watch, measuring=state.measuring)


@contextmanager
def comparing(
    handover: Handover, padding_mask: Tensor | None, names: Sequence[str] = Similarity._fields
) -> Iterator[Similarities]:
    """Compare the two sides in the forwards of a `with` block, which show the students alone, in evaluation.

    Measures that are not named are NaN, unless the schedule observes them.
    """
    similar = Similarities()
    seams = handover.seams
    observe = getattr(handover.plan.schedule, "observe", None)
    names = names if observe is None else Similarity._fields
    with torch.no_grad(), recording(seams.values(), Watch.PAIR), handover.as_student(), evaluating(handover.model):
        yield similar
        torch.clear_autocast_cache()  # weights that were cast without a gradient must not be used with one
        found: dict[str, tuple[list[Tensor], list[int]]] = {}
        for name, seam in seams.items():
            if seam.records:
                pairs = [[handover.auxiliary.with_usual_axis(handover.model, name, x) for x in pair] for pair in seam.records]
                full = [pair for pair in pairs if samples(pair[1])] or pairs  # what is empty throughout is refused
                values = [value for t, s in full for value in measured(names, t, s, padding_mask)]
                found[name] = values, [samples(s) for _, s in full]
        similar |= _on_host(found, names)
    handover.compared = handover.steps_done, similar
    if observe is not None:
        observe(handover.progress, similar)


def _on_host(found: dict[str, tuple[list[Tensor], list[int]]], names: Sequence[str]) -> dict[str, Similarity]:
    """Read what was measured at all sites at once, and average each site's forwards."""
    values = [value for of_site, _ in found.values() for value in of_site]
    flat = iter(torch.stack([value.to(values[0].device) for value in values]).tolist() if values else ())
    nothing = Similarity(*[math.nan] * len(Similarity._fields))
    return {
        site: nothing._replace(**dict(zip(names, _mean([[next(flat) for _ in names] for _ in counts], counts), strict=True)))
        for site, (_, counts) in found.items()
    }


def _mean(measures: list[list[float]], counts: list[int]) -> list[float]:
    """Average over the samples of all forwards, each of which is a mean over its own."""
    parts = [count * len(counts) / sum(counts) for count in counts]  # 1 if all have equally many
    columns = zip(*measures, strict=True)
    return [sum(p * value for p, value in zip(parts, column, strict=True)) / len(parts) for column in columns]


@contextmanager
def isolated(handover: Handover) -> Iterator[None]:
    """Let a block configure the seams freely, in evaluation and without compiled code; everything is restored afterwards."""
    with handover.one_thread.shows():
        seams = list(handover.seams.values())
        before = [(seam.state, {name: getattr(seam, name) for name in ISOLATED}) for seam in seams]
        refuses, handover.refuses_unreached = handover.refuses_unreached, False
        for seam in seams:
            seam.records, seam.reached = [], set()
            seam.configure(watch=Watch.NOTHING)
        try:
            with evaluating(handover.model), plain_attention(), eager_mode():
                yield
        finally:
            handover.refuses_unreached = refuses
            for seam, (state, values) in zip(seams, before, strict=True):
                seam.configure(**vars(state))
                for name, value in values.items():
                    setattr(seam, name, value)


def gradients(
    model: nn.Module, outputs: Sequence[Tensor], parameters: Sequence[Tensor], directions: Sequence[Tensor] | None = None
) -> list[Tensor | None]:
    """Return the gradients of outputs and leave `.grad` as it is; None where nothing depends on a parameter."""
    if not outputs:
        return [None] * len(parameters)
    if not any(hasattr(parameter, "full_tensor") for parameter in parameters):
        return list(torch.autograd.grad(outputs, parameters, directions, allow_unused=True))
    before = [(parameter, parameter.grad) for parameter in model.parameters()]  # FSDP computes gradients in backward() only
    try:
        for parameter, _ in before:
            parameter.grad = None
        torch.autograd.backward(outputs, directions)
        return [None if parameter.grad is None else full(parameter.grad) for parameter in parameters]
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def eager_mode() -> AbstractContextManager[Any]:
    """Leave compiled code out; where nothing was compiled, do not load torch's compiler for it."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()

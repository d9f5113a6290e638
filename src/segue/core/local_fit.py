"""Local fit: students learn what their teachers returned in one forward of the original model, several updates for each.

While alpha is 1 no gradient passes the backbone. So the model runs once, without gradients and with its teachers alone, and
what each site was called with and returned is recorded. From these features every student learns as in a regression of its
own: in sub-batches, and as often as is asked. A batch is cut by every n-th row, so that processes which hold consecutive
parts of it cut it as one process does.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from segue.border import PositiveInt, checked
from segue.core import randomness
from segue.core.backbone import plain_attention
from segue.core.blending import first_floating, merge, tensors
from segue.core.seam import Seam, kind_of_call
from segue.core.views import eager_mode
from segue.errors import HandoverError
from segue.phases import Phase
from segue.similarity import relative_error
from segue.students.attention.cache_copy import with_caches
from segue.students.layers import layers_of

if TYPE_CHECKING:
    from segue.core.handover import Handover

MEMORY = 0.9  # of the running error: the share of the steps before
ALIKE = 0.03  # relative error up to which two forwards of one teacher are the same: bfloat16 rounds in another order


class LocalFit:
    """What a handover knows of its local fit: which calls may be cut, and how far each student is from its teacher."""

    def __init__(self) -> None:
        self.proved: set[tuple[Any, ...]] = set()  # calls that the teacher has answered alike in parts
        self.errors: dict[str, float] = {}  # a running mean of the relative error at each site; saved and resumed
        self.order: list[str] = []  # in which a complete forward calls the sites

    def fitted(self, tolerance: float) -> set[str]:
        """Return the sites that need no more updates."""
        return {name for name, error in self.errors.items() if error < tolerance}

    def state_dict(self) -> dict[str, float]:
        """Return what a resume needs."""
        return dict(self.errors)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue where an earlier process stopped."""
        if not all(type(error) is float and 0 <= error < math.inf for error in state.values()):
            raise ValueError(f"its errors are {state!r:.80}")
        self.errors = dict(state)

    def observe(self, errors: dict[str, float]) -> None:
        """Add the relative errors of a step."""
        for name, error in errors.items():
            if not math.isfinite(error):
                continue  # the step is left out, or ends the training
            before = self.errors.get(name, error)
            self.errors[name] = MEMORY * before + (1 - MEMORY) * error


@dataclass
class Call:
    """One call of a teacher: what it was called with, and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    without_cache: bool
    precision: tuple[str, torch.dtype] | None = None  # of autocast in the forward, which may have ended since: device and type
    first: Tensor | None = None  # the output of the first layer, which shows whether the call can be cut
    output: Any = None

    def autocast(self) -> AbstractContextManager[Any]:
        """Compute as in the forward."""
        return nullcontext() if self.precision is None else torch.autocast(self.precision[0], self.precision[1])

    def part(self, index: int, parts: int, tree: Any) -> Any:
        """Cut a tree of tensors: those with as many rows as the input."""
        if parts == 1:
            return tree
        return tree_map_only(Tensor, lambda x: x[index::parts].contiguous() if x.dim() and len(x) == self.rows else x, tree)


@dataclass
class Features:
    """What the sites were called with and returned in forwards of the original model."""

    handover: Handover
    mask: Tensor | None
    sites: list[str]  # all that are guided, except those that rest
    before_loss: Callable[[], None]
    calls: dict[str, list[Call]] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)  # the guidance at each site in the latest loss
    squares: dict[str, list[Tensor]] = field(default_factory=dict)  # relative errors of the updates so far, by site
    order: list[str] = field(default_factory=list)  # in which the sites have returned

    @property
    def rows(self) -> int:
        """The largest number of sub-batches."""
        return min((call.rows for calls in self.calls.values() for call in calls), default=0)

    def sizes(self, index: int, parts: int) -> tuple[int, ...]:
        """Return the rows of every call in a sub-batch."""
        return tuple(len(range(index, call.rows, parts)) for calls in self.calls.values() for call in calls)

    @checked
    def losses(self, *, split: PositiveInt | None = None, reuse: PositiveInt | None = None) -> Iterator[Tensor]:
        """Yield the guidance of every sub-batch, `reuse` times over; each is for one update of the optimizer.

        Each of `split` sub-batches has every split-th sample; a batch of fewer samples has one for each. By default both
        are those of the phase.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise HandoverError(
                "features.losses() is for one process.",
                "Its gradients do not pass DDP, so each process would train students of its own.",
                "use segue.fit and Phase(local=True, split=..., reuse=...), which averages them.",
            )
        if self.sites and not self.calls:
            raise HandoverError(
                "features() has recorded nothing.",
                "The model was not called inside the block, or without any site.",
                "call it there: with handover.features() as features: model(images).",
            )
        phase = self.handover.phase or Phase(name="local fit", local=True)
        return self._losses(split or phase.split, reuse or phase.reuse, phase.tolerance)

    def _losses(self, split: int, reuse: int, tolerance: float) -> Iterator[Tensor]:
        for _ in range(reuse if self.calls else 0):
            for index in range(min(split, self.rows)):
                yield self.loss(index, split, measured=tolerance > 0)
        self.observe()

    def loss(self, index: int, parts: int, *, measured: bool) -> Tensor:
        """Return the guidance of one sub-batch, summed over the sites; where measured, remember their errors."""
        self.before_loss()
        auxiliary = self.handover.auxiliary
        total = torch.zeros((), device=next(iter(self.handover.seams.values())).student_weight.device)
        mask = self.mask if self.mask is None or parts == 1 else self.mask[index::parts]
        for name, calls in self.calls.items():
            pairs = [self._pair(self.handover.seams[name], call, index, parts) for call in calls]
            part = auxiliary.guide(self.handover.model, name, pairs, mask).to(total.device)
            self.parts[name] = part.detach()
            total = total + part
            if measured:
                self._measure(name, pairs, mask)
        return total

    def observe(self, average: Callable[[Tensor], Tensor] = lambda errors: errors) -> None:
        """Add the measured errors to those of the steps before, averaged over processes."""
        if self.squares:
            means = torch.stack([torch.stack(each).mean().float() for each in self.squares.values()])
            self.handover.local.observe(dict(zip(self.squares, average(means).sqrt().tolist(), strict=True)))

    @torch.no_grad()
    def _measure(self, name: str, pairs: list[tuple[Tensor, Tensor]], mask: Tensor | None) -> None:
        model, read = self.handover.model, self.handover.auxiliary.with_usual_axis
        errors = [relative_error(read(model, name, t), read(model, name, s), mask).mean() for t, s in pairs]
        self.squares.setdefault(name, []).append(torch.stack(errors).mean())

    def _pair(self, seam: Seam, call: Call, index: int, parts: int) -> tuple[Tensor, Tensor]:
        self._prove(seam, call, parts)
        args, kwargs, target = call.part(index, parts, (call.args, call.kwargs, call.output))
        with call.autocast():
            output = seam.call_student(args, kwargs)
            if not seam.state.compared:
                merge(target, output, lambda _, s: s, seam.site)
                seam.configure(compared=True)
        return first_floating(target, seam.site), first_floating(output, seam.site)

    def _prove(self, seam: Seam, call: Call, parts: int) -> None:
        """Let the teacher itself show that a call is the same without a cache, and in parts."""
        whole = min(parts, call.rows) < 2
        cut = () if whole else tuple(x.dim() > 0 and len(x) == call.rows for x in tensors((call.args, call.kwargs)))
        kind = (seam.site.name, cut, call.without_cache, kind_of_call(call.args, call.kwargs))
        if kind in self.handover.local.proved:
            return
        if not whole or call.without_cache:
            args, kwargs, target = call.part(0, parts, (call.args, call.kwargs, call.first))
            with torch.no_grad(), call.autocast():
                try:
                    again = layers_of(seam.require_teacher())[0](*args, **kwargs)
                except torch.OutOfMemoryError:
                    raise
                except (RuntimeError, ValueError, TypeError, IndexError):
                    again = None  # a call that does not work is not the same
                torch.clear_autocast_cache()
            if again is None or not _alike(target, first_floating(again, seam.site)):
                raise _cannot_be_cut(seam, call, parts)
        self.handover.local.proved.add(kind)


class _EnoughError(BaseException):
    """Leave a forward: all sites have returned. Not an Exception, which a model may catch."""


@contextmanager
def recording(
    handover: Handover, mask: Tensor | None, before_loss: Callable[[], None], *, complete: bool = True
) -> Iterator[Features]:
    """Record what the sites are called with and return in the forwards of a `with` block: those of the original model.

    Unless `complete`, the block ends when the last site has returned, so that nothing after it is computed. The first such
    forward is complete, and shows which site that is: where one is called twice, all forwards are complete.
    """
    phase, copies = handover.phase, _Copies()
    rest = handover.local.fitted(phase.tolerance if phase is not None else 0.0)
    sites = [name for name in handover.auxiliary.guidance if name not in rest]
    features = Features(handover, mask, sites, before_loss)
    known = [name for name in handover.local.order if name in sites]
    enough = None if complete or sorted(known) != sorted(sites) else len(known)
    random: list[dict[str, Any]] = []  # as a forward that ends early leaves it

    def returned(name: str) -> None:
        features.order.append(name)
        if len(features.order) == enough:
            raise _EnoughError
        if not complete and enough is None:
            random[:] = [randomness.states()]

    handles = [handle for name in sites for handle in _listen(features, handover.seams[name], copies, returned)]
    try:
        with torch.no_grad(), handover.as_teacher(), plain_attention(), eager_mode():
            yield features
        if not complete:
            handover.local.order = handover.local.order or features.order
    except _EnoughError:
        pass
    finally:
        for handle in handles:
            handle.remove()
    if random:
        randomness.restore(random[0])
    torch.clear_autocast_cache()  # weights that were cast without a gradient must not be used with one


def _listen(features: Features, seam: Seam, copies: _Copies, returned: Callable[[str], None]) -> list[RemovableHandle]:
    """Record the calls of one site."""
    layers, name = layers_of(seam.require_teacher()), seam.site.name

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # the teacher is about to write to a cache, from which the student would read; in training there is no past in it
        without = with_caches(lambda _: None, args, kwargs)
        kept: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(Tensor, copies, without)
        call = Call(kept[0], kept[1], _rows(args, kwargs), without_cache=without[0] is not args, precision=_precision(kept))
        features.calls.setdefault(name, []).append(call)

    def after_first(_module: nn.Module, _args: Any, output: Any) -> None:
        features.calls[name][-1].first = copies(first_floating(output, seam.site))

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        kept = first_floating(output, seam.site) if seam.state.compared else output
        features.calls[name][-1].output = tree_map_only(Tensor, copies, kept)
        returned(name)

    return [
        layers[0].register_forward_pre_hook(before, with_kwargs=True),
        layers[0].register_forward_hook(after_first),
        layers[-1].register_forward_hook(after),
    ]


def _precision(tree: Any) -> tuple[str, torch.dtype] | None:
    device = next((x.device.type for x in tensors(tree) if not x.is_meta), "cpu")
    return (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    found = [x for x in tensors((args, kwargs)) if x.dim()]
    return len(next((x for x in found if x.is_floating_point()), found[0])) if found else 0


class _Copies:
    """Copy tensors, which later code of the model may change in place; what several sites get is copied once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        original, version, copied = self._known.get(id(x), (None, 0, x))
        if original is None or original() is not x or version != x._version:
            version, copied = x._version, _copied(x)
            self._known[id(x)] = weakref.ref(x), version, copied
        return copied


def _copied(x: Tensor) -> Tensor:
    """Copy a tensor; one that is expanded, as masks are, stays so."""
    base = x.detach()
    for axis, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[axis] > 1:
            base = base.narrow(axis, 0, 1)
    return base.clone().expand(x.shape)


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.is_meta:
        return a.shape == b.shape
    wide = torch.promote_types(a.dtype, torch.float32)
    known, found = a.to(wide), b.to(wide)
    return bool(torch.linalg.vector_norm(found - known) <= ALIKE * torch.linalg.vector_norm(known))


def _cannot_be_cut(seam: Seam, call: Call, parts: int) -> HandoverError:
    shapes = [tuple(x.shape) for x in tensors((call.args, call.kwargs))]
    if parts == 1:
        return HandoverError(
            f"the call of site {seam.site.name!r} cannot be repeated without its cache.",
            "The teacher returns something else then.",
            "call the model without a cache (use_cache=False).",
        )
    return HandoverError(
        f"a batch cannot be cut at site {seam.site.name!r}.",
        f"Its teacher, called with every {parts}-th row of {shapes}, does not return these rows of its output.",
        "use split=1, with reuse= for more updates; this site mixes the samples of a batch, or has them in another axis.",
    )

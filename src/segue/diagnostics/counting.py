"""Count what a step costs: floating-point operations, bytes saved for the backward pass, bytes alive. Nothing is timed."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from segue.core.backbone import plain_attention
from segue.core.blending import padding_mask
from segue.core.handover import replace_
from segue.core.local_fit import Features
from segue.core.modes import Watch
from segue.core.step_state import StepState, progress_at, step_state
from segue.core.steps_taken import StepsTaken, site_of, work_of
from segue.diagnostics.shapes import drop_values_, fused_attention, shape_of
from segue.errors import PlanError, SegueWarning
from segue.phases import Phase, Rates, at
from segue.plan import Plan
from segue.students.layers import layers_of
from segue.training.local_step import from_features, needs_output
from segue.training.tasks import LossFn, scalar


class Uncounted(TorchDispatchMode):
    """Find operators with real work for which the counter of operations has no formula."""

    PLAIN = ("aten", "prim", "prims", "profiler")  # an optimizer leaves marks of the profiler
    HEAVY = ("attention", "attn", "mm", "mv", "matmul", "conv", "linear", "lstm", "gru", "rnn", "transformer", "_fft_", "cdist",
             "linalg", "cholesky", "triangular")  # fmt: skip
    LIGHT = ("linalg_vector_norm",)

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted = counter.flop_registry
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        heavy = name not in self.LIGHT and any(word in name for word in self.HEAVY)
        if packet not in self.counted and (space not in self.PLAIN or heavy):
            self.found.add(f"{space}::{name}")
        return func(*args, **(kwargs or {}))


def flops(run: Callable[[], object]) -> int:
    """Count the operations of matrix products, convolutions, attention and Fourier transforms, forward and backward.

    Attention runs as plain matrix products here, because a fused kernel hides them from the counter. A Fourier transform of
    length N counts 5 N log2 N, one from or to real numbers half of that. An operator without a formula gives a warning.
    """
    with _counting() as counter:
        run()
    return int(counter.get_total_flops())


def module_flops(run: Callable[[], object], modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """Count the operations inside modules, by name."""
    found = dict.fromkeys(modules, 0)

    def enters(name: str) -> Callable[..., None]:
        return lambda *_: found.update({name: found[name] - int(counter.get_total_flops())})

    def leaves(name: str) -> Callable[..., None]:
        return lambda *_: found.update({name: found[name] + int(counter.get_total_flops())})

    parts = [(name, part) for name, module in modules.items() for part in layers_of(module)]
    handles = [part.register_forward_pre_hook(enters(name)) for name, part in parts]
    handles += [part.register_forward_hook(leaves(name)) for name, part in parts]
    try:
        with _counting() as counter:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return found


@contextmanager
def _counting() -> Iterator[FlopCounterMode]:
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    with sdpa_kernel(SDPBackend.MATH), plain_attention(), Uncounted(counter) as uncounted, counter:
        yield counter
    if uncounted.found:
        warnings.warn(
            f"operations are counted without those of {', '.join(sorted(uncounted.found))}, which have no formula. "
            "Hint: give them one with torch.utils.flop_counter.register_flop_formula.",
            SegueWarning,
            stacklevel=4,
        )


def _fused_forward(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _fused_backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


def _complex_transform(x: Any, dim: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _transform(5.0, x, dim)


def _real_to_complex(x: Any, dim: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _transform(2.5, x, dim)


def _complex_to_real(x: Any, dim: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _transform(2.5, out_shape, dim)


def _transform(factor: float, shape: Any, dims: Any) -> int:
    """Count one transform of length N, the product of its dimensions, for every place in the others."""
    length: int = math.prod(shape[dim] for dim in dims)
    places: int = math.prod(shape)
    return round(factor * places * math.log2(length))


def _triangular_solve(matrix: Any, right: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    places: int = math.prod(right)
    return places * int(matrix[-1])


# What torch's own counter counts as 0: the CPU's fused attention, if called directly, Fourier transforms, triangular solutions.
FORMULAS = {
    torch.ops.aten.linalg_solve_triangular: _triangular_solve,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _fused_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _fused_backward,
    torch.ops.aten._fft_c2c: _complex_transform,
    torch.ops.aten._fft_r2c: _real_to_complex,
    torch.ops.aten._fft_c2r: _complex_to_real,
}


def saved_bytes(run: Callable[[], object], exclude: Iterable[Tensor]) -> int:
    """Count the bytes that autograd saves for the backward pass, each storage once, without those of the given tensors."""
    known = {tensor.untyped_storage()._cdata for tensor in exclude}
    kept: dict[int, torch.UntypedStorage] = {}  # references keep the addresses unique

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return tensor.detach()  # not the tensor itself: an output referenced by its own graph is never freed

    with fused_attention(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in kept.values())


class PeakBytes(TorchDispatchMode):
    """Track the bytes of the tensors that a `with` block creates; what one operator uses inside is not seen.

    >>> with PeakBytes() as memory:
    ...     _ = torch.zeros(100) + torch.zeros(100)
    >>> memory.peak
    1200
    """

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive = {tensor.untyped_storage()._cdata for tensor in exclude}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = [tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._track(tensor.untyped_storage(), known)
        return output

    def _track(self, storage: torch.UntypedStorage, known: list[int]) -> None:
        name, size = storage._cdata, storage.nbytes()
        if name in self._alive or name in known:
            return
        self._alive.add(name)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, name, size)

    def _freed(self, name: int, size: int) -> None:
        self._alive.discard(name)
        self.now -= size


def cache_bytes(cache: Any) -> int:
    """Return the bytes that the layers of a Hugging Face cache hold, each storage once."""
    storages = [x.untyped_storage() for layer in cache.layers for x in _inside(vars(layer).values())]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _inside(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _inside(value.values())


class StepCost(NamedTuple):
    """The cost of one step."""

    flops: int  # forward, guidance, distillation and backward
    saved_bytes: int  # for the backward pass, without parameters and buffers


class StepCosts:
    """Count what the steps of a handover cost, one step of each kind, by taking it on a copy of the model.

    With `values=False` the copy loses its values after the students are built: the same steps in a fraction of the time.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        total: int,
        batch: Any,
        loss_fn: LossFn,
        *,
        values: bool = True,
        steps_taken: StepsTaken | None = None,
    ) -> None:
        model = copy.deepcopy(model).train()
        self.handover = replace_(model, dataclasses.replace(plan, release=False), total_steps=total)
        if not values:
            drop_values_(model, self.handover.auxiliary.original)
            batch = shape_of(batch)
        self._sizes = {name: sum(p.numel() for p in seam.parameters()) for name, seam in self.handover.seams.items()}
        self.total = total
        self.batch = batch
        self.loss_fn = loss_fn
        if steps_taken is not None and (steps_taken.sites, steps_taken.total) != (len(self._sizes), total):
            raise PlanError(
                "steps_taken must be those of a run with this plan.",
                f"They have {steps_taken.sites} sites and {steps_taken.total} steps, the plan {len(self._sizes)} and {total}.",
                "give the plan and total_steps of the run: segue.cost(..., total_steps=fit.total_steps). Nothing was changed.",
            )
        self.taken = {} if steps_taken is None else steps_taken.by_step()  # what sites did that the plan does not say
        self._states: dict[int, StepState] = {}
        self._known: dict[tuple[Any, ...], StepCost] = {}
        self._first = True

    def __getitem__(self, step: int) -> StepCost:
        """Return the cost of one step."""
        kind = self._kind(step)
        if kind not in self._known:
            if self._first and step > 0:
                self[0]  # the first forward compares the outputs of both sides, later ones do not
            self._first = False
            self.handover.resume_at(step)
            self.handover.follow(self.state(step))
            phase = self.handover.phase
            local = phase is not None and from_features(phase)
            counted = self._count_local(phase, step) if phase is not None and local else self._count(self._loss)
            self._known[kind] = counted
        return self._known[kind]

    def only(self, step: int) -> StepCost:
        """Return the cost of one step after the first, where no other will be asked for."""
        assert step > 0
        self._first = False
        return self[step]

    def state(self, step: int) -> StepState:
        """Return what a step means at every site: as it was taken, where that is known, or as it is planned."""
        if step not in self._states:
            planned = step_state(self.handover.plan, self.handover.sites, step, self.total)
            taken = (site_of(one)[0] for one in self.taken.get(step, ()))
            self._states[step] = StepState(planned.sites | dict(zip(planned.sites, taken, strict=False)), planned.distill)
        return self._states[step]

    def close(self) -> None:
        """Let the copy go: optimizers no longer tell it of their steps."""
        self.handover.forget()

    def _resting(self, step: int) -> list[str]:
        return [name for name, one in zip(self._sizes, self.taken.get(step, ()), strict=False) if site_of(one)[1]]

    def students_alone(self) -> StepCost:
        """Return the cost of a step in which only students run, also where guidance keeps the teachers at work."""
        with self.handover.recording(Watch.NOTHING), self.handover.as_student():
            return self._count(lambda: scalar(self.loss_fn(self.handover.model, self.batch)))

    def teacher_pass(self) -> int:
        """Return the operations of one forward of the original model."""
        with torch.no_grad(), self.handover.as_teacher():
            return flops(lambda: self.loss_fn(self.handover.model, self.batch))

    def teachers(self) -> dict[str, int]:
        """Return the operations of one forward of every replaced module, by site."""
        modules = {name: seam.teacher for name, seam in self.handover.seams.items() if seam.teacher is not None}
        with torch.no_grad(), self.handover.as_teacher():
            return module_flops(lambda: self.loss_fn(self.handover.model, self.batch), modules)

    def _kind(self, step: int) -> tuple[Any, ...]:
        """Name the kind of a step: what the first site does, and how many of the others do what.

        Sites of one size are assumed to cost the same; before the first site, no gradient is needed.
        """
        now, resting = self.state(step), self._resting(step)
        first, *others = ((self._sizes[name], *work_of(site), name in resting) for name, site in now.sites.items())
        phase = at(self.handover.plan.phases, progress_at(step, self.total))[0] if self.handover.plan.phases else None
        updates = None if phase is None else (phase.split, phase.reuse, phase.tolerance > 0, phase.task > 0)
        return step == 0, now.distill > 0, updates, first, *sorted(Counter(others).items())

    def _count_local(self, phase: Phase, step: int) -> StepCost:
        """Count one forward of the original model, in the first step a complete one, and its passes over the batch.

        As if no site rested, unless it is known that one did.
        """
        handover, trained = self.handover, self._trained()

        def record() -> Features:
            with handover.features(padding_mask(self.batch), complete=needs_output(handover, phase)) as features:
                self.loss_fn(handover.model, self.batch)
            return features

        def learn(features: Features, index: int = 0) -> None:
            if features.calls:  # all sites may rest
                torch.autograd.grad(features.loss(index, phase.split, measured=False), trained, allow_unused=True)

        handover.local.errors = dict.fromkeys(self._resting(step), 0.0)
        with torch.random.fork_rng(devices=[]):
            found: list[Features] = []
            complete = flops(lambda: found.append(record()))
            features = found[0]
            known = [x for x in tree_leaves([list(vars(call).values()) for calls in features.calls.values() for call in calls])
                     if isinstance(x, Tensor)]  # fmt: skip
            held = sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in known}.values())
            around = [*known, *handover.model.parameters(), *handover.model.buffers()]
            proving = flops(lambda: learn(features))  # in the first step, whether calls can be cut; no later update does
            proving -= flops(lambda: learn(features))
            kept = saved_bytes(lambda: learn(features), around)
            like: dict[tuple[int, ...], list[int]] = {}  # sub-batches of the same sizes cost the same
            for index in range(min(phase.split, features.rows)):
                like.setdefault(features.sizes(index, phase.split), []).append(index)
            once = sum(len(same) * flops(partial(learn, features, same[0])) for same in like.values())
            return StepCost((complete if step == 0 else flops(record)) + proving + phase.reuse * once, held + kept)

    def _trained(self) -> list[Tensor]:
        """Return what trains in the phase of this step."""
        rates = None if self.handover.phase is None else self.handover.phase.lr
        frozen = rates.frozen if isinstance(rates, Rates) else set()
        kinds = self.handover.parameter_kinds()
        return [parameter for name, parameter in self.handover.named_parameters() if kinds[name] not in frozen]

    def _loss(self) -> Tensor:
        loss = self.handover.weighted(scalar(self.loss_fn(self.handover.model, self.batch)))
        return loss + self.handover.aux_loss(padding_mask(self.batch))

    def _count(self, loss: Callable[[], Tensor]) -> StepCost:
        model, trained = self.handover.model, self._trained()
        with torch.random.fork_rng(devices=[]):
            kept = saved_bytes(loss, [*model.parameters(), *model.buffers()])
            return StepCost(flops(lambda: torch.autograd.grad(loss(), trained, allow_unused=True)), kept)

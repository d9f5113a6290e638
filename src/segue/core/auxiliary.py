"""The auxiliary losses of a running handover: guidance at the sites, distillation at the model's output."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from segue.core.backbone import evaluating, plain_attention
from segue.core.blending import first_floating, tensors
from segue.core.closed_loop import Reading
from segue.core.modes import Watch
from segue.core.seam import Seam
from segue.core.step_state import StepState
from segue.errors import HandoverError, PlanError
from segue.losses import (
    FeatureAxis,
    FeatureGuidance,
    LogitDistillation,
    OnTeacherStream,
    PairLoss,
    PredictionDistillation,
    TopProbabilities,
    is_relative_error,
    stated_axis,
)
from segue.plan import Plan
from segue.similarity import feature_axis, move_features, samples
from segue.students.layers import layers_of

DIVERGENCE = "divergence of the logits"  # no site has a name with spaces
Call = tuple[tuple[Any, ...], dict[str, Any], Any]


def frozen_original(model: nn.Module, plan: Plan) -> nn.Module | None:
    """Copy the model where a full teacher pass needs it: a backbone that trains is no longer the original."""
    needed = plan.distill is not None or isinstance(plan.guidance, OnTeacherStream)
    if not needed or plan.train != "all":
        return None
    copied = copy.deepcopy(model).requires_grad_(False)
    copied.eval()
    return copied


class AuxiliaryLosses:
    """Turn the outputs that a training forward recorded into named losses."""

    def __init__(self, plan: Plan, seams: dict[str, Seam], original: nn.Module | None) -> None:
        self.plan = plan
        self.seams = seams
        self.original = original
        self.cached: CachedTeacher | None = None  # what the original returned, computed before the run
        self.calls: list[Call] = []
        self.guidance: dict[str, float] = {}
        self.distill = 0.0
        self.measured: list[str] = []  # sites whose relative error this step reads, for a closed loop
        self._signals: dict[str, Tensor] = {}  # by site, and DIVERGENCE: (sum over samples, samples), on the device
        self._parts: dict[str, Tensor] | None = None
        self._axes: dict[tuple[str, int, int, int], int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "calls": [], "_parts": None, "_signals": {}}  # a copy has no graph to wait for

    @property
    def on_teacher_stream(self) -> bool:
        return isinstance(self.plan.guidance, OnTeacherStream)

    def follow(self, state: StepState, together: bool) -> None:
        """Take the strengths of a new step, and let the seams record what its losses need.

        Compiled code records all sites as long as one is guided (`together`): each change is a recompile.
        """
        self.guidance = {name: site.guidance for name, site in state.sites.items() if site.guidance > 0}
        self.distill = state.distill
        recorded = Watch.STUDENT if self.on_teacher_stream else Watch.PAIR
        for name, seam in self.seams.items():
            watched = name in self.guidance or (together and self.guidance)
            seam.configure(watch=recorded if watched else Watch.NOTHING)
        self.clear()

    @property
    def wants_calls(self) -> bool:
        """The inputs and outputs of the model are needed, for a second pass of the original."""
        return self.distill > 0 or (self.on_teacher_stream and bool(self.guidance))

    @property
    def latest(self) -> dict[str, Tensor]:
        """The parts of the latest `aux_loss` of this step, by name."""
        return self._parts or {}

    def clear(self) -> None:
        self.calls.clear()
        self._parts = None
        self._signals = {}
        for seam in self.seams.values():
            seam.records.clear()
            seam.blind = False

    def refuse_unused(self) -> None:
        """Refuse a step whose losses were recorded and never computed."""
        waiting = self.calls or any(seam.records for seam in self.seams.values())
        if waiting and self._parts is None:
            raise HandoverError(
                "aux_loss() is missing before step().",
                "The plan has guidance or distillation, and a training forward has recorded outputs for it.",
                "add it to the loss: loss = task_loss + handover.aux_loss().",
            )

    def losses(
        self, model: nn.Module, mask: Tensor | None, as_teacher: _AsTeacher, output_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the weighted parts of the forwards since the last call, by name."""
        if not (torch.is_grad_enabled() and model.training):
            return {}
        if not (self.guidance or self.distill > 0):
            return {}
        self._refuse_blind()
        if not (self.calls or any(seam.records for seam in self.seams.values())):
            if self._parts is not None:
                return self._parts
            raise HandoverError(
                "aux_loss() has nothing to compute its losses from.",
                "No training forward has run since the last step.",
                "call the model in training mode first, then aux_loss(), then backward().",
            )
        self._parts = self._compute(model, mask, mask if output_mask is None else output_mask, as_teacher)
        self.calls.clear()
        return self._parts

    def _compute(
        self, model: nn.Module, mask: Tensor | None, output_mask: Tensor | None, as_teacher: _AsTeacher
    ) -> dict[str, Tensor]:
        students = {name: _taken(seam) for name, seam in self.seams.items()}
        passes = self.wants_calls and self.cached is None
        outputs, streams = self._teacher_pass(model, as_teacher) if passes else ([], {})
        parts: dict[str, Tensor] = {}
        for name in self.guidance:
            pairs = students.pop(name)  # freed as soon as its loss is computed
            if self.on_teacher_stream:
                pairs = [(*t, *s) for t, s in zip(streams[name], pairs, strict=True)]
            if not pairs:
                continue
            parts[f"guidance/{name}"] = self.guide(model, name, pairs, mask)
        if self.distill > 0 and self.plan.distill is not None and self.calls:
            ours = [logits_of(self.plan.distill, output) for _, _, output in self.calls]
            theirs: list[Any] = [logits_of(self.plan.distill, output) for output in outputs]
            if self.cached is not None:
                theirs = [self.cached(args, kwargs, x) for (args, kwargs, _), x in zip(self.calls, ours, strict=True)]
            pairs = list(zip(theirs, ours, strict=True))
            shares = shares_of(self.plan.distill, pairs, output_mask)
            parts["distill"] = self.distill * torch.stack(shares).mean()
            if self.measured and isinstance(self.plan.distill, LogitDistillation):
                self._note(DIVERGENCE, shares, pairs)
        return parts

    def guide(self, model: nn.Module, name: str, pairs: Sequence[tuple[Tensor, ...]], mask: Tensor | None) -> Tensor:
        """Return the weighted guidance of pairs of outputs at a site."""
        assert self.plan.guidance is not None
        if stated_axis(self.plan.guidance) is None:
            pairs = [tuple(self.with_usual_axis(model, name, x) for x in pair) for pair in pairs]
        shares = shares_of(self.plan.guidance, pairs, mask)
        if name in self.measured:
            self._note(name, self._errors(pairs, shares, mask), pairs)
        return weighted_mean(self.guidance[name], shares)

    def _errors(self, pairs: Sequence[tuple[Tensor, ...]], shares: list[Tensor], mask: Tensor | None) -> list[Tensor]:
        """Return the relative error of each forward at a site: what the guidance has computed, if it is that."""
        if is_relative_error(self.plan.guidance):
            return shares
        axis = stated_axis(self.plan.guidance)
        with torch.no_grad():
            return shares_of(FeatureGuidance() if axis is None else FeatureAxis(axis=axis), pairs, mask)

    def _note(self, name: str, shares: list[Tensor], pairs: Sequence[tuple[Tensor, ...]]) -> None:
        """Add a mean over samples to those of the other micro-batches; nothing waits for the device."""
        count = sum(samples(student) for _, student in pairs)
        mean = torch.stack([share.detach().float() for share in shares]).mean()
        noted = torch.stack([mean * count, mean.new_tensor(float(count))])
        self._signals[name] = self._signals[name] + noted if name in self._signals else noted

    def readings(self, device: torch.device) -> dict[str, Reading]:
        """Return what was measured at each site in this step, over all processes: one small sum, read once."""
        if not self.measured:
            return {}
        names = [*self.measured, DIVERGENCE]
        zero = torch.zeros(2, device=device)
        found = torch.stack([self._signals.get(name, zero).to(device) for name in names])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(found)
        *errors, divergence = (
            total / count if count else None for total, count in found.clamp_min(0).tolist()
        )  # KL may be -1e-9
        return {name: Reading(error=error, divergence=divergence) for name, error in zip(self.measured, errors, strict=True)}

    def _teacher_pass(self, model: nn.Module, as_teacher: _AsTeacher) -> tuple[list[Any], dict[str, list[tuple[Tensor, ...]]]]:
        """Run the original model once more on what the model was called with; return its outputs, and those at the sites."""
        teachers = {
            name: self.original.get_submodule(seam.site.members[-1]) if self.original else _last(seam.teacher)
            for name, seam in self.seams.items()
        }
        stream: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in teachers}

        def record(name: str) -> Callable[..., None]:
            site = self.seams[name].site
            return lambda _module, _args, output: stream[name].append((first_floating(output, site),))

        recorded = teachers.items() if self.on_teacher_stream else ()
        handles = [module.register_forward_hook(record(name)) for name, module in recorded if module is not None]
        try:
            original = nullcontext() if self.original else as_teacher()  # a copy needs no teachers, which may be gone
            with torch.no_grad(), original, evaluating(model), plain_attention():
                outputs = [(self.original or model)(*args, **kwargs) for args, kwargs, _ in self.calls]
        finally:
            for handle in handles:
                handle.remove()
        torch.clear_autocast_cache()  # weights that were cast without a gradient must not be used with one
        return outputs, stream

    def with_usual_axis(self, model: nn.Module, name: str, output: Tensor) -> Tensor:
        """Put the features of an output at a site where losses and measures read them, as the guidance or the layers tell."""
        axis = self.axis_of(model, name, output)
        return output if axis is None else move_features(output, axis)

    def axis_of(self, model: nn.Module, name: str, output: Tensor) -> int | None:
        """Return the axis of the features of an output at a site; None where it has two dimensions."""
        axis = stated_axis(self.plan.guidance)
        if axis is None and output.dim() > 2:
            key = name, output.dim(), output.shape[1], output.shape[-1]
            if key not in self._axes:
                self._axes[key] = feature_axis(_from_inside(model, self.seams[name]), output)
            axis = self._axes[key]
        return axis

    def _refuse_blind(self) -> None:
        blind = [name for name in self.guidance if self.seams[name].blind and not self.seams[name].records]
        if blind:
            raise HandoverError(
                f"guidance has no gradient at site {blind[0]!r}.",
                "The last forward ran without gradients there, as reentrant activation checkpointing does.",
                "use checkpoint(..., use_reentrant=False), or call the model outside torch.no_grad().",
            )


def logits_of(distill: object, output: Any) -> Tensor:
    """Take what is compared out of the output of the model: logits, or a prediction."""
    kind = type(distill).__name__
    name, own = ("prediction", "sample") if isinstance(distill, PredictionDistillation) else ("logits", "logits")
    pick = getattr(distill, name, None)
    if pick is not None:
        picked = pick(output)
        if not (isinstance(picked, Tensor) and picked.is_floating_point()):
            raise PlanError(
                f"{kind}({name}=...) must return a floating tensor, got {type(picked).__name__}.",
                f"It is called with the output of the model, of type {type(output).__name__}.",
                f"return the {name}.",
            )
        return picked
    if isinstance(found := getattr(output, own, None), Tensor):
        return found
    if isinstance(output, dict) and isinstance(output.get(own), Tensor):
        return output[own]  # type: ignore[no-any-return]
    found = next((x for x in tensors(output) if x.is_floating_point() and x.dim() >= 2), None)
    if found is None:
        raise PlanError(
            f"{kind} finds no {name} in the output of the model.",
            f"{type(output).__name__} holds no floating tensor with two or more dimensions.",
            f"name them: {kind}({name}=lambda output: ...).",
        )
    return found


_AsTeacher = Callable[[], AbstractContextManager[Any]]
CachedTeacher = Callable[[tuple[Any, ...], dict[str, Any], Tensor], TopProbabilities]  # (args, kwargs, student's logits)


def _taken(seam: Seam) -> list[tuple[Tensor, ...]]:
    taken, seam.records, seam.blind = seam.records, [], False
    return taken


def _last(teacher: nn.Module | None) -> nn.Module | None:
    return None if teacher is None else layers_of(teacher)[-1]


def _from_inside(model: nn.Module, seam: Seam) -> Iterator[nn.Module]:
    """Yield the module at a site, then those around it up to the model."""
    yield _last(seam.teacher) or seam.student
    place = seam.site.name
    while place:
        place = place.rpartition(".")[0]
        yield model.get_submodule(place)


def weighted_mean(weight: float, shares: Sequence[Tensor]) -> Tensor:
    """Return the weighted loss of all forwards of a site."""
    return weight * sum(shares, start=torch.zeros((), device=shares[0].device)) / len(shares)


def shares_of(loss: PairLoss, pairs: Sequence[tuple[Tensor, ...]], mask: Tensor | None) -> list[Tensor]:
    """Return each forward's loss, times its part of the samples, so that their mean is that of one forward over all.

    The part is relative to an equal one: exactly 1 where all forwards have equally many. A forward without samples has a loss
    of 0, with a graph for backward(). A mask has the rows of one forward, for each of them, or those of all.
    """
    counts = [samples(student) for _, student in pairs]
    total = sum(counts)
    masks = [mask] * len(pairs) if mask is None or len(mask) != total else torch.split(mask, counts)
    return [
        _scalar(loss(t, s, part)) * (count * len(pairs) / total) if count else s.real.float().sum()
        for (t, s), part, count in zip(pairs, masks, counts, strict=True)
    ]


def _scalar(value: Tensor) -> Tensor:
    if not isinstance(value, Tensor | int | float) or (isinstance(value, Tensor) and value.dim() != 0):
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
        raise PlanError("the guidance loss must return a scalar.", f"It returns {found}.", "average or sum it.")
    return value

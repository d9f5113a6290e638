"""Phases: the parts of a run, each with its own length, alpha, losses and learning rates.

A plan with phases says all of this in one object, which `fit`, `segue run`, `segue convert` and the callbacks of Trainer and
Lightning follow. A plan without phases is one phase: its own schedule, and the rates of the recipe or of the framework.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeAlias

from segue.border import Fraction, NotNegative, PositiveFloat, PositiveInt, Rule, Unit, checked
from segue.errors import PlanError
from segue.losses import weight_at, weight_of
from segue.schedules import Adaptive, Constant, Schedule, adaptive_at, alpha_at, is_adaptive, is_hold
from segue.sites import Site

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import Optimizer

    from segue.plan import Plan

__all__ = ["Phase", "Rates"]


def __dir__() -> list[str]:
    return sorted(__all__)


Kind: TypeAlias = Literal["new", "copied", "backbone"]
KINDS: tuple[Kind, ...] = ("new", "copied", "backbone")
SCHEDULED = ("lr", "weight_decay")  # what a phase sets in an optimizer


@checked
@dataclass(frozen=True, kw_only=True)
class Rates:
    """One learning rate for each kind of parameter.

    A student's parameter is "copied" if its values are the teacher's when the handover begins, otherwise "new"; what trains
    outside the sites is the "backbone". None is the rate of `new`; 0 freezes: no gradient, no update, no weight decay.

    >>> Rates(new=1e-2, copied=1e-4).of("backbone")
    0.01
    """

    new: PositiveFloat
    copied: NotNegative | None = None
    backbone: NotNegative | None = None

    @checked
    def of(self, kind: Kind) -> float:
        """Return the rate of a kind of parameter."""
        found: float | None = getattr(self, kind)
        return self.new if found is None else found

    @property
    def frozen(self) -> set[Kind]:
        """The kinds of parameters that do not train."""
        return {kind for kind in KINDS if self.of(kind) == 0}


Strength: TypeAlias = Annotated[
    NotNegative | Schedule, Rule("a number of at least 0, or a function (progress, site) -> number from 0 to 1")
]


@checked
@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a run.

    >>> fit = Phase(name="local fit", length=0.2, local=True, lr=4e-3, split=4, reuse=4)
    >>> after = Phase(name="students alone", lr=1e-3)

    Args:
        name: Shown in the history and in reports.
        length: Part of the optimizer steps; None: what the other phases leave.
        schedule: Alpha, by the progress inside the phase; Constant() is 0.
        local: Alpha is 1 until the end of the phase, and each student fits its teacher's output from the guidance alone.
        task: The weight of the task's loss.
        guidance: Times the weight of the plan's guidance; None: alpha.
        distill: Times the weight of the plan's distillation; nothing to distil while local.
        lr: Its learning rate; None: the recipe's curve, over neighbouring phases without a rate together.
        final_lr: What `lr` falls to.
        warmup: Part of the phase in which `lr` is reached.
        decay: How `lr` falls after the warmup.
        weight_decay: In this phase; None: the recipe's.
        split: Local: cut every batch into so many, each of which is an update.
        reuse: Local: go so many times over a batch that the teachers have seen once.
        tolerance: Local: a site rests while its relative error is below this.
        fresh: Begin with an optimizer without state: its moments have the scale of the losses of the phase before.
    """

    name: str
    length: Fraction | None = None
    schedule: Schedule = field(default_factory=Constant)
    local: bool = False
    task: NotNegative = 1.0
    guidance: Strength | None = None
    distill: Strength = 1.0
    lr: PositiveFloat | Rates | None = None
    final_lr: NotNegative = 0.0
    warmup: Unit = 0.0
    decay: Literal["cosine", "constant"] = "cosine"
    weight_decay: NotNegative | None = None
    split: PositiveInt = 1
    reuse: PositiveInt = 1
    tolerance: NotNegative = 0.0
    fresh: bool = False

    def __post_init__(self) -> None:
        if not self.local and (self.split, self.reuse, self.tolerance) != (1, 1, 0.0):
            raise PlanError(
                f"Phase({self.name!r}) has split, reuse or tolerance, and is not local.",
                "Several updates from one forward need students that do not act on each other.",
                "set local=True, or leave the three out.",
            )


class HasRate(Protocol):
    """A learning rate over some steps: of a recipe, or of a phase."""

    @property
    def lr(self) -> float | Rates | None: ...
    @property
    def final_lr(self) -> float: ...
    @property
    def warmup(self) -> float: ...
    @property
    def decay(self) -> str: ...
    @property
    def weight_decay(self) -> float | None: ...


def peak(of: HasRate) -> float:
    """Return the highest learning rate, of `new` parameters."""
    lr = of.lr.new if isinstance(of.lr, Rates) else of.lr
    assert lr is not None
    return lr


def rate(of: HasRate, step: int, steps: int) -> float:
    """Return the learning rate of a step: linear warmup, then half a cosine from lr to final_lr; of `new` parameters."""
    lr = peak(of)
    rise = round(of.warmup * steps)
    if step < rise:
        return lr * (step + 1) / rise
    if of.decay == "constant":
        return lr
    done = min(1.0, (step - rise) / max(1, steps - rise))
    return of.final_lr + (lr - of.final_lr) * (0.5 + 0.5 * math.cos(math.pi * done))


def refuse_unfit(phases: Sequence[Phase], guided: bool) -> None:
    """Refuse phases that do not fill a run, have one name, cannot adapt, or fit locally without a guidance."""
    known = sum(phase.length for phase in phases if phase.length is not None)
    free = any(phase.length is None for phase in phases)
    if known >= 1 if free else abs(known - 1) > 1e-6:
        raise PlanError(
            "the lengths of the phases must add up to 1.",
            f"They are {', '.join(f'{phase.name} {phase.length}' for phase in phases)}.",
            "give fractions of the run, and leave the length of the last phase out: it takes the rest.",
        )
    if own := [phase.name for phase in phases if hasattr(phase.schedule, "observe")]:
        raise PlanError(
            f"the schedule of the phase {own[0]!r} has observe().",
            "A schedule of your own that adapts is told of measurements, and saved, as the only one of a plan.",
            "give Plan(schedule=...) without phases, or segue.schedules.Adaptive in the phase.",
        )
    names = [phase.name for phase in phases]
    if len(set(names)) < len(names):
        raise PlanError("two phases have the same name.", f"They are {', '.join(names)}.", "name each of them differently.")
    if not guided and (local := [phase.name for phase in phases if phase.local]):
        raise PlanError(
            f"the phase {local[0]!r} is local and has nothing to learn from.",
            "In a local phase students learn from the guidance alone, and the plan has none.",
            "give the plan guidance=segue.losses.FeatureGuidance().",
        )


def ends(phases: Sequence[Phase]) -> list[float]:
    """Return the progress at which each phase ends.

    >>> ends([Phase(name="a", length=0.2), Phase(name="b"), Phase(name="c", length=0.3)])
    [0.2, 0.7, 1.0]
    """
    known = sum(phase.length for phase in phases if phase.length is not None)
    unknown = sum(phase.length is None for phase in phases)
    found, done = [], 0.0
    for phase in phases:
        done += (1 - known) / unknown if phase.length is None else phase.length
        found.append(done)
    return [*found[:-1], 1.0]


def at(phases: Sequence[Phase], progress: float) -> tuple[Phase, float]:
    """Return the phase at a progress of the run, and the progress inside it."""
    index, begin, end = _place(phases, progress)
    return phases[index], min(1.0, (progress - begin) / (end - begin)) if end > begin else 1.0


def _place(phases: Sequence[Phase], progress: float) -> tuple[int, float, float]:
    limits = ends(phases)
    index = next((index for index, end in enumerate(limits) if progress < end), len(phases) - 1)
    return index, limits[index - 1] if index else 0.0, limits[index]


def alpha_of(plan: Plan, progress: float, site: Site) -> float:
    """Return the teacher's share at a site that a plan asks for."""
    if not plan.phases:
        return alpha_at(plan.schedule, progress, site)
    phase, inside = at(plan.phases, progress)
    return 1.0 if phase.local and inside < 1 else alpha_at(phase.schedule, inside, site)


def holds(plan: Plan, progress: float, site: Site) -> bool:
    """Return whether a plan holds alpha at 1 on purpose, so that students train locally."""
    if not plan.phases:
        return is_hold(plan.schedule, progress, site)
    phase, inside = at(plan.phases, progress)
    return (phase.local and inside < 1) or is_hold(phase.schedule, inside, site)


def adaptive_of(plan: Plan, progress: float, site: Site) -> tuple[Adaptive, float] | None:
    """Return the Adaptive that decides alpha at a site now, with its own progress; None where another schedule does."""
    if not plan.phases:
        return adaptive_at(plan.schedule, progress, site)
    phase, inside = at(plan.phases, progress)
    return None if phase.local and inside < 1 else adaptive_at(phase.schedule, inside, site)


def adapts(plan: Plan) -> bool:
    """Return whether a plan has an adaptive schedule of alpha."""
    return any(is_adaptive(phase.schedule) for phase in plan.phases) if plan.phases else is_adaptive(plan.schedule)


def guidance_of(plan: Plan, progress: float, site: Site, alpha: float | None = None) -> float:
    """Return the weight of a plan's guidance at a site, whose alpha may have been adapted: the signal lasts as long as it."""
    if plan.guidance is None:
        return 0.0
    alpha = alpha_of(plan, progress, site) if alpha is None else alpha
    if not plan.phases:
        least = 0.0 if adaptive_at(plan.schedule, progress, site) is None else alpha
        return weight_at(plan.guidance, progress, site, least)
    phase, inside = at(plan.phases, progress)
    return weight_of(plan.guidance) * (alpha if phase.guidance is None else _strength(phase.guidance, inside, site))


def distill_of(plan: Plan, progress: float, site: Site) -> float:
    """Return the weight of a plan's distillation."""
    if plan.distill is None or not plan.phases:
        return 0.0 if plan.distill is None else weight_at(plan.distill, progress, site)
    phase, inside = at(plan.phases, progress)
    return 0.0 if phase.local else weight_of(plan.distill) * _strength(phase.distill, inside, site)


def _strength(strength: float | Schedule, progress: float, site: Site) -> float:
    return alpha_at(strength, progress, site) if callable(strength) else strength


def schedules_of(plan: Plan) -> Iterator[object]:
    """Yield every schedule of a plan: of alpha, and of its losses."""
    if not plan.phases:
        yield from (plan.schedule, getattr(plan.guidance, "schedule", None), getattr(plan.distill, "schedule", None))
    for phase in plan.phases:
        yield from (phase.schedule, phase.guidance, phase.distill)


def course(base: HasRate | None, phases: Sequence[Phase], step: int, total: int) -> tuple[HasRate | None, int, int]:
    """Return whose learning rate a step has, the step inside that stretch, and its number of steps.

    A phase with a rate of its own is a stretch; neighbouring phases without one are a stretch of `base`, together.
    """
    if not phases:
        return base, step, total
    index, _, _ = _place(phases, min(1.0, step / total))
    first = last = index
    if phases[index].lr is None:
        while first > 0 and phases[first - 1].lr is None:
            first -= 1
        while last < len(phases) - 1 and phases[last + 1].lr is None:
            last += 1
    limits = [0, *(_first_step(end, total) for end in ends(phases))]
    begin, end = limits[first], limits[last + 1]
    return base if phases[index].lr is None else phases[index], step - begin, max(1, end - begin)


def _first_step(progress: float, total: int) -> int:
    """Return the first step at or after a progress, as floats compare."""
    step = math.ceil(progress * total)
    while step > 0 and (step - 1) / total >= progress:
        step -= 1
    while step / total < progress:
        step += 1
    return step


def uses_kinds(settings: Iterable[HasRate]) -> bool:
    """Return whether any of these has a rate for each kind of parameter."""
    return any(isinstance(one.lr, Rates) for one in settings)


def set_rates(optimizer: Optimizer, base: HasRate | None, phases: Sequence[Phase], step: int, total: int) -> None:
    """Give the groups of an optimizer the rate and weight decay of a step; what neither phase nor base says stays as it is.

    Before the first step of a phase that begins fresh, its state is cleared.
    """
    whose, inside, steps = course(base, phases, step, total)
    if whose is not None:
        now = rate(whose, inside, steps)
        for group in optimizer.param_groups:
            group["lr"] = _peak_of(whose, group) * (now / peak(whose))
    if phases:
        index, begin, _ = _place(phases, min(1.0, step / total))
        phase = phases[index]
        if phase.fresh and index > 0 and step == _first_step(begin, total):
            optimizer.state.clear()
        decay = base.weight_decay if phase.weight_decay is None and base is not None else phase.weight_decay
        for group in optimizer.param_groups:
            if decay is not None and any(parameter.dim() > 1 for parameter in group["params"]):
                group["weight_decay"] = decay


def frozen(optimizer: Optimizer, base: HasRate | None, phases: Sequence[Phase], step: int, total: int) -> list[Tensor]:
    """Return the parameters that a step leaves as they are: those of a kind whose rate is 0."""
    whose, _, _ = course(base, phases, step, total)
    if whose is None or not isinstance(whose.lr, Rates):
        return []
    groups = optimizer.param_groups
    found = [parameter for group in groups if _peak_of(whose, group) == 0 for parameter in group["params"]]
    if len(found) == sum(len(group["params"]) for group in groups):
        phase = f" in the phase {at(phases, min(1.0, step / total))[0].name!r}" if phases else ""
        kinds = ", ".join(sorted({group["kind"] for group in groups}))
        raise PlanError(
            f"nothing trains{phase}.",
            f"All parameters that could are {kinds}, and their rate is 0 in {whose.lr}.",
            "give them a rate: Rates(new=..., copied=1e-4).",
        )
    return found


def refuse_idle(optimizer: Optimizer, base: HasRate | None, phases: Sequence[Phase], total: int) -> None:
    """Refuse a phase in which nothing trains."""
    for begin in (0.0, *ends(phases)[:-1]) if phases else (0.0,):
        frozen(optimizer, base, phases, min(total - 1, _first_step(begin, total)), total)


def _peak_of(whose: HasRate, group: dict[str, Any]) -> float:
    if not isinstance(whose.lr, Rates):
        return peak(whose)
    if group.get("kind") not in KINDS:
        raise PlanError(
            "the optimizer has no groups for Rates(new=..., copied=..., backbone=...).",
            "Its groups do not say which kind of parameters they hold.",
            "build it from handover.parameter_groups(), as segue.fit does.",
        )
    return whose.lr.of(group["kind"])


def grouped_by_kind(parameters: Iterable[tuple[Tensor, Kind]], weight_decay: float) -> list[dict[str, Any]]:
    """Return groups for an optimizer, by kind, matrices apart from biases and norms."""
    members: dict[tuple[Kind, bool], list[Tensor]] = {(kind, matrices): [] for kind in KINDS for matrices in (True, False)}
    for parameter, kind in parameters:
        members[kind, parameter.dim() > 1].append(parameter)
    return [
        {"params": found, "kind": kind, "weight_decay": weight_decay if matrices else 0.0}
        for (kind, matrices), found in members.items()
        if found
    ]

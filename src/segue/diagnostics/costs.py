"""The cost of a plan: Table 1 of the paper as numbers, counted on the user's own model before any training."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from segue.border import PositiveInt, checked
from segue.core.blending import blendable, call_arguments, calling, tensors
from segue.core.handover import Handover
from segue.core.steps_taken import StepsTaken
from segue.diagnostics.counting import StepCosts
from segue.diagnostics.shapes import whole_texts
from segue.display import Shown, Table
from segue.errors import SegueWarning
from segue.gates import Blend
from segue.losses import LogitDistillation
from segue.phases import adapts
from segue.plan import Plan
from segue.reporting.formatting import flops, memory
from segue.schedules import Constant
from segue.similarity import as_real
from segue.training.tasks import LossFn

HOLD, BLEND, TAKEOVER = "hold", "blend", "after takeover"
HEADINGS = (
    "phase",
    "steps",
    "operations per step",
    "operations / student-only",
    "operations / full teacher",
    "bytes kept for backward",
    "bytes / student-only",
    "parameters held",
)
NARROW = 4  # columns that a terminal shows


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps of one kind."""

    name: str
    steps: int
    flops: float  # of one step, on average
    saved_bytes: int  # for the backward pass, in the step that saves most
    parameters: int  # in memory: backbone, students, and teachers that are not released

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Phase:
        """Rebuild a phase; keys of a newer version are ignored."""
        return cls(**{f.name: data[f.name] for f in dataclasses.fields(cls)})


@dataclass(frozen=True, kw_only=True)
class Cost(Shown):
    """The cost of a plan by phase and over the complete run, and of the two trainings that it is compared with."""

    phases: tuple[Phase, ...]
    student_only: Phase  # the same students, trained without any teacher
    distillation: Phase  # the same students, and a full pass of the original model at every step
    teachers: dict[str, int]  # operations of one forward of each replaced module
    teacher_pass: int  # operations of one forward of the original model
    per_step: tuple[float, ...] = field(repr=False)  # operations, step by step
    adaptive: bool = False  # counted on the slowest course of an adaptive schedule: at most this much

    @property
    def steps(self) -> int:
        return len(self.per_step)

    @property
    def flops(self) -> float:
        """Operations of the complete run."""
        return sum(self.per_step)

    @property
    def to_student_only(self) -> float:
        """Operations of the complete run, relative to student-only training."""
        return _ratio(self.flops, self.steps * self.student_only.flops)

    @property
    def to_distillation(self) -> float:
        """Operations of the complete run, relative to distillation by a full teacher."""
        return _ratio(self.flops, self.steps * self.distillation.flops)

    @property
    def break_even_blend(self) -> float:
        """The number of replaced modules at which a blend step costs as much as a step with a full teacher."""
        return _over(self.teacher_pass, sum(self.teachers.values()) / len(self.teachers))

    @property
    def break_even(self) -> float:
        """The number of replaced modules at which the run costs as much as one with a full teacher; inf if there is none."""
        extra = self.flops - self.steps * self.student_only.flops
        return _over(self.teacher_pass * self.steps, extra / len(self.teachers))

    def to_dict(self) -> dict[str, Any]:
        """Return the cost as plain data, without its single steps."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "per_step"}
        plain = {name: dataclasses.asdict(value) for name, value in fields.items() if isinstance(value, Phase)}
        return fields | plain | {"phases": [dataclasses.asdict(phase) for phase in self.phases], "steps": self.steps}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cost:
        """Rebuild a cost from `to_dict`; each step costs the mean of its phase."""
        phases = tuple(Phase.from_dict(phase) for phase in data["phases"])
        return cls(
            phases=phases,
            student_only=Phase.from_dict(data["student_only"]),
            distillation=Phase.from_dict(data["distillation"]),
            teachers=dict(data["teachers"]),
            teacher_pass=data["teacher_pass"],
            per_step=tuple(phase.flops for phase in phases for _ in range(phase.steps)),
            adaptive=bool(data.get("adaptive", False)),
        )

    def __str__(self) -> str:
        """Format the cost as a Markdown table and three notes."""
        lines = [f"| {' | '.join(cells)} |" for cells in (list(HEADINGS), ["---"] * len(HEADINGS), *map(self.cells, self.rows))]
        return "\n".join([*lines, "", *self.notes])

    def __repr__(self) -> str:
        rows = [self.cells(row)[:NARROW] for row in self.rows]
        return Table(
            f"Cost({self.steps:,} steps)", ("phase", "steps", "per step", "/ student-only"), rows, self.notes[:1]
        ).text()

    def _table(self) -> Table:
        return Table(f"cost of {self.steps:,} steps", HEADINGS, [self.cells(row) for row in self.rows], self.notes)

    def cells(self, phase: Phase) -> list[str]:
        """Format one phase, in the order of the headings."""
        alone, full = self.student_only, self.distillation
        return [
            phase.name,
            f"{phase.steps:,}",
            flops(phase.flops),
            f"{_ratio(phase.flops, alone.flops):.3f}",
            f"{_ratio(phase.flops, full.flops):.3f}",
            memory(phase.saved_bytes),
            f"{phase.saved_bytes / max(1, alone.saved_bytes):.3f}",
            f"{phase.parameters:,}",
        ]

    @property
    def total(self) -> Phase:
        """The complete run as one phase: the mean of its operations, the most of its bytes and parameters."""
        return Phase(
            name="complete run",
            steps=self.steps,
            flops=self.flops / self.steps,
            saved_bytes=max(phase.saved_bytes for phase in self.phases),
            parameters=max(phase.parameters for phase in self.phases),
        )

    @property
    def rows(self) -> tuple[Phase, ...]:
        """The phases, the complete run, and the two trainings that it is compared with."""
        return (*self.phases, self.total, self.student_only, self.distillation)

    @property
    def notes(self) -> list[str]:
        """What the numbers mean."""
        sites = len(self.teachers)
        share = sum(self.teachers.values()) / self.teacher_pass if self.teacher_pass else 0.0
        return [
            f"The complete run costs {self.to_student_only:.3f} x student-only training "
            f"and {self.to_distillation:.3f} x distillation by a full teacher.",
            f"Replaced: {sites} module{'s' * (sites != 1)}, {share:.1%} of a forward of the original.",
            f"Break-even with a full teacher: {_modules(self.break_even_blend)} like these for one step of a blend, "
            f"{_modules(self.break_even)} for the complete run (this plan replaces {sites}).",
            *["The schedule adapts: counted is its slowest course, so a run costs at most this."] * self.adaptive,
        ]

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw the operations of every step; needs matplotlib."""
        from segue.diagnostics.figures import draw_cost

        return draw_cost(self, Path(path))


@checked
def cost(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    *,
    total_steps: PositiveInt = 1000,
    loss_fn: LossFn | None = None,
    steps_taken: StepsTaken | None = None,
) -> Cost:
    """Count what a plan costs on a model, per phase and over a run; the model is not changed.

    A schedule that adapts is counted on its slowest course, an upper bound. After a run, `steps_taken=fit.steps_taken` counts
    what its sites really computed.

    >>> import torch
    >>> from torch import nn
    >>> import segue
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    >>> found = segue.cost(model, segue.methods.dcr(sites="0"), torch.randn(4, 8))
    >>> [(phase.name, phase.steps) for phase in found.phases]
    [('blend', 200), ('after takeover', 800)]
    >>> round(found.to_student_only, 3)
    1.05

    It takes steps on a copy, one of each kind: without values where the model and the loss allow that, which is quick, and
    real ones otherwise.

    Args:
        model: The model before the replacement.
        plan: What would be replaced, and how.
        batch: What the model is called with (a tensor, a tuple or a dict of arguments), or what `loss_fn` takes.
        total_steps: The length of the run.
        loss_fn: (model, batch) -> scalar; without it the sum of the output is the loss.
        steps_taken: What the sites of a finished run computed, `fit.steps_taken`.
    """
    loss_fn = loss_fn or _any_loss
    if _has_quick_count(model):
        with (
            suppress(Exception),
            whole_texts(batch),
        ):  # code that looks at values raises on the meta device; an error of the user comes again
            return _counted(model, plan, batch, total_steps, loss_fn, steps_taken, values=False)
    return _counted(model, plan, batch, total_steps, loss_fn, steps_taken, values=True)


def _has_quick_count(model: nn.Module) -> bool:
    """Return whether shapes alone say what a CPU does.

    There a batch norm that does not train keeps less, and a recurrent layer is one operator, which has no formula.
    """
    on_cpu = all(parameter.device.type in ("cpu", "meta") for parameter in model.parameters())
    return on_cpu and not any(isinstance(module, nn.modules.batchnorm._BatchNorm | nn.RNNBase) for module in model.modules())


def _counted(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    total_steps: int,
    loss_fn: LossFn,
    taken: StepsTaken | None = None,
    *,
    values: bool,
) -> Cost:
    count = StepCosts(model, plan, total_steps, batch, loss_fn, values=values, steps_taken=taken)
    costs = [count[step] for step in range(total_steps)]
    kinds = [_kind(count, step) for step in range(total_steps)]
    teachers = count.teachers()
    _warn_of_zeros(count, teachers)
    alone = count.students_alone()
    held = _held(count.handover)
    without = _without_teachers(count.handover)
    phases = []
    for name in dict.fromkeys(kinds):
        of_kind = [one for one, kind in zip(costs, kinds, strict=True) if kind == name]
        mean = sum(one.flops for one in of_kind) / len(of_kind)
        most = max(one.saved_bytes for one in of_kind)
        released = (
            plan.release
            and plan.distill is None
            and not any(_needs_teachers(count, step) for step, kind in enumerate(kinds) if kind == name)
        )
        phases.append(
            Phase(name=name, steps=len(of_kind), flops=mean, saved_bytes=most, parameters=without if released else held)
        )
    full = dataclasses.replace(
        plan,
        gate=Blend(),
        schedule=Constant(alpha=0.0),
        phases=(),
        guidance=None,
        distill=dataclasses.replace(plan.distill or LogitDistillation(), schedule=Constant(alpha=1.0)),
    )
    distilled = StepCosts(model, full, total_steps, batch, loss_fn, values=values)
    distilled_step, distilled_held = distilled.only(1), _held(distilled.handover)
    teacher_pass = count.teacher_pass()
    for one in (count, distilled):
        one.close()
    return Cost(
        phases=tuple(phases),
        student_only=Phase(name="student-only", steps=total_steps, parameters=without, **alone._asdict()),
        distillation=Phase(
            name="full-teacher distillation", steps=total_steps, parameters=distilled_held, **distilled_step._asdict()
        ),
        teachers=teachers,
        teacher_pass=teacher_pass,
        per_step=tuple(one.flops for one in costs),
        adaptive=adapts(plan) and not count.taken.keys() >= set(range(total_steps)),
    )


def _kind(count: StepCosts, step: int) -> str:
    sites = count.state(step).sites.values()
    if any(site.hold for site in sites):
        return HOLD
    return TAKEOVER if all(site.closed for site in sites) else BLEND


def _needs_teachers(count: StepCosts, step: int) -> bool:
    return any(site.needs_teacher for site in count.state(step).sites.values())


def _without_teachers(handover: Handover) -> int:
    """Count the parameters without those of the teachers; one that is tied to another module counts."""
    places = tuple(f"{name}.teacher." for site in handover.sites for name in site.names)
    named = handover.model.named_parameters(remove_duplicate=False)
    return sum(p.numel() for p in {id(p): p for name, p in named if not name.startswith(places)}.values())


def _held(handover: Handover) -> int:
    """Count the parameters in memory, with the frozen copy of the original model that some plans need."""
    return _parameters(handover.model, handover.auxiliary.original)


def _any_loss(model: nn.Module, batch: Any) -> Tensor:
    """Reduce whatever a model returns to a scalar loss."""
    args, kwargs = call_arguments(batch)
    with calling("batch"):
        output = model(*args, **kwargs)
    found = next(x for x in tensors(getattr(output, "logits", output)) if blendable(x))
    return as_real(found).float().square().mean()


def _warn_of_zeros(count: StepCosts, teachers: dict[str, int]) -> None:
    """Warn if a module with weight matrices seems to cost nothing."""
    empty = [
        name
        for name, found in teachers.items()
        if found == 0 and any(p.dim() > 1 for p in _teacher(count.handover, name).parameters())
    ]
    if empty:
        warnings.warn(
            f"0 operations are counted at {len(empty)} of {len(teachers)} sites ({empty[0]!r} first), "
            "whose modules have weight matrices. Hint: this batch does not reach them, or their operators have no formula.",
            SegueWarning,
            stacklevel=3,
        )


def _parameters(*modules: nn.Module | None) -> int:
    return sum(parameter.numel() for module in modules if module is not None for parameter in module.parameters())


def _teacher(handover: Handover, name: str) -> nn.Module:
    teacher = handover.seams[name].teacher
    assert teacher is not None
    return teacher


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan  # nothing was counted, and a warning says so


def _over(whole: float, part: float) -> float:
    return whole / part if part > 0 else math.inf


def _modules(count: float) -> str:
    return f"{count:.1f} modules" if math.isfinite(count) else "no number of modules"

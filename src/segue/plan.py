"""The plan: the complete, printable, savable description of one replacement."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import indent
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

from segue import gates, losses, phases, schedules, sites, students
from segue.border import Rule, Seed, checked
from segue.display import Shown, Table
from segue.errors import PlanError, nearest
from segue.gates import Blend, Gate
from segue.losses import CosineGuidance, FeatureGuidance, LogitDistillation, PairLoss, PredictionDistillation
from segue.phases import Phase, refuse_unfit
from segue.schedules import Constant, Schedule, aggr20
from segue.settings import Serializer, public_kinds
from segue.sites import Selector
from segue.students import Reinit, StudentFactory
from segue.students.adapters import Adapter

__all__ = ["Distillation", "Plan", "PlanKeywords"]

FORMAT = 1
ONE_LINE = 100  # letters of a plan, or of its phases, printed in one line
ROOMS = {"sites": sites, "gates": gates, "schedules": schedules, "losses": losses, "students": students, "phases": phases}
SERIALIZER = Serializer(
    kinds={kind: made for room, module in ROOMS.items() for kind, made in public_kinds(module, f"{room}.").items()},
    error=PlanError,
    hint="pass it again: segue.load_(..., {field}=...) or Plan.from_dict(data, {field}=...).",
)
encode, decode = SERIALIZER.encode, SERIALIZER.decode


Distillation: TypeAlias = Annotated[
    LogitDistillation | PredictionDistillation | FeatureGuidance | CosineGuidance,
    Rule("a loss on the outputs of the model: LogitDistillation, PredictionDistillation, FeatureGuidance or CosineGuidance"),
]


@checked
@dataclass(frozen=True, kw_only=True)
class Plan(Shown):
    """Say what is replaced, by what, and how the teacher hands over.

    >>> import segue
    >>> plan = segue.Plan(sites="blocks.*.attn", student=segue.students.LinearAttention(), seed=1)
    >>> plan.gate, plan.train
    (Blend(), 'students')

    Args:
        sites: Where: a glob over module names, a module type, a function (name, module) -> bool, a Span, or several of these.
        student: By what: a student of `segue.students`, or a function (teacher, site) -> module.
        adapter: What fits students of another width than their teachers.
        gate: From alpha to the student's weight, once a step.
        schedule: From progress to alpha, the teacher's share.
        guidance: A loss on the two outputs at every site.
        distill: A loss on the outputs of the whole model and of the original.
        phases: Parts of the run, each with its own alpha, losses and rates, instead of the schedules here and in the losses.
        train: What trains: the students, or "all": also the backbone, except what was frozen before (by PEFT).
        backbone: The mode of dropout and batch statistics around the sites, with train="students".
        teacher_gradient: Let the gradient pass the teacher to its input (never its weights); None: at spans.
        release: Free each teacher at takeover.
        unreached: What to do when a forward never calls a site.
        seed: Of the students' initial weights and the gate's noise.
    """

    sites: Selector
    student: StudentFactory = field(default_factory=Reinit)
    adapter: Adapter | None = None
    gate: Gate = field(default_factory=Blend)
    schedule: Schedule = field(default_factory=aggr20)
    guidance: PairLoss | None = None
    distill: Distillation | None = None
    phases: tuple[Phase, ...] = ()
    train: Literal["students", "all"] = "students"
    backbone: Literal["eval", "train"] = "eval"
    teacher_gradient: bool | None = None
    release: bool = False
    unreached: Literal["error", "ignore"] = "error"
    seed: Seed = 0

    def __post_init__(self) -> None:
        if isinstance(self.sites, list):
            object.__setattr__(self, "sites", tuple(self.sites))
        if self.phases:
            refuse_unfit(self.phases, guided=self.guidance is not None)
            _refuse_second_schedule(self)

    def __repr__(self) -> str:
        """Write what differs from the defaults, as it could be written in code."""
        parts = [f"{name}={_folded(value)}" for name, value in _changed(self)]
        return _lines("Plan(", parts, ")")

    def _table(self) -> Table:
        rows = [(name, _brief(value)) for name, value in _changed(self)]
        return Table("Plan", ("setting", "value"), rows, ("Everything else is at its default.",))

    def to_dict(self) -> dict[str, Any]:
        """Describe the plan as plain data; a user's own function leaves only its name."""
        return {"format": FORMAT, **SERIALIZER.encode_fields(self)}

    @classmethod
    @checked
    def from_dict(cls, data: Mapping[str, Any], **given: Any) -> Plan:
        """Rebuild a plan from `to_dict`; `given` supplies what could not be saved, such as a user's own student."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise PlanError(f"a plan has no part {name!r}.", nearest(name, known), "give a field of segue.Plan.")
        fields = {name: value for name, value in data.items() if name not in given}
        version = fields.pop("format", None)
        if version != FORMAT:
            raise PlanError(
                f"the plan has format {version!r}.",
                f"This version of Segue reads format {FORMAT}.",
                "read it with the version that wrote it.",
            )
        return cls(**SERIALIZER.decode_fields(cls, "Plan", fields, "plan"), **given)


class PlanKeywords(TypedDict, total=False):
    """The settings of a Plan beside its sites, as keywords of every method: for editors, type checkers and errors."""

    student: StudentFactory
    adapter: Adapter | None
    gate: Gate
    schedule: Schedule
    guidance: PairLoss | None
    distill: Distillation | None
    phases: tuple[Phase, ...]
    train: Literal["students", "all"]
    backbone: Literal["eval", "train"]
    teacher_gradient: bool | None
    release: bool
    unreached: Literal["error", "ignore"]
    seed: Seed


def __dir__() -> list[str]:
    return sorted(__all__)


def _refuse_second_schedule(plan: Plan) -> None:
    """Refuse a schedule outside the phases, which would have no effect."""
    usual: tuple[Schedule, ...] = (aggr20(),)
    places = (
        ("schedule", plan, usual),
        ("guidance", plan.guidance, usual),
        ("distill", plan.distill, (*usual, Constant(alpha=1.0))),
    )
    for name, part, defaults in places:
        schedule = getattr(part, "schedule", None)
        if schedule is not None and schedule not in defaults:
            raise PlanError(
                f"Plan(phases=...) and the schedule of its {'alpha' if part is plan else name} exclude each other.",
                f"The schedule is {schedule!r:.60}, and each phase has its own.",
                f"leave it out, and set Phase({name}=...).",
            )


def _changed(settings: Any) -> list[tuple[str, Any]]:
    """List the settings that differ from their defaults, and those without one."""
    found = [(f, getattr(settings, f.name)) for f in dataclasses.fields(settings)]
    usual = {f.name: f.default_factory() if callable(f.default_factory) else f.default for f, _ in found}
    return [(f.name, value) for f, value in found if value != usual[f.name]]


def _brief(value: Any) -> str:
    """Write a value as code; of Segue's own parts only what differs from the defaults."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_brief, value))}{',' * (len(value) == 1)})"
    if type(value) in SERIALIZER.kinds.values():
        return f"{type(value).__name__}({', '.join(f'{name}={_brief(part)}' for name, part in _changed(value))})"
    return repr(value)


def _folded(value: Any) -> str:
    several = isinstance(value, tuple) and len(value) > 1
    return _lines("(", [*map(_brief, value)], ")") if several else _brief(value)


def _lines(opening: str, parts: list[str], closing: str) -> str:
    line, inside = f"{opening}{', '.join(parts)}{closing}", ",\n".join([*parts, ""])
    return line if len(line) <= ONE_LINE else f"{opening}\n{indent(inside, '    ')}{closing}"

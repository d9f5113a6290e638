"""The plan: the complete, printable, savable description of one replacement."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from segue import gates, losses, schedules, sites, students
from segue.errors import PlanError, nearest
from segue.gates import Blend, Gate
from segue.losses import CosineGuidance, FeatureGuidance, LogitDistillation, PairLoss
from segue.schedules import Schedule, aggr20
from segue.sites import Selector
from segue.students import Reinit, StudentFactory
from segue.students.adapters import Adapter

FORMAT = 1
ROOMS = {"sites": sites, "gates": gates, "schedules": schedules, "losses": losses, "students": students}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Say what is replaced, by what, and how the teacher hands over.

    >>> Plan(sites="blocks.*.attn").gate
    Blend()
    """

    sites: Selector  # where: a glob, a type, a function, a Span, or several of these
    student: StudentFactory = field(default_factory=Reinit)  # by what
    adapter: Adapter | None = None  # for students of another width than their teachers
    gate: Gate = field(default_factory=Blend)  # alpha -> the student's weight
    schedule: Schedule = field(default_factory=aggr20)  # progress -> alpha, the teacher's share
    guidance: PairLoss | None = None  # a loss at every site
    distill: LogitDistillation | FeatureGuidance | CosineGuidance | None = None  # on the outputs of the whole model
    train: Literal["students", "all"] = "students"  # "all": also the backbone, but for what was frozen before (PEFT does)
    backbone: Literal["eval", "train"] = "eval"  # with train="students": dropout and batch statistics around the sites
    teacher_gradient: bool | None = None  # let the gradient pass the teacher to its input (never its weights); None: at spans
    release: bool = False  # free each teacher at takeover
    unreached: Literal["error", "ignore"] = "error"  # what a forward that never calls a site means
    seed: int = 0  # of the students' initial weights and the gate's noise

    def __post_init__(self) -> None:
        if isinstance(self.sites, list):
            object.__setattr__(self, "sites", tuple(self.sites))
        for name in ("student", "gate", "schedule"):
            _require_callable(name, getattr(self, name))
        for name in ("guidance", "adapter"):
            if getattr(self, name) is not None:
                _require_callable(name, getattr(self, name))
        if self.distill is not None and not isinstance(self.distill, LogitDistillation | FeatureGuidance | CosineGuidance):
            raise PlanError(
                f"Plan(distill={self.distill!r}) was asked for.",
                "It is not a loss on the outputs of the whole model.",
                "use segue.losses.LogitDistillation(), or FeatureGuidance() for an encoder; a loss on each site is guidance=.",
            )
        for name, choices in (
            ("train", ("students", "all")),
            ("backbone", ("eval", "train")),
            ("unreached", ("error", "ignore")),
        ):
            if getattr(self, name) not in choices:
                raise PlanError(
                    f"Plan({name}={getattr(self, name)!r}) was asked for.",
                    f"The choices are {choices[0]!r} and {choices[1]!r}.",
                    f"leave it out for {choices[0]!r}.",
                )

    def to_dict(self) -> dict[str, Any]:
        """Describe the plan as plain data; a user's own function leaves only its name."""
        fields = {f.name: encode(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {"format": FORMAT, **fields}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], **given: Any) -> Plan:
        """Rebuild a plan from `to_dict`; `given` supplies what could not be saved, such as a user's own student."""
        fields = dict(data)
        version = fields.pop("format", None)
        if version != FORMAT:
            raise PlanError(
                f"a plan of format {version!r} was to be read.",
                f"This version of Segue reads format {FORMAT}.",
                "read it with the version that wrote it.",
            )
        known = {f.name for f in dataclasses.fields(cls)}
        _refuse_unknown("Plan", fields, known)
        return cls(**{name: decode(value, name) for name, value in fields.items() if name not in given}, **given)


def unsaved(data: Any, at: str = "") -> list[str]:
    """List the parts of an encoded plan that are only named, not saved."""
    if isinstance(data, dict):
        if "unsaved" in data:
            return [f"{at} ({data['unsaved']})"]
        return [part for key, value in data.items() for part in unsaved(value, f"{at}.{key}" if at else key)]
    if isinstance(data, list):
        return [part for value in data for part in unsaved(value, at)]
    return []


def encode(value: Any) -> Any:
    """Turn settings into plain data that JSON can hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"mapping": {key: encode(item) for key, item in value.items()}}
    room = type(value).__module__.removeprefix("segue.").split(".")[0]
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith("segue.") and room in ROOMS:
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": f"{room}.{type(value).__name__}", **fields}
    return {"unsaved": getattr(value, "__qualname__", type(value).__qualname__)}


def decode(data: Any, at: str) -> Any:
    """Rebuild settings from plain data; only Segue's own kinds can be named, so no foreign code runs."""
    if isinstance(data, list):
        return tuple(decode(item, at) for item in data)
    if not isinstance(data, dict):
        return data
    if "mapping" in data:
        return {key: decode(item, f"{at}.{key}") for key, item in data["mapping"].items()}
    if "unsaved" in data:
        field_name = at.split(".")[0]
        raise PlanError(
            f"the plan's {at} was to be rebuilt.",
            f"It was your own {data['unsaved']!r}, which cannot be saved by name.",
            f"give it again: segue.load_(..., {field_name}=...) or Plan.from_dict(data, {field_name}=...).",
        )
    fields = dict(data)
    kind = fields.pop("kind", None)
    kinds: dict[str, Any] = {
        f"{room}.{name}": made
        for room, module in ROOMS.items()
        for name, made in vars(module).items()
        if dataclasses.is_dataclass(made) and not name.startswith("_")
    }
    if kind not in kinds:
        raise PlanError(
            f"the plan's {at} was to be rebuilt as {kind!r}.",
            nearest(str(kind), list(kinds)),
            "it may come from a newer version of Segue.",
        )
    made = kinds[kind]
    _refuse_unknown(kind, fields, {f.name for f in dataclasses.fields(made)})
    return made(**{name: decode(value, f"{at}.{name}") for name, value in fields.items()})


def _require_callable(name: str, value: object) -> None:
    if isinstance(value, type) or not callable(value):
        raise PlanError(
            f"Plan({name}={value!r}) was asked for.",
            f"It is {'a class' if isinstance(value, type) else 'not a function'}.",
            f"call the class to make one: {value.__name__}()." if isinstance(value, type) else "give something callable.",
        )


def _refuse_unknown(what: str, fields: Mapping[str, Any], known: set[str]) -> None:
    for name in fields:
        if name not in known:
            raise PlanError(
                f"{what} has no setting {name!r}.", nearest(name, sorted(known)), "it may come from another version."
            )

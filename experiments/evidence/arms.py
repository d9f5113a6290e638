"""The arms: eight that every setting has, and those that only digits and Fashion-MNIST have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from segue import methods
from segue.losses import FeatureGuidance, LogitDistillation
from segue.phases import Phase, Rates
from segue.plan import Plan
from segue.schedules import Adaptive, aggr20

REFERENCE = "student_only"  # what every arm must beat
OUTSIDE = (  # what is not our own: published methods, and the paper's
    *("student_only", "distillation", "theseus", "theseus_gumbel", "gumbel_dfg", "dcr", "dcr_dfg"),
    *("fitnets", "lolcats", "halo", "halo_short"),
)
OURS = "local_fit"  # the recipe that `segue.methods` ships
FLOOR = 0.1  # of the guidance, after takeover


@dataclass(frozen=True)
class Arm:
    """One line of a table: a method and the learning rate that `segue tune` starts from."""

    name: str
    label: str
    lr: float | Rates
    plan: Callable[..., Plan]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where the search of each arm begins, and what the arms of a setting share."""

    lr: float | Rates  # of a run in one phase
    fit: float | Rates = 4e-3  # of a local fit
    after: float | Rates = 2.5e-4  # of what follows a local fit
    after_few: float | Rates | None = None  # the same after a fit of few updates, where it has other rates
    hold: float = 0.5  # the part of a run that is our local fit
    then: dict[str, Any] = field(default_factory=lambda: {"fresh": True, "warmup": 0.1})  # of what follows a local fit
    updates: dict[str, int] = field(default_factory=lambda: {"split": 16})  # of our local fit, from each forward: sixteen
    distill: LogitDistillation = field(default_factory=LogitDistillation)
    labels: float = 1.0  # the weight of the task's loss beside a distillation
    outside: float = 1.0  # times the steps, for what is not our own: where it never gets to the target, a longer run says more


def phased(*phases: Phase, **settings: Any) -> Callable[..., Plan]:
    """Follow these phases with feature guidance and, outside of local fits, distillation."""
    return partial(Plan, **{"phases": phases, "guidance": FeatureGuidance(), "distill": LogitDistillation(), **settings})


def fitted(length: float, then: Phase, *, plan: Mapping[str, Any] | None = None, **settings: Any) -> Callable[..., Plan]:
    """Fit each student to its teacher for a part of the run, then continue with the model's own loss."""
    return phased(Phase(name="local fit", length=length, local=True, **settings), then, **(plan or {}))


def eight(start: Start) -> tuple[Arm, ...]:
    """Return the arms of every setting; where time is short, the last are left out first."""
    kl: Callable[..., Plan] = partial(methods.distillation, distill=start.distill)
    few = _few(start)
    if not start.labels:
        kl = phased(Phase(name="students alone", task=0.0), distill=start.distill, guidance=None)
    return (
        Arm("student_only", "Student only", start.lr, methods.student_only),
        Arm("local_fit", "Local fit in sub-batches, jump", start.lr, _ours(start, _jump(start))),
        Arm("halo", "HALO-style: local fit, jump", start.lr, _fit(start, _jump(few), length=0.3)),
        Arm("dcr_dfg", "DCR + DFG", start.lr, methods.dcr_dfg),
        Arm("distillation", "KL", start.lr, kl),
        Arm("dcr", "DCR", start.lr, methods.dcr),
        Arm("theseus", "Theseus", start.lr, methods.theseus),
        Arm("fit_adaptive", "Local fit in sub-batches, Adaptive", start.lr, _ours(start, _adaptive(start))),
    )


def further(start: Start) -> tuple[Arm, ...]:
    """Return the paper's other methods, other published ones, and what can show that a part of our recipe is not needed."""
    lr, kl, few = start.lr, start.distill, _few(start)
    no_kl: dict[str, Any] = {"distill": None}
    short = replace(few, hold=0.2, then={})
    unfitted = Phase(name="handover", schedule=Adaptive())
    return (
        Arm("theseus_gumbel", "Theseus-Gumbel", lr, methods.theseus_gumbel),
        Arm("gumbel_dfg", "Gumbel + DFG", lr, methods.gumbel_dfg),
        Arm("fitnets", "FitNets", lr, methods.fitnets),
        Arm("lolcats", "LoLCATs: local fit, jump, no KL", lr, _fit(start, _jump(few), length=0.5, plan=no_kl)),
        Arm("halo_short", "HALO-style, a shorter local fit", lr, _fit(start, _jump(few), length=0.1)),
        Arm("dcr_dfg_kl", "DCR + DFG + KL", lr, partial(methods.dcr_dfg, distill=kl)),
        Arm("fit_1_ramp", "Local fit once a batch, ramp", lr, _fit(start, _ramp(few))),
        Arm("fit_1_adaptive", "Local fit once a batch, Adaptive", lr, _fit(start, _adaptive(few))),
        Arm("local_fit_short", "Local fit of a fifth, its optimizer goes on", lr, _ours(short, _jump(short))),
        Arm("fit_ramp", "Local fit in sub-batches, ramp", lr, _ours(start, _ramp(start))),
        Arm("fit_only", "Local fit in sub-batches alone, no labels", lr, _only(start)),
        Arm("adaptive_dfg_kl", "Adaptive + DFG + KL, no local fit", lr, phased(unfitted, distill=kl)),
        Arm("fit_adaptive_unguided", "Local fit, Adaptive, no guidance", lr, _ours(start, _adaptive(start, guidance=0.0))),
        Arm("fit_adaptive_no_kl", "Local fit, Adaptive, no KL", lr, _ours(start, _adaptive(start), plan=no_kl)),
        Arm("local_fit_no_kl", "Local fit, jump, no KL", lr, _ours(start, _jump(start), plan=no_kl)),
        Arm("local_fit_floor", "Local fit, jump, guidance stays at a floor", lr, _ours(start, _jump(start, guidance=FLOOR))),
        Arm("dcr_teacher_gradient", "DCR, gradient through teachers", lr, partial(methods.dcr, teacher_gradient=True)),
        Arm(
            "dcr_dfg_paper_scale",
            "DCR + DFG, squared L2",
            lr,
            partial(methods.dcr_dfg, guidance=FeatureGuidance(scale="paper")),
        ),
    )


def _few(start: Start) -> Start:
    """Return the same for an arm whose local fit makes few updates."""
    return replace(start, after=start.after_few or start.after)


ARMS: dict[str, Callable[[Start], tuple[Arm, ...]]] = {"eight": eight, "further": further}


def _fit(
    start: Start, then: Phase, *, length: float = 0.2, plan: Mapping[str, Any] | None = None, **settings: Any
) -> Callable[..., Plan]:
    own = {"lr": start.fit, "weight_decay": 0.0, "task": 0.0, **settings}
    return fitted(length, then, plan={"distill": start.distill, **(plan or {})}, **own)


def _ours(start: Start, then: Phase, *, plan: Mapping[str, Any] | None = None) -> Callable[..., Plan]:
    """Take many small updates from each forward of the teachers."""
    return _fit(start, then, length=start.hold, plan=plan, **start.updates)


def _only(start: Start) -> Callable[..., Plan]:
    return phased(Phase(name="local fit", local=True, task=0.0, lr=start.fit, weight_decay=0.0, **start.updates), distill=None)


def _next(start: Start, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"lr": start.after, "task": start.labels, **start.then, **settings}


def _jump(start: Start, **settings: Any) -> Phase:
    return Phase(name="students alone", **_next(start, settings))


def _ramp(start: Start, **settings: Any) -> Phase:
    """Hand over on the paper's schedule; the guidance falls with alpha."""
    return Phase(name="handover", schedule=aggr20(), **_next(start, settings))


def _adaptive(start: Start, **settings: Any) -> Phase:
    """Hand over as the interface allows; the guidance falls with alpha."""
    return Phase(name="handover", schedule=Adaptive(), **_next(start, settings))

"""Methods as the lab compares them: those of `segue.methods`, and variants that only the lab needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from segue import methods
from segue.border import NotNegative, checked
from segue.errors import ConfigError, nearest
from segue.losses import FeatureGuidance
from segue.plan import Plan
from segue.reporting import palette
from segue.schedules import Constant, Hold, Linear, aggr20


@checked
@dataclass(frozen=True)
class Variant:
    """One curve in a figure: a name, a label, and a function that returns a Plan."""

    name: str
    label: str
    plan: Callable[..., Plan]  # takes sites=, seed= and any other setting of a Plan


def _dfg(**settings: Any) -> Callable[..., Plan]:
    return partial(methods.dcr_dfg, guidance=FeatureGuidance(**settings))


METHODS = {name: Variant(name, methods.LABELS[name], plan) for name, plan in methods.ALL.items()}

PAPER = tuple(METHODS[name] for name in palette.PAPER)

EXTRAS = (
    *(variant for variant in METHODS.values() if variant not in PAPER),
    Variant("theseus_constant_0.5", "Theseus, rate 0.5", partial(methods.theseus, schedule=Constant(alpha=0.5))),
    Variant("theseus_constant_0.7", "Theseus, rate 0.7", partial(methods.theseus, schedule=Constant(alpha=1 - 0.7))),
    Variant(
        "theseus_linear",
        "Theseus, 0.1 to 1 over half the run",
        partial(methods.theseus, schedule=Linear(start=0.9, end=0.0, until=0.5)),
    ),
    Variant("dcr_teacher_gradient", "DCR, gradient through teachers", partial(methods.dcr, teacher_gradient=True)),
    Variant("dcr_all", "DCR, everything trains", partial(methods.dcr, train="all")),
    Variant("student_only_all", "Student only, everything trains", partial(methods.student_only, train="all")),
    Variant("dcr_dfg_0.1", "DCR + DFG, lambda 0.1", _dfg(weight=0.1)),
    Variant("dcr_dfg_0.3", "DCR + DFG, lambda 0.3", _dfg(weight=0.3)),
    Variant("dcr_dfg_3", "DCR + DFG, lambda 3", _dfg(weight=3.0)),
    Variant("dcr_dfg_paper_scale", "DCR + DFG, squared L2", _dfg(scale="paper")),
    Variant("dcr_dfg_constant", "DCR + DFG, lambda constant", _dfg(schedule=Constant(alpha=1.0))),
    Variant("dcr_dfg_linear", "DCR + DFG, lambda linear", _dfg(schedule=Linear())),
    Variant(
        "dcr_dfg_hold",
        "DCR + DFG after a hold",
        partial(
            methods.dcr_dfg,
            schedule=Hold(fraction=0.1, then=aggr20()),
            guidance=FeatureGuidance(schedule=Hold(fraction=0.1, then=aggr20())),
        ),
    ),
    Variant(
        "dcr_dfg_teacher_gradient", "DCR + DFG, gradient through teachers", partial(methods.dcr_dfg, teacher_gradient=True)
    ),
)

ALL = {variant.name: variant for variant in (*PAPER, *EXTRAS)}


@checked
def find(names: Sequence[str]) -> list[Variant]:
    """Return the variants of these names; 'paper' stands for the paper's seven, 'all' for every one."""
    found: list[Variant] = []
    for name in names:
        if name not in ("paper", "all", *ALL):
            raise ConfigError(f"there is no method {name!r}.", nearest(name, list(ALL)), "`segue methods` lists them all.")
        found += PAPER if name == "paper" else ALL.values() if name == "all" else [ALL[name]]
    return list(dict.fromkeys(found))


@checked
def with_lambda(variant: Variant, weight: NotNegative) -> Variant:
    """Return a guided variant whose guidance has another weight; others stay as they are."""

    def plan(**settings: Any) -> Plan:
        made = variant.plan(**settings)
        if not isinstance(made.guidance, FeatureGuidance):
            return made
        return replace(made, guidance=replace(made.guidance, weight=weight))

    return replace(variant, plan=plan)

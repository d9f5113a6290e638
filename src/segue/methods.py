"""Published methods, each a function that returns a Plan.

Every function takes `sites=` and any other setting of a Plan by keyword; what is given wins over the method's own choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.gates import Bernoulli, GumbelSoftmax
from segue.losses import FeatureGuidance, LogitDistillation, OnTeacherStream
from segue.plan import Plan
from segue.schedules import Constant, Hold, Piecewise, aggr20
from segue.sites import Selector


def student_only(*, sites: Selector, **settings: Any) -> Plan:
    """Students from the first step, task loss alone: the baseline."""
    return _plan(sites, settings, schedule=Constant(alpha=0.0))


def distillation(*, sites: Selector, **settings: Any) -> Plan:
    """Students from the first step, KL to the original model's logits at temperature 4."""
    return _plan(sites, settings, schedule=Constant(alpha=0.0), distill=LogitDistillation())


def theseus(*, sites: Selector, **settings: Any) -> Plan:
    """A coin per site and step; its replacing rate goes 0.1, 0.7, 1.0 (BERT-of-Theseus on the paper's schedule)."""
    return _plan(sites, settings, gate=Bernoulli(), schedule=aggr20(start=0.9), teacher_gradient=True)


def theseus_gumbel(*, sites: Selector, **settings: Any) -> Plan:
    """A soft coin per site and step, temperature 1 (the paper's Theseus-Gumbel, GUM)."""
    return _plan(sites, settings, gate=GumbelSoftmax(), schedule=aggr20(start=0.9), teacher_gradient=True)


def gumbel_dfg(*, sites: Selector, **settings: Any) -> Plan:
    """Theseus-Gumbel with feature guidance (GUM+DFG); the teacher is evaluated whatever the gate says."""
    return theseus_gumbel(sites=sites, **{"guidance": FeatureGuidance(), **settings})


def dcr(*, sites: Selector, **settings: Any) -> Plan:
    """A deterministic blend, annealed over the first fifth of training (Algorithm 1)."""
    return _plan(sites, settings)


def dcr_dfg(*, sites: Selector, **settings: Any) -> Plan:
    """DCR with deep feature guidance on the same schedule (equations 3 and 4)."""
    return _plan(sites, settings, guidance=FeatureGuidance())


def fitnets(*, sites: Selector, **settings: Any) -> Plan:
    """Students from the first step, features matched to the teacher's own stream in a full teacher pass."""
    return _plan(sites, settings, schedule=Constant(alpha=0.0), guidance=OnTeacherStream())


def lolcats(*, sites: Selector, hold: float = 0.5, **settings: Any) -> Plan:
    """Attention transfer: the teacher's output flows on while students learn it locally, then a jump to the students."""
    jump = Hold(fraction=hold, then=Constant(alpha=0.0))
    return _plan(sites, settings, schedule=jump, guidance=FeatureGuidance(schedule=jump))


def halo(*, sites: Selector, hold: float = 0.3, **settings: Any) -> Plan:
    """Local alignment as in `lolcats`, then students alone with distillation from the original model."""
    afterwards = Piecewise(points=((hold, 0.0), (hold, 1.0)))
    return lolcats(sites=sites, hold=hold, **{"distill": LogitDistillation(schedule=afterwards), **settings})


ALL: dict[str, Callable[..., Plan]] = {
    method.__name__: method
    for method in (
        student_only,
        distillation,
        theseus,
        theseus_gumbel,
        gumbel_dfg,
        dcr,
        dcr_dfg,
        fitnets,
        lolcats,
        halo,
    )
}


def table() -> str:
    """List the methods with what they set, as Markdown made from the plans themselves.

    >>> print(table().splitlines()[0])
    | method | gate | guidance | distillation | gradient through the teacher | in one line |
    """
    rows = [
        "| method | gate | guidance | distillation | gradient through the teacher | in one line |",
        "|---|---|---|---|---|---|",
    ]
    for name, method in ALL.items():
        plan = method(sites="*")
        line = (method.__doc__ or "").splitlines()[0]
        rows.append(
            f"| `{name}` | {_kind(plan.gate)} | {_kind(plan.guidance)} | {_kind(plan.distill)} | "
            f"{'yes' if plan.teacher_gradient else 'no'} | {line} |"
        )
    return "\n".join(rows)


def _kind(part: object) -> str:
    return "none" if part is None else type(part).__name__


def _plan(sites: Selector, settings: dict[str, Any], **own: Any) -> Plan:
    return Plan(sites=sites, **{**own, **settings})

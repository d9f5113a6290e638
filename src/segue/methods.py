"""Published methods, each a function that returns a Plan.

Every function takes `sites=` and any other setting of a Plan by keyword; what the caller gives wins over the method's choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

from segue.border import Fraction, NotNegative, PositiveFloat, PositiveInt, Unit, checked
from segue.gates import Bernoulli, GumbelSoftmax
from segue.losses import FeatureGuidance, LogitDistillation, OnTeacherStream
from segue.phases import Phase, Rates
from segue.plan import Plan
from segue.schedules import Constant, aggr20
from segue.sites import Selector

Method: TypeAlias = Callable[..., Plan]  # takes sites= and any other setting of a Plan
M = TypeVar("M", bound=Method)

TRANSFER_RATES = Rates(new=1e-2, copied=1e-4, backbone=1e-5)  # feature maps begin far from their end, copied weights near it

ALL: dict[str, Method] = {}
LABELS: dict[str, str] = {}  # what figures and tables call each method


@checked
def method(*, label: str) -> Callable[[M], M]:
    """Add a function that returns a Plan to the methods that Segue lists, tests and compares."""

    def add(made: M) -> M:
        guarded = checked(made)
        ALL[made.__name__] = guarded
        LABELS[made.__name__] = label
        return guarded

    return add


@method(label="Student only")
def student_only(*, sites: Selector, **settings: Any) -> Plan:
    """Students from the first step, task loss alone: the baseline."""
    return _plan(sites, settings, schedule=Constant(alpha=0.0))


@method(label="KL distillation")
def distillation(*, sites: Selector, **settings: Any) -> Plan:
    """Students from the first step, KL to the original model's logits at temperature 4."""
    return _plan(sites, settings, schedule=Constant(alpha=0.0), distill=LogitDistillation())


@method(label="Theseus")
def theseus(*, sites: Selector, **settings: Any) -> Plan:
    """A coin per site and step; its replacing rate goes 0.1, 0.7, 1.0 (BERT-of-Theseus on the paper's schedule)."""
    return _plan(sites, settings, gate=Bernoulli(), schedule=aggr20(start=0.9), teacher_gradient=True)


@method(label="Theseus-Gumbel")
def theseus_gumbel(*, sites: Selector, **settings: Any) -> Plan:
    """A soft coin per site and step, temperature 1 (the paper's Theseus-Gumbel, GUM)."""
    return _plan(sites, settings, gate=GumbelSoftmax(), schedule=aggr20(start=0.9), teacher_gradient=True)


@method(label="Gumbel + DFG")
def gumbel_dfg(*, sites: Selector, **settings: Any) -> Plan:
    """Theseus-Gumbel with feature guidance (GUM+DFG); the teacher is computed whatever the gate draws."""
    return theseus_gumbel(sites=sites, **{"guidance": FeatureGuidance(), **settings})


@method(label="DCR")
def dcr(*, sites: Selector, **settings: Any) -> Plan:
    """A deterministic blend, annealed over the first fifth of training (Algorithm 1)."""
    return _plan(sites, settings)


@method(label="DCR + DFG")
def dcr_dfg(*, sites: Selector, **settings: Any) -> Plan:
    """DCR with deep feature guidance on the same schedule (equations 3 and 4)."""
    return _plan(sites, settings, guidance=FeatureGuidance())


@method(label="FitNets")
def fitnets(*, sites: Selector, **settings: Any) -> Plan:
    """Students from the first step, features matched to the teacher's own stream in a full teacher pass."""
    return _plan(sites, settings, schedule=Constant(alpha=0.0), guidance=OnTeacherStream())


@method(label="LoLCATs corner")
def lolcats(*, sites: Selector, hold: Fraction = 0.5, **settings: Any) -> Plan:
    """Attention transfer: the teacher's output flows on while students learn it locally, then a jump to the students."""
    if "schedule" in settings:
        return _plan(sites, settings, guidance=FeatureGuidance())
    alone = (Phase(name="students alone"),) if hold < 1 else ()
    local = Phase(name="local fit", length=hold, local=True)
    return _plan(sites, settings, phases=(local, *alone), guidance=FeatureGuidance())


@method(label="HALO corner")
def halo(*, sites: Selector, hold: Fraction = 0.3, **settings: Any) -> Plan:
    """Local alignment as in `lolcats`, then students alone with distillation from the original model."""
    return lolcats(sites=sites, hold=hold, **{"distill": LogitDistillation(), **settings})


@method(label="Local fit")
def local_fit(
    *,
    sites: Selector,
    hold: Fraction = 0.2,
    split: PositiveInt = 4,
    reuse: PositiveInt = 4,
    lr: PositiveFloat = 4e-3,
    **settings: Any,
) -> Plan:
    """Fit each student to its teacher in many small updates from each forward, then students alone with distillation."""
    if "schedule" in settings:
        return _plan(sites, settings, guidance=FeatureGuidance(), distill=LogitDistillation())
    local = Phase(name="local fit", length=hold, local=True, lr=lr, weight_decay=0.0, split=split, reuse=reuse)
    alone = (Phase(name="students alone", lr=lr / 4),) if hold < 1 else ()
    return _plan(sites, settings, phases=(local, *alone), guidance=FeatureGuidance(), distill=LogitDistillation())


@method(label="Transfer")
def transfer(
    *,
    sites: Selector,
    hold: Fraction = 0.75,
    first: Literal["new", "all"] = "all",
    split: PositiveInt = 8,
    lr: PositiveFloat | Rates = TRANSFER_RATES,
    slower: PositiveFloat = 0.3,
    warmup: Unit = 0.1,
    task: NotNegative = 0.0,
    **settings: Any,
) -> Plan:
    """Fit students on the teacher's stream, nothing after the last site computed; then students alone by KL at temperature 1.

    `first` says which parameters train while alpha is 1: those that are new beside the copied ones, such as feature maps, or
    all. Each batch is `split` updates there. Afterwards rates are `slower` times those, and of new parameters a tenth of that,
    but not below that of copied ones; `warmup` is the part in which they rise, and `task` the weight of the task's loss.
    """
    parts = {"guidance": FeatureGuidance(), "distill": LogitDistillation(temperature=1.0)}
    if "schedule" in settings:
        return _plan(sites, settings, **parts)
    rates = lr if isinstance(lr, Rates) else Rates(new=lr)
    only_new = dataclasses.replace(rates, copied=0.0) if first == "new" else rates
    local = Phase(name="transfer", length=hold, local=True, task=0.0, lr=only_new, weight_decay=0.0, split=split)
    alone = Phase(name="students alone", lr=_afterwards(rates, slower), warmup=warmup, task=task, fresh=True)
    return _plan(sites, settings, phases=(local, alone) if hold < 1 else (local,), **parts)


def _afterwards(rates: Rates, slower: float) -> Rates:
    """Return the rates after a transfer, when new parameters are about as near to their end as copied ones."""
    new = min(rates.new, max(rates.new / 10, rates.of("copied")))
    kinds = {"copied": rates.copied, "backbone": rates.backbone}
    return Rates(new=slower * new, **{kind: None if rate is None else slower * rate for kind, rate in kinds.items()})


def table() -> str:
    """List the methods with what they set, as Markdown made from the plans themselves.

    >>> print(table().splitlines()[0])
    | method | gate | guidance | distillation | gradient through the teacher | in one line |
    """
    rows = [
        "| method | gate | guidance | distillation | gradient through the teacher | in one line |",
        "|---|---|---|---|---|---|",
    ]
    for name, made in ALL.items():
        plan = made(sites="*")
        line = (made.__doc__ or "").splitlines()[0]
        rows.append(
            f"| `{name}` | {_kind(plan.gate)} | {_kind(plan.guidance)} | {_kind(plan.distill)} | "
            f"{'yes' if plan.teacher_gradient else 'no'} | {line} |"
        )
    return "\n".join(rows)


def _kind(part: object) -> str:
    return "none" if part is None else type(part).__name__


def _plan(sites: Selector, settings: dict[str, Any], **own: Any) -> Plan:
    return Plan(sites=sites, **{**own, **settings})

"""Published methods, each a function that returns a Plan.

Every function takes the sites and any other setting of a Plan by keyword; what the caller gives wins over the method's choice.

>>> dcr_dfg("blocks.*.attn", train="all").train
'all'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

from typing_extensions import Unpack

from segue.border import Fraction, NotNegative, PositiveFloat, PositiveInt, Unit, checked
from segue.gates import Bernoulli, GumbelSoftmax
from segue.losses import FeatureGuidance, LogitDistillation, OnTeacherStream
from segue.phases import Phase, Rates
from segue.plan import Plan, PlanKeywords
from segue.schedules import Constant, aggr20
from segue.sites import Selector

__all__ = ["Method", "method", "names", "table"]  # and what @method adds


def __dir__() -> list[str]:
    return sorted(__all__)


Method: TypeAlias = Callable[..., Plan]  # takes the sites and any other setting of a Plan by keyword
M = TypeVar("M", bound=Method)

TRANSFER_RATES = Rates(new=1e-2, copied=1e-4, backbone=1e-5)  # feature maps begin far from their end, copied weights near it

ALL: dict[str, Method] = {}
LABELS: dict[str, str] = {}  # what figures and tables call each method


@checked
def method(*, label: str) -> Callable[[M], M]:
    """Add a function that returns a Plan to the methods that Segue lists, tests and compares.

        @segue.methods.method(label="Slow DCR")
        def slow_dcr(sites, **settings):
            return segue.Plan(sites=sites, **{"schedule": aggr20(start=0.5), **settings})

    Args:
        label: What figures and tables call it.
    """

    def add(made: M) -> M:
        guarded = checked(made)
        ALL[made.__name__] = guarded
        LABELS[made.__name__] = label
        if made.__module__ == __name__:
            __all__.append(made.__name__)
        return guarded

    return add


def names() -> list[str]:
    """List the methods by name, yours included.

    >>> names()[:3]
    ['student_only', 'distillation', 'theseus']
    """
    return list(ALL)


@method(label="Student only")
def student_only(sites: Selector, **settings: Unpack[PlanKeywords]) -> Plan:
    """Students from the first step, task loss alone: the baseline.

    >>> student_only("blocks.*.attn").schedule
    Constant(alpha=0.0)

    Args:
        sites: Where, as in `segue.Plan`.
        settings: Any other setting of `segue.Plan`; what you give wins over the method's choice.
    """
    return _plan(sites, settings, schedule=Constant(alpha=0.0))


@method(label="KL distillation")
def distillation(sites: Selector, **settings: Unpack[PlanKeywords]) -> Plan:
    """Students from the first step, KL to the original model's logits at temperature 4.

    >>> distillation("blocks.*.attn").distill.temperature
    4.0

    Args:
        sites: Where, as in `segue.Plan`.
        settings: Any other setting of `segue.Plan`; what you give wins over the method's choice.
    """
    return _plan(sites, settings, schedule=Constant(alpha=0.0), distill=LogitDistillation())


@method(label="Theseus")
def theseus(sites: Selector, **settings: Unpack[PlanKeywords]) -> Plan:
    """A coin per site and step; its replacing rate goes 0.1, 0.7, 1.0 (BERT-of-Theseus on the paper's schedule).

    >>> theseus("blocks.*.attn").gate
    Bernoulli()

    Args:
        sites: Where, as in `segue.Plan`.
        settings: Any other setting of `segue.Plan`; what you give wins over the method's choice.
    """
    return _plan(sites, settings, gate=Bernoulli(), schedule=aggr20(start=0.9), teacher_gradient=True)


@method(label="Theseus-Gumbel")
def theseus_gumbel(sites: Selector, **settings: Unpack[PlanKeywords]) -> Plan:
    """A soft coin per site and step, temperature 1 (the paper's Theseus-Gumbel, GUM).

    >>> theseus_gumbel("blocks.*.attn").gate
    GumbelSoftmax(temperature=1.0)

    Args:
        sites: Where, as in `segue.Plan`.
        settings: Any other setting of `segue.Plan`; what you give wins over the method's choice.
    """
    return _plan(sites, settings, gate=GumbelSoftmax(), schedule=aggr20(start=0.9), teacher_gradient=True)


@method(label="Gumbel + DFG")
def gumbel_dfg(sites: Selector, **settings: Unpack[PlanKeywords]) -> Plan:
    """Theseus-Gumbel with feature guidance (GUM+DFG); the teacher is computed whatever the gate draws.

    >>> gumbel_dfg("blocks.*.attn").guidance == FeatureGuidance()
    True

    Args:
        sites: Where, as in `segue.Plan`.
        settings: Any other setting of `segue.Plan`; what you give wins over the method's choice.
    """
    merged: PlanKeywords = {"guidance": FeatureGuidance(), **settings}
    return theseus_gumbel(sites, **merged)


@method(label="DCR")
def dcr(sites: Selector, **settings: Unpack[PlanKeywords]) -> Plan:
    """A deterministic blend, annealed over the first fifth of training (Algorithm 1).

    >>> dcr("blocks.*.attn", train="all").train
    'all'

    Args:
        sites: Where, as in `segue.Plan`.
        settings: Any other setting of `segue.Plan`; what you give wins over the method's choice.
    """
    return _plan(sites, settings)


@method(label="DCR + DFG")
def dcr_dfg(sites: Selector, **settings: Unpack[PlanKeywords]) -> Plan:
    """DCR with deep feature guidance on the same schedule (equations 3 and 4).

    >>> dcr_dfg("blocks.*.attn").guidance == FeatureGuidance()
    True

    Args:
        sites: Where, as in `segue.Plan`.
        settings: Any other setting of `segue.Plan`; what you give wins over the method's choice.
    """
    return _plan(sites, settings, guidance=FeatureGuidance())


@method(label="FitNets")
def fitnets(sites: Selector, **settings: Unpack[PlanKeywords]) -> Plan:
    """Students from the first step, features matched to the teacher's own stream in a full teacher pass.

    >>> fitnets("blocks.*.attn").guidance == OnTeacherStream()
    True

    Args:
        sites: Where, as in `segue.Plan`.
        settings: Any other setting of `segue.Plan`; what you give wins over the method's choice.
    """
    return _plan(sites, settings, schedule=Constant(alpha=0.0), guidance=OnTeacherStream())


@method(label="LoLCATs corner")
def lolcats(sites: Selector, *, hold: Fraction = 0.5, **settings: Unpack[PlanKeywords]) -> Plan:
    """Attention transfer: the teacher's output flows on while students learn it locally, then a jump to the students.

    >>> [phase.length for phase in lolcats("blocks.*.attn", hold=0.4).phases]
    [0.4, None]

    Args:
        sites: Where, as in `segue.Plan`.
        hold: The fraction of the run in which alpha is 1 and students learn from their teachers.
        settings: Any other setting of `segue.Plan`; what you give wins over the method's choice.
    """
    if "schedule" in settings:
        return _plan(sites, settings, guidance=FeatureGuidance())
    alone = (Phase(name="students alone"),) if hold < 1 else ()
    local = Phase(name="local fit", length=hold, local=True)
    return _plan(sites, settings, phases=(local, *alone), guidance=FeatureGuidance())


@method(label="HALO corner")
def halo(sites: Selector, *, hold: Fraction = 0.3, **settings: Unpack[PlanKeywords]) -> Plan:
    """Local alignment as in `lolcats`, then students alone with distillation from the original model.

    >>> halo("blocks.*.attn", hold=0.4).distill == LogitDistillation()
    True

    Args:
        sites: Where, as in `segue.Plan`.
        hold: The fraction of the run in which alpha is 1 and students learn from their teachers.
        settings: Any other setting of `segue.Plan`; what you give wins over the method's choice.
    """
    merged: PlanKeywords = {"distill": LogitDistillation(), **settings}
    return lolcats(sites, hold=hold, **merged)


@method(label="Local fit")
def local_fit(
    sites: Selector,
    *,
    hold: Fraction = 0.5,
    split: PositiveInt = 16,
    reuse: PositiveInt = 1,
    lr: PositiveFloat = 4e-3,
    **settings: Unpack[PlanKeywords],
) -> Plan:
    """Fit each student to its teacher in many small updates from each forward, then students alone with distillation.

    >>> local_fit("blocks.*.attn").phases[0].split
    16

    Args:
        sites: Where, as in `segue.Plan`.
        hold: The fraction of the run in which alpha is 1 and students learn from their teachers.
        split: Parts of a batch, each an update; a batch of fewer samples has one for each.
        reuse: Passes over the parts; more than one for a small batch.
        lr: The learning rate of the local fit; a sixteenth of it afterwards.
        settings: Any other setting of `segue.Plan`; what you give wins over the method's choice.
    """
    if "schedule" in settings:
        return _plan(sites, settings, guidance=FeatureGuidance(), distill=LogitDistillation())
    fitted: dict[str, Any] = {"lr": lr, "weight_decay": 0.0, "split": split, "reuse": reuse}
    local = Phase(name="local fit", length=hold, local=True, task=0.0, **fitted)
    alone = (Phase(name="students alone", lr=lr / 16, warmup=0.1, fresh=True),) if hold < 1 else ()
    return _plan(sites, settings, phases=(local, *alone), guidance=FeatureGuidance(), distill=LogitDistillation())


@method(label="Transfer")
def transfer(
    sites: Selector,
    *,
    hold: Fraction = 0.75,
    first: Literal["new", "all"] = "all",
    split: PositiveInt = 8,
    lr: PositiveFloat | Rates = TRANSFER_RATES,
    slower: PositiveFloat = 0.3,
    warmup: Unit = 0.1,
    task: NotNegative = 0.0,
    **settings: Unpack[PlanKeywords],
) -> Plan:
    """Fit students on the teacher's stream, nothing after the last site computed; then students alone by KL at temperature 1.

    >>> transfer("model.layers.*.self_attn", first="new").phases[0].lr.copied
    0.0

    Args:
        sites: Where, as in `segue.Plan`.
        hold: The fraction of the run in which alpha is 1 and students learn from their teachers.
        first: Which parameters train while alpha is 1: those that are new beside the copied ones, such as feature maps, or all.
        split: How many updates each batch gives there.
        lr: One learning rate for new parameters, or a rate for each kind of parameter, while alpha is 1.
        slower: The part of those rates that is left afterwards; of new ones a tenth of it, but no less than of copied ones.
        warmup: The fraction of the second part in which its rates rise.
        task: The weight of the task's loss afterwards.
        settings: Any other setting of `segue.Plan`; what you give wins over the method's choice.
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


def _plan(sites: Selector, settings: PlanKeywords, **own: Any) -> Plan:
    return Plan(sites=sites, **{**own, **settings})

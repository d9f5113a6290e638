"""Recipes of a conversion: the plan, the learning rates and the length that its settings stand for, and their defaults."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from segue import students
from segue.convert import parse_student as parse
from segue.convert.options import Conversion
from segue.convert.pretrained import Base
from segue.convert.sampling import SELF
from segue.core.building import build_students
from segue.core.kinds import copied_parameters
from segue.core.surgery import teacher_at
from segue.errors import ConfigError, SiteError
from segue.losses import FeatureGuidance, LogitDistillation
from segue.methods import TRANSFER_RATES
from segue.phases import Phase, Rates
from segue.plan import Plan
from segue.reporting.records import read_json
from segue.schedules import Constant
from segue.sites import Selector, Span, select
from segue.training.recipe import Recipe

METHODS = {"causal": "transfer"}  # by the kind of model, as one would type it
METHOD = "dcr_dfg"  # of all other kinds
STEPS = 400
RATES = TRANSFER_RATES  # of students that begin with weights of their teachers
RATE = 5e-4  # where nothing is copied
BACKBONE = 0.1  # of the rate of copied parameters, if all of the model trains
WARMUP = 0.05  # where no phase has rates of its own
RATE_OPTIONS = ("lr", "lr_new", "lr_backbone")
SAMPLING = ("samples", "sampling_temperature", "sampling_top_p")
PLAN = ("sites", "student", "method", "guidance", "distill", "exclude", "control")  # what a plan in a file says itself


def with_defaults(settings: Conversion, kind: str) -> Conversion:
    """Say what the settings leave open, so that a resume finds it as it was."""
    method = settings.method or (None if settings.plan else METHODS.get(kind, METHOD))
    return dataclasses.replace(settings, method=method, steps=settings.steps or STEPS)


def require_complete(settings: Conversion) -> None:
    """Refuse settings that leave out what is replaced, or say it twice."""
    said = [name for name in PLAN if getattr(settings, name) not in (None, False)]
    if settings.plan is not None and (said or settings.train == "all" or settings.lora):
        twice = said[0] if said else "lora" if settings.lora else "train"
        raise ConfigError(
            f"--plan and --{twice} exclude each other.",
            f"The plan in {settings.plan} says itself what is replaced, by what, how, and what trains.",
            f"leave --{twice} out, or change the file.",
        )
    missing = [name for name in ("sites", "student") if getattr(settings, name) is None and settings.plan is None]
    if missing and not (missing == ["student"] and settings.control):
        raise ConfigError(
            f"--{missing[0]} is missing.",
            "A conversion needs the modules to replace, and their replacement.",
            "give for example --sites 'model.layers.*.self_attn' --student 'WindowedLinear(window=64)', or --plan FILE.",
        )
    unused = [name for name in SAMPLING if settings.data != SELF and getattr(settings, name) != getattr(Conversion, name)]
    if unused:
        option = f"--{unused[0].replace('_', '-')}"
        raise ConfigError(
            f"{option} needs --data self.", f"Nothing is sampled: --data is {settings.data}.", f"leave {option} out."
        )
    if settings.lora and settings.train == "all":
        raise ConfigError(
            "--lora and --train all exclude each other.",
            "LoRA trains small adapters in place of the weights around the sites.",
            "leave one of them out.",
        )


def plan_of(settings: Conversion, base: Base) -> Plan:
    """Return the plan of a conversion, for this model."""
    if settings.control and base.kind == "encoder":
        raise ConfigError(
            "--control is of no use here.",
            f"{base.name} learns what the original returns, and exact softmax students return it already.",
            "leave --control out.",
        )
    plan = _plan_in(settings.plan) if settings.plan is not None else _plan_by_method(settings, base)
    own = settings.distill is not None or (settings.plan is not None and plan.distill is not None)
    if base.kind == "encoder" and not own:  # the only task to learn from is what the original returns
        plan = dataclasses.replace(plan, distill=FeatureGuidance(schedule=Constant(alpha=1.0)))
    _, new = _kinds(base, plan)
    plan = plan if new else dataclasses.replace(plan, phases=tuple(map(_for_copied, plan.phases)))
    return _with_task(plan) if settings.control and _compares_only(plan) else plan


def notes(settings: Conversion, plan: Plan) -> list[str]:
    """Say in which ways a conversion is not what its method is elsewhere."""
    found = []
    if settings.control:
        how = f"by the loss of the task, as those of {settings.method} compare with the original, which they equal"
        trained = f"trained {how if is_by_task(plan) else 'in the same way'}"
        found.append(f"control: exact softmax students, {trained}; nothing is converted")
    if settings.method is not None and _takes_one_update(settings):
        made, own = parse.method(settings.method)
        usual = inspect.signature(made).parameters["split"].default
        if "split" not in own:
            why = "--shard" if settings.shard else "--accumulate"
            found.append(f"{settings.method}: one update for each batch, not {usual}, which {why} leaves no room for")
    return found


def is_by_task(plan: Plan) -> bool:
    """Return whether the phases of a control have the loss of the task in place of those that compare with the original."""
    return bool(plan.phases) and plan.guidance is None and plan.distill is None


def _compares_only(plan: Plan) -> bool:
    """Return whether every loss of a plan compares with the original: exact students would learn nothing."""
    return bool(plan.phases) and all(phase.task == 0 for phase in plan.phases)


def _with_task(plan: Plan) -> Plan:
    """Let students learn the task alone, in phases of the same lengths and learning rates."""
    plain: dict[str, Any] = {"local": False, "split": 1, "reuse": 1, "tolerance": 0.0, "guidance": None, "task": 1.0}
    phases = tuple(dataclasses.replace(phase, name=f"task, not {phase.name}", **plain) for phase in plan.phases)
    return dataclasses.replace(plan, guidance=None, distill=None, phases=phases)


def _takes_one_update(settings: Conversion) -> bool:
    """Return whether a step has no room for several updates, which take a batch of their own, and complete weights."""
    made, _ = parse.method(str(settings.method))
    return "split" in inspect.signature(made).parameters and (settings.accumulate > 1 or settings.shard)


def recipe_of(settings: Conversion, base: Base, plan: Plan) -> Recipe:
    """Return the training settings of a conversion; a phase may have rates of its own."""
    _refuse_unused_rates(settings, plan)
    copied, _ = _kinds(base, plan)
    names = ("steps", "accumulate", "precision", "shard", "compile", "seed")
    warmup = WARMUP if settings.warmup is None else settings.warmup
    return Recipe(lr=_rates(settings, copied, plan.train), warmup=warmup, **{name: getattr(settings, name) for name in names})


def _plan_by_method(settings: Conversion, base: Base) -> Plan:
    assert settings.method is not None
    made, own = parse.method(settings.method)
    student = students.Softmax() if settings.control else parse.student(str(settings.student))
    train = "all" if settings.lora else settings.train
    given = {"sites": _sites(settings, base), "student": student, "train": train, "seed": settings.seed, **own}
    takes = inspect.signature(made).parameters
    lr = takes.get("lr")
    if lr is not None and (settings.lr is not None or settings.lr_new is not None or isinstance(lr.default, Rates)):
        copied, _ = _kinds(base, Plan(sites=given["sites"], student=student))
        given.setdefault("lr", _rates(settings, copied, train))
    if _takes_one_update(settings):
        given.setdefault("split", 1)
    plan = made(**given)
    if settings.warmup is not None:
        plan = dataclasses.replace(plan, phases=tuple(_rising(phase, settings.warmup) for phase in plan.phases))
    for name, usual in (("guidance", FeatureGuidance()), ("distill", LogitDistillation(temperature=1.0))):
        if (text := getattr(settings, name)) is not None:
            plan = dataclasses.replace(plan, **{name: parse.loss(text, name, getattr(plan, name) or usual)})
    return plan


def by_default(plan: Plan, base: Base) -> Plan:
    """Return what a plan replaces with the method and the rates that a conversion of this model has by default.

    A model whose kind has no method of its own, and a plan whose students have nothing to train, stay as they are.
    """
    if base.kind not in METHODS or plan.train == "all":
        return plan
    made, _ = parse.method(METHODS[base.kind])
    copied, _ = _kinds(base, plan)
    return made(sites=plan.sites, student=plan.student, seed=plan.seed, lr=RATES if copied else Rates(new=RATE))


def _plan_in(place: str) -> Plan:
    path = Path(place).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no plan in {place}.", "It is not a file.", "write json.dumps(plan.to_dict()) to a file.")
    return Plan.from_dict(read_json(path))


def _refuse_unused_rates(settings: Conversion, plan: Plan) -> None:
    """Refuse rates that nothing would train with."""
    given = [name for name in RATE_OPTIONS if getattr(settings, name) is not None]
    of_file = settings.plan is not None and bool(plan.phases) and all(phase.lr is not None for phase in plan.phases)
    if "lr_backbone" in given and plan.train != "all":
        hint = "leave it out, or train more: --train all, --lora RANK, or a plan that says so."
        raise ConfigError("--lr-backbone is of no use here.", "Nothing around the sites is trained.", hint)
    own = settings.method is not None and "lr" in parse.method(settings.method)[1]
    unused = given if own or of_file else []
    unused += ["warmup"] if of_file and settings.warmup is not None else []
    if unused:
        option = f"--{unused[0].replace('_', '-')}"
        found = f"{settings.method or f'Every phase of the plan in {settings.plan}'} has learning rates of its own."
        hint = f"leave {option} out, or the rates there."
        if of_file:
            change = '"warmup"' if unused[0] == "warmup" else f'"lr" to null, so that they take {option}'
            hint = f"leave {option} out, or change the phases in that file: set their {change}."
        raise ConfigError(f"{option} is of no use here.", found, hint)


def _rates(settings: Conversion, copied: int, train: str) -> float | Rates:
    """Return the learning rates, one for all or one for each kind of parameter, where some or none are copied."""
    usual = RATES if copied else Rates(new=RATE)
    of_copied = usual.of("copied") if settings.lr is None else settings.lr
    of_new = (usual.new if settings.lr is None else settings.lr) if settings.lr_new is None else settings.lr_new
    around = of_copied * (1.0 if settings.lora else BACKBONE) if settings.lr_backbone is None else settings.lr_backbone
    if of_new == of_copied and (around == of_copied or train != "all"):
        return of_new
    return Rates(new=of_new, copied=of_copied, backbone=around)


def _kinds(base: Base, plan: Plan) -> tuple[int, int]:
    """Count the copied and the new parameters of the student at the first site."""
    site = select(base.model, plan.sites)[0]
    student = build_students(base.model, plan, [site])[site.name]
    copied = len(copied_parameters(student, teacher_at(base.model, site)))
    return copied, len(list(student.parameters())) - copied


def _rising(phase: Phase, warmup: float) -> Phase:
    """Let the rates of a phase that has its own rise in a fraction of its steps."""
    return phase if phase.lr is None else dataclasses.replace(phase, warmup=warmup)


def _for_copied(phase: Phase) -> Phase:
    """Let a phase that is for new parameters train the copied ones, where students have no others."""
    if not isinstance(phase.lr, Rates) or phase.lr.copied != 0:
        return phase
    return dataclasses.replace(phase, lr=dataclasses.replace(phase.lr, copied=RATES.copied))


def _sites(settings: Conversion, base: Base) -> Selector:
    """Return the names of the sites without the excluded ones; a span stays as it is."""
    wanted = parse.sites(str(settings.sites))
    names = [site.name for site in select(base.model, wanted)]
    if settings.exclude is None:
        return wanted if isinstance(wanted, Span) else tuple(names)
    if isinstance(wanted, Span):
        raise SiteError("layers of a span cannot be excluded.", "It replaces complete groups.", "give it first= and last=.")
    excluded = {site.name for site in select(base.model, settings.exclude)}
    if not excluded & set(names):
        found = f"The sites are {names[0]} and {len(names) - 1} more."
        hint = "a pattern matches complete names, as in --sites."
        raise SiteError(f"the pattern {settings.exclude!r} to exclude matches none of the {len(names)} sites.", found, hint)
    if not set(names) - excluded:
        found = f"It matches all {len(names)} of them, and nothing is left to replace."
        raise SiteError(f"the pattern {settings.exclude!r} excludes all sites.", found, "exclude fewer.")
    return tuple(name for name in names if name not in excluded)


def described(settings: Conversion, plan: Plan) -> dict[str, Any]:
    """Return the settings as plain data; the sites and the student of a plan in a file, or of a control, are among them."""
    found = dataclasses.asdict(settings)
    if settings.plan is not None:
        names = plan.sites if isinstance(plan.sites, tuple) else (plan.sites,)
        found["sites"] = ", ".join(name if isinstance(name, str) else repr(name) for name in names)
    if settings.plan is not None or settings.control:
        found["student"] = repr(plan.student)
    return found

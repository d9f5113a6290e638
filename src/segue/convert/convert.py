"""convert(): a pretrained model and data in, a folder with the converted model out; an interrupted conversion resumes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from segue.border import checked
from segue.checkpoint import folders
from segue.checkpoint.lock import locked_on_rank_0
from segue.convert import folder, pretrained
from segue.convert import parse_student as parse
from segue.convert.data import Data, load
from segue.convert.options import Conversion
from segue.convert.pretrained import Base, open_base
from segue.errors import ConfigError, SiteError, nearest
from segue.losses import FeatureGuidance
from segue.methods import ALL
from segue.plan import Plan, decode
from segue.reporting.records import read_json, removed_on_failure, write_json
from segue.schedules import Constant
from segue.sites import Selector, Span, select
from segue.training import distributed as launch
from segue.training.fit import fit
from segue.training.recipe import Recipe

__all__ = ["Conversion", "convert"]


@checked
def convert(
    settings: Conversion,
    out: Path,
    say: Callable[[str], None] = print,
    *,
    resume: Path | None = None,
    allow_changes: Sequence[str] = (),
) -> dict[str, Any]:
    """Convert a model, or resume its conversion, and return the record that is written to the folder `out`.

    `resume` is the checkpoint to take instead of the latest, `allow_changes` what may differ from it.
    """
    recipe, student, processes = _recipe(settings), parse.student(settings.student), launch.launched()
    main = processes.rank == 0
    say = say if main else _silent
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is not a folder.", "It is a file.", "give another --out.")
    work = out / "training"
    _refuse_finished(out)
    _require_same_settings(settings, work)
    base = open_base(settings.model)
    data = load(base, settings)
    base.model.to(processes.device)
    plan = _plan(settings, base, _saved_student(work) or student)
    made = ("settings.json", "metrics.jsonl", "checkpoints") if main else ()
    with locked_on_rank_0(work), removed_on_failure(work, *made):
        _refuse_finished(out)  # both again: another process may have been quicker
        _require_same_settings(settings, work)
        if main:
            write_json(dataclasses.asdict(settings), work / "settings.json")
        processes.wait()
        say(f"{settings.model}: {type(base.model).__name__}, {sum(p.numel() for p in base.model.parameters()):,} parameters")
        say(f"{len(select(base.model, plan.sites))} sites; training on {data.train_size}, evaluating on {data.held_out_size}")
        original = folder.evaluated(base.model, data)
        say(f"original: {_quality(data, original)}")
        try:
            trained = fit(
                base.model,
                plan,
                data.train,
                data.task,
                recipe=recipe,
                validation=data.held_out,
                scores=data.task.scores,
                folder=work,
                resume=resume or True,
                allow_changes=allow_changes,
                evaluations=settings.evaluations,
                on_eval=lambda point: say(_line(data, original, point)),
                progress="converting",
            )
        except (KeyboardInterrupt, SystemExit):
            say(f"To resume, repeat the command, or: segue resume {out}")
            raise
        assert trained.handover is not None
        trained.handover.finalize_()
        state = folder.full_state(base.model)
        record: dict[str, Any] = {}
        if main:
            finished = folder.Finished(settings, base, data, plan, original, trained)
            dtype = base.dtype if settings.dtype is None else getattr(torch, settings.dtype)
            record = folder.write(out, finished, state, dtype, say)
        processes.wait()
        return record


def _silent(text: str) -> None:
    """Print nothing: only the first process reports."""


def _recipe(settings: Conversion) -> Recipe:
    names = ("steps", "lr", "warmup", "accumulate", "precision", "shard", "compile", "seed")
    return Recipe(**{name: getattr(settings, name) for name in names})


def _plan(settings: Conversion, base: Base, student: Any) -> Plan:
    if settings.method not in ALL:
        raise ConfigError(
            f"there is no method {settings.method!r}.", nearest(settings.method, list(ALL)), "`segue methods` lists them."
        )
    sites = _sites(settings, base)
    plan = ALL[settings.method](sites=sites, student=student, train=settings.train, seed=settings.seed)
    if base.kind == "encoder":  # the only task to learn from is what the original returns
        plan = dataclasses.replace(plan, distill=FeatureGuidance(schedule=Constant(alpha=1.0)))
    return plan


def _saved_student(work: Path) -> Any:
    """Return the student of the checkpoint that is resumed: the same text may mean another one since a default changed."""
    for path in folders.checkpoints(work / "checkpoints")[:1]:
        try:
            saved = read_json(path / "state.json")["segue"]["plan"]["student"]
        except (OSError, ValueError, LookupError, TypeError):  # damaged: `fit` takes an earlier one, or says so
            return None
        return decode(saved, "plan.student")
    return None


def _sites(settings: Conversion, base: Base) -> Selector:
    """Return the names of the sites without the excluded ones; a span stays as it is."""
    wanted = parse.sites(settings.sites)
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


def _quality(data: Data, scores: dict[str, float]) -> str:
    return f"{data.task.quality} {data.task.of(scores):.4g}{data.task.unit}"


def _line(data: Data, original: dict[str, float], point: dict[str, Any]) -> str:
    parts = {"original": original, "blend": point["blend"], "students": point["students"]}
    shown = ", ".join(f"{name} {data.task.of(scores):.4g}" for name, scores in parts.items())
    return f"step {point['step']}, alpha {point['alpha']:.2f}: {data.task.quality} of {shown}"


def _refuse_finished(out: Path) -> None:
    if pretrained.is_converted(out):
        raise ConfigError(
            f"{out} is not empty.",
            "It holds a finished conversion.",
            f"evaluate it (segue eval {out}), or give another folder.",
        )


def _require_same_settings(settings: Conversion, work: Path) -> None:
    path = work / "settings.json"
    if not (path.exists() and folders.exist(work / "checkpoints")):  # a conversion that failed at its start is no limit
        return
    before = dataclasses.asdict(Conversion.from_dict(read_json(path)))
    different = [f"{name} {before[name]!r}" for name, value in dataclasses.asdict(settings).items() if before[name] != value]
    if different:
        fault = f"the conversion in {work.parent} cannot resume with other settings."
        hint = "give the same settings (`segue resume` does), or another --out."
        raise ConfigError(fault, f"It has {', '.join(different)}.", hint)

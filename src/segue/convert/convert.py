"""convert(): a pretrained model and data in, a folder with the converted model out; an interrupted conversion resumes."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from segue.border import checked
from segue.checkpoint import folders
from segue.checkpoint.lock import locked_on_rank_0
from segue.convert import folder, offline_teacher, pretrained, recipes, rehearsal
from segue.convert.data import Data, load
from segue.convert.options import Conversion
from segue.convert.pretrained import Base, open_base
from segue.convert.tasks import agreement, frozen_copy
from segue.core.handover import Handover
from segue.errors import ConfigError, ResultError
from segue.integrations.peft import add_lora_, merge_lora_
from segue.plan import Plan, decode
from segue.reporting.formatting import counted, duration
from segue.reporting.records import (
    BEGUN,
    Result,
    RunInfo,
    TrainInfo,
    meta_info_of,
    read_json,
    removed_on_failure,
    write_begun,
    write_json,
)
from segue.sites import select
from segue.training import distributed as launch
from segue.training.fit import Fit, fit
from segue.training.recipe import Recipe
from segue.training.tasks import quality_of

__all__ = ["Conversion", "convert"]

REHEARSED = "rehearsed.json"  # in the training folder: seconds of the steps of each phase
EVALUATIONS = 10  # where their time is not measured: with a sharded model
OPEN = ("method", "steps", "evaluations", "eval_batches", "warmup")  # what a conversion decides at its start if it is not given


@checked
def convert(
    settings: Conversion,
    out: Path,
    say: Callable[[str], None] = print,
    *,
    resume: Path | None = None,
    allow_changes: Sequence[str] = (),
    dry_run: bool = False,
) -> dict[str, Any]:
    """Convert a model, or resume its conversion, and return the record that is written to the folder `out`.

    `resume` is the checkpoint to take instead of the latest, `allow_changes` what may differ from it. A `dry_run` times a few
    steps, says what the conversion takes, and writes nothing.
    """
    recipes.require_complete(settings)
    processes = launch.launched()
    main = processes.rank == 0
    say = say if main else _silent
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is not a folder.", "It is a file.", "give another --out.")
    work = out / "training"
    _refuse_finished(out)
    settings = _as_before(settings, work)
    base = open_base(settings.model)
    timed = settings.steps is None or settings.evaluations is None
    settings = recipes.with_defaults(settings, base.kind)
    plan = recipes.plan_of(settings, base)
    plan = dataclasses.replace(plan, **_as_saved(work))
    recipe = recipes.recipe_of(settings, base, plan)
    offline_teacher.require_cacheable(settings, base, plan)
    data = load(base, settings, work, processes, dry_run=dry_run)
    if settings.lora:
        add_lora_(base.model, plan.sites, rank=settings.lora, seed=settings.seed)
    base.model.to(processes.device)
    run = Run(settings, base, data, plan, recipe, processes, timed=timed, rehearsed=_rehearsed(work))
    if dry_run:
        return run.estimate(say)
    made = ("settings.json", REHEARSED, BEGUN, "metrics.jsonl", "checkpoints") if main else ()
    with locked_on_rank_0(work), removed_on_failure(work, *made):
        _refuse_finished(out)  # both again: another process may have been quicker
        _as_before(settings, work)
        processes.wait()
        try:
            if main:
                write_json(dataclasses.asdict(run.settings), work / "settings.json")  # an interrupted sampling resumes
            run.begin(say)
            if main:
                write_json(dataclasses.asdict(run.settings), work / "settings.json")  # and what it has decided
                write_begun(run.begun(out.name), work)
                if run.rehearsed is not None:
                    write_json(run.rehearsed.seconds, work / REHEARSED)
            run.say_resumed(resume, work, say)
            processes.wait()
            trained = run.train(work, say, resume=resume or True, allow_changes=allow_changes)
        except (KeyboardInterrupt, SystemExit):
            say(f"To resume, repeat the command, or: segue resume {shlex.quote(str(out))}")
            raise
        assert trained.handover is not None
        trained.handover.finalize_()
        if settings.lora:
            merge_lora_(base.model)
        state = folder.full_state(base.model)
        record: dict[str, Any] = {}
        if main:
            finished = folder.Finished(run.settings, base, data, plan, run.original, trained, run.seen, run.others)
            dtype = base.dtype if settings.dtype is None else getattr(torch, settings.dtype)
            record = folder.write(out, finished, state, dtype, say)
            _prune(work)
        processes.wait()
        return record


@dataclasses.dataclass
class Run:
    """One conversion: what it says, measures and trains."""

    settings: Conversion
    base: Base
    data: Data
    plan: Plan
    recipe: Recipe
    processes: launch.Processes
    timed: bool  # something depends on how long it takes
    original: dict[str, float] = dataclasses.field(default_factory=dict)  # scores on all that is held out
    seen: dict[str, float] = dataclasses.field(default_factory=dict)  # scores on what evaluations in training read
    rehearsed: rehearsal.Rehearsal | None = None  # also by an earlier process, whose conversion this one resumes
    others: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)  # scores on each of the further files

    def begin(self, say: Callable[[str], None]) -> None:
        """Say what is converted, evaluate the original, and decide how often to evaluate."""
        model, settings = self.base.model, self.settings
        count = sum(p.numel() for name, p in model.named_parameters() if ".lora_" not in name)
        say(f"{settings.model}: {type(model).__name__}, {count:,} parameters")
        say(
            f"{len(select(model, self.plan.sites))} sites; training on {self.data.train_size}, evaluating on "
            f"{self.data.held_out_size}"
        )
        for note in recipes.notes(settings, self.plan):
            say(note)
        self.data.prepare(say)
        begun = time.perf_counter()
        self.original = self.seen = folder.evaluated(model, self.data.held_out, self.data.task)
        took = time.perf_counter() - begun
        self.others = folder.evaluated_on(model, self.data)
        say(f"original: {quality_of(self.data.task, self.original)}")
        if self.timed and self.sharded:
            say("no time is announced: a rehearsal would leave the model sharded")
        elif self.timed:
            found = rehearsal.rehearse(model, self.plan, self.data, self.recipe)
            found, took = self.processes.of_first((found, took))  # all decide the same
            self.rehearsed = found
            say(self._budget(took, found))
        if self.settings.evaluations is None:
            self.settings = dataclasses.replace(settings, evaluations=EVALUATIONS)
        if self.settings.eval_batches is not None:
            some = rehearsal.first(self.data.held_out, self.settings.eval_batches)
            self.seen = folder.evaluated(model, some, self.data.task)

    @property
    def sharded(self) -> bool:
        """Whether processes share the weights of one model."""
        return self.settings.shard and self.processes.world > 1

    def say_resumed(self, checkpoint: Path | None, work: Path, say: Callable[[str], None]) -> None:
        """Say where a conversion that has begun resumes, and what is left of it."""
        known = folders.checkpoints(work / "checkpoints")
        for path in [path for path in known if checkpoint is None or path.name == checkpoint.name][:1]:
            done, total = folders.step_in(path.name), self.recipe.total_steps(None)
            left = "" if self.rehearsed is None else f", about {duration(sum(self.rehearsed.steps[done:]))} left"
            say(f"resuming after step {done} of {total}{left}")

    def begun(self, name: str) -> Result:
        """Return what is known before the training, for a report that follows it."""
        settings = dataclasses.asdict(self.settings)
        method = self.settings.method or "conversion"
        scale = 0.01 if self.data.task.unit else 1.0  # scores in the log are no percentages
        score = self.data.task.quality
        info = RunInfo(
            experiment=name,
            name=name,
            method=method,
            label=method,
            group="all",
            seed=self.settings.seed,
            config=settings,
            config_hash="",
        )
        train = TrainInfo(
            score=score,
            total_steps=self.recipe.total_steps(None),
            steps_per_epoch=1,
            sites=[site.name for site in select(self.base.model, self.plan.sites)],
            teacher={score: scale * self.data.task.of(self.original)},
            teacher_eval={score: scale * self.data.task.of(self.seen)},
            points=[],
            final={},
            seconds=0.0,
            flops=0.0,
            step_flops={},
            peak_memory=0,
        )
        meta = meta_info_of(datetime.now(timezone.utc), launch.launched().world)
        return Result(run_info=info, train_info=train, meta_info=meta)

    def _budget(self, took: float, found: rehearsal.Rehearsal) -> str:
        """Choose evaluations that cost at most a tenth of the run, unless they are given, and say what both take."""
        batches, *further = (sum(1 for _ in each) for each in (self.data.held_out, *self.data.evaluated_on.values()))
        number, given, longest = self.settings.evaluations, self.settings.eval_batches, max(batches, *further, 1)
        used = given or longest
        if number is None:
            number, affordable = rehearsal.affordable(
                found.total, took / batches, min(used, batches), [min(used, each) for each in further]
            )
            used = given or affordable
        few = given or (None if used >= longest else used)  # as given: the same command resumes
        self.settings = dataclasses.replace(self.settings, evaluations=number, eval_batches=few)
        cost = rehearsal.passes(used, batches, further) * took / batches
        share = (number + 1) * cost / (found.total + (number + 1) * cost)
        read = f"{min(used, batches)} of {batches} batches"
        if further:
            read += (
                f" and {sum(min(used, each) for each in further)} of {sum(further)} of {counted(len(further), 'further file')}"
            )
        return (
            f"{counted(self.recipe.total_steps(None), 'step')}, {found}; {number + 1} evaluations on {read}, "
            f"{duration(cost)} each, {share:.0%} of the run"
        )

    def estimate(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Time a few steps and one evaluation, and say what the conversion takes."""
        self.data.prepare(say)
        begun = time.perf_counter()
        folder.evaluated(self.base.model, rehearsal.first(self.data.held_out, 1), self.data.task)
        batches = sum(1 for _ in self.data.held_out)
        took = (time.perf_counter() - begun) * batches
        found = rehearsal.rehearse(self.base.model, self.plan, self.data, self.recipe, saves=True)
        dtype = self.base.dtype if self.settings.dtype is None else getattr(torch, self.settings.dtype)
        taken = rehearsal.estimate(self.base.model, self.plan, self.data, self.recipe, found, dtype)
        say(self._budget(took, found))
        for line in rehearsal.lines(taken):
            say(line)
        say("Nothing was written.")
        return {"seconds": found.total, **taken}

    def train(self, work: Path, say: Callable[[str], None], **resuming: Any) -> Fit:
        """Train the students, or resume their training."""
        # shards, which a copy that every process holds would undo
        original = None if self.sharded else frozen_copy(self.base.model, shares=self.plan.train == "students")
        return fit(
            self.base.model,
            self.plan,
            self.data.train,
            self.data.task,
            recipe=self.recipe,
            validation=rehearsal.first(self.data.held_out, self.settings.eval_batches),
            scores=partial(self.data.task.scores, original=original),
            folder=work,
            evaluations=self.settings.evaluations or EVALUATIONS,
            teacher_cache=offline_teacher.cached(self.settings, self.base, self.plan, self.data, work, say),
            measure=partial(_on_others, self.data, original, self.settings.eval_batches) if self.others else None,
            on_eval=lambda point: say(_line(self.data, self.seen, point)),
            progress="converting",
            step_costs=None if self.rehearsed is None else self.rehearsed.steps,
            **resuming,
        )


def _prune(work: Path) -> None:
    """Remove the checkpoints and the teacher cache of a finished conversion; its settings, metrics and samples stay."""
    for name in ("checkpoints", "teacher"):
        shutil.rmtree(work / name, ignore_errors=True)
    (work / REHEARSED).unlink(missing_ok=True)


def _rehearsed(work: Path) -> rehearsal.Rehearsal | None:
    """Return the times that the conversion began with, for the time that is left of it; what is damaged is not needed."""
    try:
        seconds = {str(name): (int(steps), float(each)) for name, (steps, each) in read_json(work / REHEARSED).items()}
    except (ResultError, ValueError, TypeError):
        return None
    return rehearsal.Rehearsal(seconds=seconds, checkpoint=None)


def _on_others(data: Data, original: nn.Module | None, batches: int | None, handover: Handover) -> dict[str, Any]:
    """Score the students alone on the first batches of each of the further files, or on all."""
    with handover.as_student():
        return {"evaluated_on": folder.evaluated_on(handover.model, data, original, batches)}


def _silent(text: str) -> None:
    """Print nothing: only the first process reports."""


def _as_saved(work: Path) -> dict[str, Any]:
    """Return student and phases of the checkpoint that is resumed: the same text may mean others since a default changed."""
    for path in folders.checkpoints(work / "checkpoints")[:1]:
        try:
            plan = read_json(path / "state.json")["segue"]["plan"]
            saved = {"student": plan["student"], **({"phases": plan["phases"]} if plan.get("phases") else {})}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # damaged: `fit` takes an earlier one, or says so
            return {}
        return {name: decode(part, f"plan.{name}") for name, part in saved.items()}
    return {}


def _line(data: Data, original: dict[str, float], point: dict[str, Any]) -> str:
    parts = {"original": original, "blend": point["blend"], "students": point["students"]}
    shown = ", ".join(f"{name} {data.task.of(scores):.4g}" for name, scores in parts.items())
    said = agreement(point["students"])
    line = f"step {point['step']}, alpha {point['alpha']:.2f}: {data.task.quality} of {shown}"
    further = ""
    for name, scores in point.get("evaluated_on", {}).items():
        further += f"; on {Path(name).name} students " + ", ".join(
            filter(None, (f"{data.task.of(scores):.4g}", agreement(scores)))
        )
    return line + (said and f"; students: {said}") + further


def _refuse_finished(out: Path) -> None:
    if pretrained.is_converted(out):
        raise ConfigError(
            f"{out} is not empty.",
            "It holds a finished conversion.",
            f"evaluate it (segue eval {out}), or give another folder.",
        )


def _as_before(settings: Conversion, work: Path) -> Conversion:
    """Return the settings with which a conversion began; others are refused, except what they leave open."""
    path = work / "settings.json"
    if not (path.exists() and folders.exist(work / "checkpoints")):  # a conversion that failed at its start is no limit
        return settings
    before = Conversion.from_dict(read_json(path))
    now = {name: value for name, value in dataclasses.asdict(settings).items() if value is not None or name not in OPEN}
    different = [f"{name} {getattr(before, name)!r}" for name, value in now.items() if getattr(before, name) != value]
    if different:
        fault = f"the conversion in {work.parent} cannot resume with other settings."
        hint = "give the same settings (`segue resume` does), or another --out."
        raise ConfigError(fault, f"It has {', '.join(different)}.", hint)
    return before

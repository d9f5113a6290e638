"""fit(): the training loop, on Accelerate."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue.border import Count, PositiveFloat, PositiveInt, checked
from segue.checkpoint.lock import locked_on_rank_0
from segue.core import randomness
from segue.core.blending import padding_mask
from segue.core.handover import Handover, replace_
from segue.core.steps_taken import StepsTaken
from segue.core.tensor_files import full
from segue.display import Shown, Table, pandas
from segue.errors import ConfigError
from segue.phases import Rates, course, frozen, rate, refuse_idle, uses_kinds
from segue.plan import Plan
from segue.sites import select
from segue.training import distributed, local_step, nonfinite, showing
from segue.training.batches import Stream
from segue.training.buffers import StepBuffers
from segue.training.distributed import Processes
from segue.training.early_stopping import RunningEarlyStopping
from segue.training.ema import RunningEma
from segue.training.evaluation import Evaluator, MetricsLog, RunningMeans, evaluation_steps
from segue.training.good_state import GoodState
from segue.training.guard import RunningGuard
from segue.training.loss_parts import LossParts
from segue.training.monitor import Monitor
from segue.training.progress import COLUMNS, Progress
from segue.training.recipe import Recipe
from segue.training.resume import Checkpoints, Interruption, settings_of
from segue.training.tasks import LossFn, Scores, output_mask, require_gradient, task_loss
from segue.training.teacher_cache import TeacherCache
from segue.training.trackers import tracker_settings
from segue.training.undo import Undo, remove_released
from segue.training.weights import FiniteWeights

EVALUATIONS = 20
NO_CHECKPOINT = "there is no checkpoint (give fit a folder)"


@dataclass(repr=False)
class Fit(Shown):
    """The result of a training; its handover is still open until `fit.handover.finalize_()`."""

    model: nn.Module
    handover: Handover | None
    total_steps: int
    steps_per_epoch: int
    history: list[dict[str, Any]]  # the metrics of every evaluation
    seconds: float  # in optimizer steps: evaluations and checkpoints are left out
    skipped: int  # steps left out because of inf or NaN, or undone by the guard
    stopped_at: int | None = None  # the step after which early stopping ended the training
    best_step: int | None = None  # of the students' best score, where there is early stopping
    steps_taken: StepsTaken | None = None  # what sites computed where the plan alone does not say it, for `segue.cost`

    @property
    def events(self) -> list[dict[str, Any]]:
        """What the guard has undone: at which step, why, at which sites, and what it went back to."""
        return [event for metrics in self.history for event in metrics.get("events", ())]

    def plot(self, score: str | None = None) -> Any:
        """Draw a score of blend and students over the run, and the mean alpha; needs matplotlib.

        Returns a matplotlib figure, which a notebook shows: `done.plot().savefig("run.png")` elsewhere.

        Args:
            score: Its name in the evaluations; by default the first.
        """
        return showing.plot(self, score)

    def to_pandas(self) -> Any:
        """Return the evaluations as a data frame, with a column such as "students.accuracy" for each number; needs pandas."""
        return pandas("Fit.to_pandas()").json_normalize(self.history)

    def __repr__(self) -> str:
        whole = self._table().text()
        return whole if max(map(len, whole.splitlines())) <= COLUMNS else showing.table(self, most=1).text()

    def _table(self) -> Table:
        return showing.table(self)


@checked
def fit(
    model: nn.Module,
    plan: Plan | None,
    batches: Iterable[Any],
    loss_fn: LossFn,
    *,
    recipe: Recipe,
    validation: Iterable[Any] | None = None,
    scores: Scores | None = None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool | str | os.PathLike[str] = False,
    allow_changes: Sequence[str] = (),
    evaluations: Count | Sequence[Count] = EVALUATIONS,
    checkpoint_every: PositiveInt | None = None,
    measure: Callable[[Handover], dict[str, Any]] | None = None,
    on_eval: Callable[[dict[str, Any]], None] | None = None,
    trackers: Sequence[str] = (),
    split_batches: bool = True,
    teacher_cache: TeacherCache | None = None,
    progress: str | None = "training",
    step_costs: Sequence[PositiveFloat] | None = None,
) -> Fit:
    """Train a model through a handover, or just train it when there is no plan.

    >>> import torch
    >>> import segue
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    >>> batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(4)]
    >>> recipe = segue.Recipe(steps=8)
    >>> done = segue.fit(model, segue.methods.dcr("0"), batches, segue.Classification(), recipe=recipe, progress=None)
    >>> done.handover.alphas
    {'0': 0.0}

    When fit fails or is stopped, the model is as it was before (unless FSDP2 has sharded it), and what it learned is in the
    checkpoint.

    Args:
        model: The model to train, in place.
        plan: What is replaced, and how; None trains the model as it is.
        batches: Anything that yields batches, again for each epoch.
        loss_fn: (model, batch) -> scalar, to which guidance and distillation are added.
        recipe: How long, and with which optimizer settings.
        validation: Batches to score the blend and the students alone on.
        scores: (model, batch) -> one number per example by name; by default `loss_fn.scores`, or the loss.
        folder: Where metrics.jsonl and checkpoints/ go, ten times a run, on Ctrl-C and on SIGTERM.
        resume: True continues from the folder bit for bit, the path of a checkpoint from that one.
        allow_changes: Settings that may differ from the checkpoint's, such as ("recipe.lr",); others are refused and listed.
        evaluations: How many evaluations there are, or after which steps.
        checkpoint_every: Steps from one checkpoint to the next.
        measure: (handover) -> further metrics, by name, for each evaluation.
        on_eval: Called with the metrics of each evaluation.
        trackers: Names of Accelerate's trackers, such as "tensorboard".
        split_batches: In several processes each takes its part of every batch; with False it reads batches of its own.
        teacher_cache: Distillation takes from there what the original returns, and does not run it.
        progress: The name of the progress bar; None shows none.
        step_costs: How long steps take, one number for each, of which only ratios count: for the time left.
    """
    _require_fit(recipe, plan, validation)
    if teacher_cache is not None:
        teacher_cache.require(model, plan)
    path = None if folder is None else Path(folder)
    accelerator = distributed.accelerator(recipe, trackers, path)
    processes = Processes(accelerator.device, accelerator.process_index, accelerator.num_processes, split=split_batches)
    sharded = processes.world > 1 and recipe.shard
    if plan is not None:
        select(model, plan.sites)  # a plan that does not fit is refused before a folder is made
        local_step.refuse_unfit(plan, accumulate=recipe.accumulate, sharded=sharded)
    with locked_on_rank_0(path), locked_on_rank_0(path and path / "checkpoints"):  # no other process trains or saves there
        stream = Stream(batches, seed=recipe.seed)
        total = recipe.total_steps(stream.per_epoch)
        checkpoints = Checkpoints(path, checkpoint_every, total, resume=resume, allow_changes=allow_changes)
        if accelerator.is_main_process:
            remove_released(path)
        with Undo(model, copies_weights=plan is None, folder=path, sharded=sharded) as undo:
            handover = None if plan is None else replace_(model, plan, total_steps=total)
            if handover is not None:
                undo.follow(handover)
                if teacher_cache is not None:
                    handover.auxiliary.cached, handover.auxiliary.original = teacher_cache, None
            loop = Loop(model, handover, stream, loss_fn, recipe, total, accelerator, processes)
            evaluator = None
            if validation is not None:
                scores = scores or getattr(loss_fn, "scores", None) or (lambda model, batch: {"loss": loss_fn(model, batch)})
                evaluator = Evaluator(validation, scores, processes, accelerator.autocast)
            log = MetricsLog(path, writes=accelerator.is_main_process)
            monitor = Monitor(loop, evaluator, log, measure, on_eval)
            name = progress if accelerator.is_main_process else None
            costs = step_costs if step_costs is not None and len(step_costs) == total else None
            shown = partial(Progress, name, total, costs=costs)
            _run(loop, monitor, checkpoints, evaluation_steps(evaluations, total), shown)
        per_epoch = max(1, loop.batches_per_epoch // recipe.accumulate)
        ends = (None, None) if loop.stopping is None else (loop.stopping.stopped_at, loop.stopping.best_step)
        taken = loop.steps_taken if loop.steps_taken.spans else None
        return Fit(model, handover, total, per_epoch, log.history, loop.seconds, loop.skipped, *ends, taken)


def _require_fit(recipe: Recipe, plan: Plan | None, validation: Iterable[Any] | None) -> None:
    if plan is None and isinstance(recipe.lr, Rates):
        raise ConfigError(
            "Recipe(lr=Rates(...)) needs a plan.",
            "Without one no parameter is new, copied or around a site.",
            "give one number: Recipe(lr=1e-3). Nothing was changed.",
        )
    if recipe.early_stopping is not None and validation is None:
        raise ConfigError(
            "early stopping needs a score.",
            "fit(validation=None) has no data to score the students on.",
            "give fit validation batches, or leave Recipe(early_stopping=...) out.",
        )


def _run(
    loop: Loop, monitor: Monitor, checkpoints: Checkpoints, evaluations: frozenset[int], shown: Callable[..., Progress]
) -> None:
    """Train to the end, from the start or from a checkpoint."""
    if checkpoints.exist:
        checkpoints.load(loop)
        loop.require_finite_weights()
    monitor.log.rewind(loop.done if checkpoints.exist else -1)
    loop.processes.wait()
    if loop.accelerator.log_with:
        loop.accelerator.init_trackers(
            "segue", config={"total_steps": loop.total}, init_kwargs=tracker_settings(loop.accelerator.project_dir)
        )
    pauses = sum(step > loop.done for step in evaluations) + (loop.done == 0)
    with Interruption() as interruption, closing(shown(done=loop.done, pauses=pauses)) as progress:
        silent = progress.name is None and checkpoints.folder is None  # as in a rehearsal, whose caller knows better
        if loop.done == 0:
            monitor.evaluate(progress)
        while not loop.ended:
            loss, signal = loop.step(interruption)
            saves = signal or loop.ended or loop.done % checkpoints.every == 0
            if saves:
                loop.require_finite_weights()
            if loop.done in evaluations:
                monitor.evaluate(progress)
            last = loop.ended
            saves = saves or last
            progress(loop.done, monitor.status(loss))
            if saves:
                checkpoints.save(loop)
            if signal and not last:
                progress.close()
                interruption.leave(signal, f"stopped at step {loop.done} of {loop.total}; {checkpoints}", silent=silent)
        if caught := loop.caught_anywhere(interruption):  # in the last step, whose checkpoint is written
            interruption.leave(caught, f"stopped after the last step; {checkpoints}", silent=silent)
    loop.finish()
    for tracker in loop.accelerator.trackers:  # not end_training(), which also ends the process group
        tracker.finish()


class Loop:
    """The optimizer steps of one training."""

    def __init__(
        self,
        model: nn.Module,
        handover: Handover | None,
        stream: Stream,
        loss_fn: LossFn,
        recipe: Recipe,
        total: int,
        accelerator: Any,
        processes: Processes,
    ) -> None:
        self.model = model.to(accelerator.device).train()
        self.handover, self.stream, self.loss_fn, self.recipe, self.total = handover, stream, loss_fn, recipe, total
        self.accelerator, self.processes = accelerator, processes
        randomness.seed_all(recipe.seed + processes.rank)
        self.network = distributed.spread(model, () if handover is None else handover.units(), recipe, processes)
        named = model.named_parameters() if handover is None else handover.named_parameters()
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in trained]
        self.phases = () if handover is None else handover.plan.phases
        kinds = handover.parameter_kinds() if handover is not None and uses_kinds((recipe, *self.phases)) else None
        self.raw_optimizer = recipe.optimizer(trained) if kinds is None else recipe.optimizer(trained, kinds)
        refuse_idle(self.raw_optimizer, recipe, self.phases, total)
        self.optimizer = accelerator.prepare_optimizer(self.raw_optimizer)
        self.raw_optimizer.zero_grad()  # gradients of the user's own backward are not part of the first step
        self.buffers = StepBuffers(self._with_buffers()) if recipe.on_nan == "skip" else None
        self.weights = FiniteWeights(model, handover, processes)
        self.ema = None if recipe.ema is None else RunningEma(recipe.ema, self.parameters, model)
        self.stopping = None if recipe.early_stopping is None else RunningEarlyStopping(recipe.early_stopping, self)
        self.guard: RunningGuard | None = None
        if recipe.guard is not None:
            parts = self.parameters, self.raw_optimizer, self._with_buffers(), accelerator.scaler, self.ema
            self.guard = RunningGuard(recipe.guard, GoodState(*parts), handover)
        self.means = RunningMeans([] if handover is None else list(handover.seams), accelerator.device)
        self.batches_per_epoch = stream.per_epoch or total * recipe.accumulate
        self.parts = LossParts(accelerator.device)
        self.steps_taken = StepsTaken(0 if handover is None else len(handover.seams), total)
        self.planned = None if handover is None else handover.plan.schedule
        self.done = 0
        self.skipped = 0
        self.seconds = 0.0
        self.checkpoint: Path | None = None  # the latest

    def step(self, interruption: Interruption) -> tuple[float, int]:
        """Take one optimizer step; return its loss and the signal that any process caught."""
        begun = time.perf_counter()
        if self.handover is not None:
            self.steps_taken.note(self.handover, self.planned)
        self.recipe.set_rate(self.raw_optimizer, self.done, self.total, self.phases)
        if self.guard is not None:
            self.guard.begin(self.done)
            self._slow_down(self.guard.rate(self.done))
        if self.buffers is not None:
            self.buffers.keep()
        with self._frozen():
            batches, total, measured = self._backward()
        gradients = [p.grad for p in self.parameters if p.grad is not None]  # none where all sites rest in a local phase
        if gradients:  # otherwise a gradient scaler refuses
            self.accelerator.unscale_gradients()
        norms = self._site_norms()
        norm = full(nn.utils.get_total_norm(gradients))
        caught = torch.tensor(float(interruption.caught), device=total.device)
        shared = torch.stack([total, caught, norm.isfinite().to(total), *self.parts])  # one wait for the device
        if self.guard is not None:
            shared = torch.cat([shared, measured, norms])
        mean, signal, bounded, *others = (self.processes.total(shared) / self.processes.world).tolist()
        of_guard = self.parts.take(others)
        scaled = self.accelerator.scaler is not None  # fp16: its scaler skips steps whose gradient overflows
        finite = math.isfinite(mean) and (scaled or bounded == 1)
        spike = None if self.guard is None else self.guard.judge(self.done, [mean, *of_guard], finite=finite)
        if finite and spike is None:
            if self.recipe.clip is not None:
                nn.utils.clip_grads_with_norm_(self.parameters, self.recipe.clip, norm)
            if gradients:
                self.optimizer.step()
            taken = not (gradients and self.optimizer.step_was_skipped)
        elif self.guard is None and self.recipe.on_nan == "stop":
            raise nonfinite.error(self._search().find(batches, mean), self.done, mean, norm.item(), self.checkpoint)
        else:
            taken = False
            if scaled and gradients:
                self.accelerator.scaler.update()  # it must forget that it has unscaled these gradients
        if taken:
            self.means.add(mean, norms, self.parts.means)
            if self.ema is not None:
                self.ema.update()
        else:
            self.skipped += 1
            if self.buffers is not None:
                self.buffers.restore()
        if self.guard is not None and spike is not None:
            last = f"the last good checkpoint is {self.checkpoint}" if self.checkpoint else NO_CHECKPOINT
            self.guard.restore(spike, last, lambda: self._search().find(batches, mean))
        self.optimizer.zero_grad()
        if self.handover is not None:
            self.means.follow(self.handover)
        self.done += 1
        self.seconds += time.perf_counter() - begun
        return mean, round(signal * self.processes.world) and (interruption.caught or 15)

    @property
    def rate(self) -> float:
        """The learning rate of the next step, of new parameters."""
        whose, step, steps = course(self.recipe, self.phases, self.done, self.total)
        return rate(whose or self.recipe, step, steps) * (1.0 if self.guard is None else self.guard.rate(self.done))

    def _with_buffers(self) -> list[nn.Module]:
        """Return what runs in a step and may update its buffers."""
        original = None if self.handover is None else self.handover.auxiliary.original
        return [module for module in (self.model, original, self.loss_fn) if isinstance(module, nn.Module)]

    def _search(self) -> nonfinite.Search:
        sharded = self.processes.world > 1 and self.recipe.shard
        parts = self.model, self.handover, self.loss_fn, self.processes, self.accelerator.autocast
        return nonfinite.Search(*parts, sharded=sharded)

    def _backward(self) -> tuple[list[nonfinite.MicroBatch], Tensor, Tensor]:
        """Add up the gradients of the batches of one step; return this process' parts of them, their loss and its parts.

        The parts, for the guard, are what guidance and distillation add up to, and the guidance at each site.
        """
        if self.handover is not None and self.handover.phase is not None and self._from_features:
            return local_step.backward(self, self.handover, self.handover.phase)
        total = torch.zeros((), device=self.accelerator.device)
        measured = torch.zeros(1 if self.handover is None else 1 + len(self.handover.seams), device=total.device)
        batches = []
        self.parts.begin()
        for micro in range(self.recipe.accumulate):
            batch, weight = self.processes.part(next(self.stream))
            batches.append(nonfinite.MicroBatch.of(batch))
            last = micro == self.recipe.accumulate - 1
            with nullcontext() if last else self._without_reduction():
                with self.accelerator.autocast():
                    loss = task_loss(self.loss_fn, self.network, batch, self.handover)
                    if self.handover is not None:
                        aux = self.handover.aux_loss(padding_mask(batch), output_mask=output_mask(self.loss_fn, batch))
                        task, loss = loss, loss + aux
                require_gradient(loss)
                share = weight / self.recipe.accumulate
                self.accelerator.backward(loss * share)
            total += loss.detach().float() * share
            if self.handover is not None:
                self.parts.add(self.handover, task, share)
            if self.guard is not None and self.handover is not None:
                measured += self._auxiliary(self.handover) * share
        return batches, total, measured

    @property
    def _from_features(self) -> bool:
        """Whether the students learn from features in the next step, without a loss on the output of the model."""
        sharded = self.processes.world > 1 and self.recipe.shard
        return self.handover is not None and local_step.from_features(self.handover.phase, sharded=sharded)

    @contextmanager
    def _frozen(self) -> Iterator[None]:
        """Compute no gradients for parameters whose rate is 0; where a forward of DDP or FSDP2 waits for them, drop them."""
        resting = frozen(self.raw_optimizer, self.recipe, self.phases, self.done, self.total)
        alone = self.processes.world == 1 or self._from_features
        for parameter in resting if alone else ():
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in resting:
                parameter.requires_grad_(True)
                parameter.grad = None

    def _auxiliary(self, handover: Handover) -> Tensor:
        """Return the sum of guidance and distillation and the guidance at each site, which are computed already."""
        latest = handover.auxiliary.latest
        parts = {name: part.detach().float().to(self.accelerator.device) for name, part in latest.items()}
        none = torch.zeros((), device=self.accelerator.device)
        of_sites = [parts.get(f"guidance/{name}", none) for name in handover.seams]
        return torch.stack([sum(parts.values(), start=none), *of_sites])

    def _slow_down(self, factor: float) -> None:
        if factor != 1.0:
            for group in self.raw_optimizer.param_groups:
                group["lr"] *= factor

    def _without_reduction(self) -> AbstractContextManager[Any]:
        """Keep gradients in this process until the last batch of a step."""
        no_sync = getattr(self.network, "no_sync", None)
        return nullcontext() if no_sync is None else no_sync()

    def _site_norms(self) -> Tensor:
        """Return the norm of each student's gradient, before clipping."""
        norms = []
        for seam in () if self.handover is None else self.handover.seams.values():
            gradients = [p.grad for p in seam.student.parameters() if p.grad is not None]
            norms.append(full(nn.utils.get_total_norm(gradients)).to(self.accelerator.device))
        return torch.stack(norms) if norms else torch.zeros(0, device=self.accelerator.device)

    @property
    def ended(self) -> bool:
        """Whether all steps are taken, or early stopping has ended the training."""
        return self.done >= self.total or (self.stopping is not None and self.stopping.stopped_at is not None)

    def finish(self) -> None:
        """Give the model the weights that the recipe wants in the end; the checkpoint holds those of the last step."""
        if self.stopping is not None and self.stopping.weights:
            self.stopping.apply()
        elif self.ema is not None and self.ema.settings.final and self.ema.weights:
            self.ema.apply()

    def require_finite_weights(self) -> None:
        """Raise if training has made a weight or buffer inf or NaN."""
        self.weights.require(self.done, self.total, self.checkpoint, skipped=self.skipped)

    def caught_anywhere(self, interruption: Interruption) -> int:
        """Return the signal that this process or another one caught."""
        known = torch.tensor(float(interruption.caught), device=self.accelerator.device)
        return 0 if self.processes.total(known).item() == 0 else interruption.caught or 15

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs in addition to model and optimizer."""
        scaler = self.accelerator.scaler
        usual = self.done * self.recipe.accumulate  # unless a resume was allowed to change it
        return {
            **({} if self.stream.position == usual else {"batches": self.stream.position}),
            **({"steps_taken": self.steps_taken.state_dict()} if self.steps_taken.spans else {}),
            "total_steps": self.total,
            "settings": settings_of(self),
            "scaler": None if scaler is None else scaler.state_dict(),
            "seconds": self.seconds,
            "skipped": self.skipped,
            "running_means": self.means.state_dict(),
            **{name: part.state_dict() for name, part in self._optional().items()},
        }

    def _optional(self) -> dict[str, RunningGuard | RunningEma | RunningEarlyStopping]:
        found = {"guard": self.guard, "ema": self.ema, "early_stopping": self.stopping}
        return {name: part for name, part in found.items() if part is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where an earlier process stopped."""
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        seconds, skipped = state["seconds"], state["skipped"]
        counted = type(skipped) is int and 0 <= skipped <= self.total
        if not (counted and type(seconds) is float and 0 <= seconds < math.inf):
            raise ValueError(f"{skipped!r:.20} of {self.total} steps were skipped, in {seconds!r:.20} seconds")
        self.steps_taken.load_state_dict(state.get("steps_taken", []))  # before them: it refuses
        self.seconds, self.skipped = seconds, skipped
        self.means.load_state_dict(state["running_means" if "running_means" in state else "since_look"])  # 0.1.0
        for name, part in self._optional().items():
            if name in state:  # a guard may be added to a run, and what else is allowed to change
                part.load_state_dict(state[name])

"""fit(): the training loop, on Accelerate."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue.border import Count, PositiveInt, checked
from segue.checkpoint.lock import locked_on_rank_0
from segue.core import randomness
from segue.core.blending import padding_mask
from segue.core.handover import Handover, replace_
from segue.core.tensor_files import full
from segue.phases import course, rate, uses_kinds
from segue.plan import Plan
from segue.sites import select
from segue.training import distributed, nonfinite
from segue.training.batches import Stream
from segue.training.buffers import StepBuffers
from segue.training.distributed import Processes
from segue.training.evaluation import Evaluator, MetricsLog, RunningMeans, evaluation_steps, flat, named
from segue.training.progress import Progress
from segue.training.recipe import Recipe
from segue.training.resume import Checkpoints, Interruption, settings_of
from segue.training.tasks import LossFn, Scores, require_gradient, scalar
from segue.training.undo import Undo, remove_released
from segue.training.weights import FiniteWeights

EVALUATIONS = 20


@dataclass
class Fit:
    """The result of a training; its handover is still open until `fit.handover.finalize_()`."""

    model: nn.Module
    handover: Handover | None
    total_steps: int
    steps_per_epoch: int
    history: list[dict[str, Any]]  # the metrics of every evaluation
    seconds: float  # in optimizer steps: evaluations and checkpoints are left out
    skipped: int  # steps left out because of inf or NaN


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
    progress: str | None = "training",
) -> Fit:
    """Train a model through a handover, or just train it when there is no plan.

    `batches` is anything that yields batches, again for each epoch; `loss_fn(model, batch)` returns a scalar, to which guidance
    and distillation are added. `evaluations` says how many evaluations there are, or after which steps. Each averages
    `scores(model, batch)`, one number per example by name (by default `loss_fn.scores`, or the loss), over `validation`, for
    the blend and for the students alone, and adds the similarity of both sides at every site and what `measure(handover)`
    returns; `on_eval(metrics)` is called with the result.
    With a `folder`, metrics go to metrics.jsonl and the state to checkpoints/, ten times a run or every `checkpoint_every`
    steps, on Ctrl-C and on SIGTERM; `resume=True` continues from there bit for bit, `resume="path of a checkpoint"` from
    that one. A recipe, plan, length or data other than those of the checkpoint are refused, and what differs is listed;
    `allow_changes=("recipe.lr",)` says that it may. When fit fails or is stopped, the model is as it was before (unless
    FSDP2 has sharded it), and what it learned is in the checkpoint. Launched in several processes, each takes its part of
    every batch; with `split_batches=False` each process reads batches of its own.
    """
    path = None if folder is None else Path(folder)
    accelerator = distributed.accelerator(recipe, trackers, path)
    processes = Processes(accelerator.device, accelerator.process_index, accelerator.num_processes, split=split_batches)
    if plan is not None:
        select(model, plan.sites)  # a plan that does not fit is refused before a folder is made
    with locked_on_rank_0(path), locked_on_rank_0(path and path / "checkpoints"):  # no other process trains or saves there
        stream = Stream(batches, seed=recipe.seed)
        total = recipe.total_steps(stream.per_epoch)
        checkpoints = Checkpoints(path, checkpoint_every, total, resume=resume, allow_changes=allow_changes)
        if accelerator.is_main_process:
            remove_released(path)
        sharded = processes.world > 1 and recipe.shard
        with Undo(model, copies_weights=plan is None, folder=path, sharded=sharded) as undo:
            handover = None if plan is None else replace_(model, plan, total_steps=total)
            if handover is not None:
                undo.follow(handover)
            loop = Loop(model, handover, stream, loss_fn, recipe, total, accelerator, processes)
            evaluator = None
            if validation is not None:
                scores = scores or getattr(loss_fn, "scores", None) or (lambda model, batch: {"loss": loss_fn(model, batch)})
                evaluator = Evaluator(validation, scores, processes, accelerator.autocast)
            log = MetricsLog(path, writes=accelerator.is_main_process)
            monitor = Monitor(loop, evaluator, log, measure, on_eval)
            name = progress if accelerator.is_main_process else None
            _run(loop, monitor, checkpoints, evaluation_steps(evaluations, total), name)
        per_epoch = max(1, loop.batches_per_epoch // recipe.accumulate)
        return Fit(model, handover, total, per_epoch, log.history, loop.seconds, loop.skipped)


def _run(loop: Loop, monitor: Monitor, checkpoints: Checkpoints, evaluations: frozenset[int], name: str | None) -> None:
    """Train to the end, from the start or from a checkpoint."""
    if checkpoints.exist:
        checkpoints.load(loop)
        loop.require_finite_weights()
    monitor.log.rewind(loop.done if checkpoints.exist else -1)
    loop.processes.wait()
    if loop.accelerator.log_with:
        loop.accelerator.init_trackers("segue", config={"total_steps": loop.total})
    with Interruption() as interruption, closing(Progress(name, loop.total, done=loop.done)) as progress:
        if loop.done == 0:
            monitor.evaluate(progress)
        while loop.done < loop.total:
            loss, signal = loop.step(interruption)
            last = loop.done == loop.total
            saves = signal or last or loop.done % checkpoints.every == 0
            if saves:
                loop.require_finite_weights()
            if loop.done in evaluations:
                monitor.evaluate(progress)
            progress(loop.done, monitor.status(loss))
            if saves:
                checkpoints.save(loop)
            if signal and not last:
                progress.close()
                interruption.leave(signal, f"stopped at step {loop.done} of {loop.total}; {checkpoints}")
        if caught := loop.caught_anywhere(interruption):  # in the last step, whose checkpoint is written
            interruption.leave(caught, f"stopped after the last step; {checkpoints}")
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
        self.raw_optimizer = recipe.optimizer(trained, kinds)
        self.optimizer = accelerator.prepare_optimizer(self.raw_optimizer)
        self.raw_optimizer.zero_grad()  # gradients of the user's own backward are not part of the first step
        self.buffers = StepBuffers(self._with_buffers()) if recipe.on_nan == "skip" else None
        self.weights = FiniteWeights(model, handover, processes)
        self.means = RunningMeans([] if handover is None else list(handover.seams), accelerator.device)
        self.batches_per_epoch = stream.per_epoch or total * recipe.accumulate
        self.done = 0
        self.skipped = 0
        self.seconds = 0.0
        self.checkpoint: Path | None = None  # the latest

    def step(self, interruption: Interruption) -> tuple[float, int]:
        """Take one optimizer step; return its loss and the signal that any process caught."""
        begun = time.perf_counter()
        self.recipe.set_rate(self.raw_optimizer, self.done, self.total, self.phases)
        if self.buffers is not None:
            self.buffers.keep()
        batches, total = self._backward()
        self.accelerator.unscale_gradients()
        norms = self._site_norms()
        norm = full(nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]))
        shared = torch.stack([total, torch.tensor(float(interruption.caught), device=total.device)])
        mean, signal = (self.processes.total(shared) / self.processes.world).tolist()
        scaled = self.accelerator.scaler is not None  # fp16: its scaler skips steps whose gradient overflows
        if math.isfinite(mean) and (scaled or math.isfinite(norm.item())):
            if self.recipe.clip is not None:
                nn.utils.clip_grads_with_norm_(self.parameters, self.recipe.clip, norm)
            self.optimizer.step()
            taken = not self.optimizer.step_was_skipped
        elif self.recipe.on_nan == "stop":
            raise nonfinite.error(self._search().find(batches, mean), self.done, mean, norm.item(), self.checkpoint)
        else:
            taken = False
        if taken:
            self.means.add(mean, norms)
        else:
            self.skipped += 1
            if self.buffers is not None:
                self.buffers.restore()
        self.optimizer.zero_grad()
        if self.handover is not None:
            self.handover.step()
        self.done += 1
        self.seconds += time.perf_counter() - begun
        return mean, round(signal * self.processes.world) and (interruption.caught or 15)

    @property
    def rate(self) -> float:
        """The learning rate of the next step, of new parameters."""
        whose, step, steps = course(self.recipe, self.phases, self.done, self.total)
        return rate(whose or self.recipe, step, steps)

    def _with_buffers(self) -> list[nn.Module]:
        """Return what runs in a step and may update its buffers."""
        original = None if self.handover is None else self.handover.auxiliary.original
        return [module for module in (self.model, original, self.loss_fn) if isinstance(module, nn.Module)]

    def _search(self) -> nonfinite.Search:
        sharded = self.processes.world > 1 and self.recipe.shard
        parts = self.model, self.handover, self.loss_fn, self.processes, self.accelerator.autocast
        return nonfinite.Search(*parts, sharded=sharded)

    def _backward(self) -> tuple[list[nonfinite.MicroBatch], Tensor]:
        """Add up the gradients of the batches of one step; return this process' parts of them and their loss."""
        total = torch.zeros((), device=self.accelerator.device)
        batches = []
        for micro in range(self.recipe.accumulate):
            batch, weight = self.processes.part(next(self.stream))
            batches.append(nonfinite.MicroBatch.of(batch))
            last = micro == self.recipe.accumulate - 1
            with nullcontext() if last else self._without_reduction():
                with self.accelerator.autocast():
                    loss = scalar(self.loss_fn(self.network, batch))
                    if self.handover is not None:
                        loss = self.handover.weighted(loss) + self.handover.aux_loss(padding_mask(batch))
                require_gradient(loss)
                share = weight / self.recipe.accumulate
                self.accelerator.backward(loss * share)
            total += loss.detach().float() * share
        return batches, total

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
        return torch.stack(norms) if norms else torch.zeros(0)

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
            "total_steps": self.total,
            "settings": settings_of(self),
            "scaler": None if scaler is None else scaler.state_dict(),
            "seconds": self.seconds,
            "skipped": self.skipped,
            "running_means": self.means.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where an earlier process stopped."""
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        seconds, skipped = state["seconds"], state["skipped"]
        counted = type(skipped) is int and 0 <= skipped <= self.total
        if not (counted and type(seconds) is float and 0 <= seconds < math.inf):
            raise ValueError(f"{skipped!r:.20} of {self.total} steps were skipped, in {seconds!r:.20} seconds")
        self.seconds, self.skipped = seconds, skipped
        self.means.load_state_dict(state["running_means" if "running_means" in state else "since_look"])  # 0.1.0


@dataclass(frozen=True)
class Monitor:
    """Evaluate a training while it runs, and log the metrics."""

    loop: Loop
    evaluator: Evaluator | None
    log: MetricsLog
    measure: Callable[[Handover], dict[str, Any]] | None
    on_eval: Callable[[dict[str, Any]], None] | None

    def evaluate(self, progress: Progress) -> None:
        """Measure the model as it is now, and log it."""
        with randomness.kept():  # the number of evaluations must not change what is learned
            metrics = self._metrics()
        self.log.add(metrics)
        if self.on_eval is not None:
            with progress.hidden():
                self.on_eval(metrics)
        if self.loop.accelerator.trackers:
            self.loop.accelerator.log(flat(metrics), step=self.loop.done)

    def _metrics(self) -> dict[str, Any]:
        loop, handover = self.loop, self.loop.handover
        loss, norms = loop.means.take()
        epoch = loop.done * loop.recipe.accumulate / loop.batches_per_epoch
        metrics: dict[str, Any] = {"step": loop.done, "epoch": epoch, "seconds": loop.seconds, "loss": loss, "lr": loop.rate}
        if handover is None:
            return metrics | ({} if self.evaluator is None else {"scores": self.evaluator(loop.model)})
        metrics |= {"alpha": _mean(handover.alphas), "alphas": handover.alphas, "gradient_norm": norms}
        metrics |= {} if handover.phase is None else {"phase": handover.phase.name}
        if self.evaluator is not None:
            students, similar = self.evaluator.of_students(handover)
            closed = all(seam.closed for seam in handover.seams.values())
            metrics["blend"] = students if closed else self.evaluator(loop.model)
            metrics["students"] = students
            for name in ("cosine", "relative_error"):
                metrics[name] = {site: found[name] for site, found in similar.items()}
        if self.measure is not None:
            metrics |= named(self.measure(handover), "measure")
        return metrics

    def status(self, loss: float) -> str:
        """Say in one line how the training stands."""
        parts = [f"loss {loss:.3f}"]
        if self.loop.handover is not None:
            parts.append(f"alpha {_mean(self.loop.handover.alphas):.2f}")
        latest = self.log.history[-1] if self.log.history else {}
        accuracy = latest.get("students", latest.get("scores", {})).get("accuracy")
        if accuracy is not None:
            parts.append(f"accuracy {accuracy:.3f}")
        if cosines := latest.get("cosine"):
            parts.append(f"cosine {_mean(cosines):.2f}")
        return ", ".join(parts)


def _mean(values: dict[str, float]) -> float:
    return sum(values.values()) / len(values)

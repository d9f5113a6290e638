"""fit(): the one training loop, on Accelerate."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue.checkpoint import state as checkpoint
from segue.core import randomness
from segue.core.handover import Handover, replace_
from segue.core.tensor_files import full
from segue.errors import CheckpointError, SegueWarning
from segue.plan import Plan
from segue.training import distributed as launch
from segue.training import nonfinite as broken_numbers
from segue.training.batches import Stream
from segue.training.evaluation import Evaluation, LossFn, Processes, Scores, padding_mask
from segue.training.metrics_log import Journal, SinceLook, flat, look_steps
from segue.training.progress import Progress
from segue.training.recipe import Recipe
from segue.training.signals import Interruption

LOOKS = 20
CHECKPOINTS = 10


@dataclass
class Fit:
    """What a training left behind; the handover still runs: `fit.handover.finalize_()` ends it."""

    model: nn.Module
    handover: Handover | None
    total_steps: int
    steps_per_epoch: int
    points: list[dict[str, Any]] = field(default_factory=list)  # one per look
    seconds: float = 0.0  # of training, looks left out
    skipped: int = 0  # steps left out because of inf or NaN


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
    resume: bool = False,
    looks: int | Sequence[int] = LOOKS,
    checkpoint_every: int | None = None,
    measure: Callable[[Handover], dict[str, Any]] | None = None,
    tell: Callable[[dict[str, Any]], None] | None = None,
    trackers: Sequence[str] = (),
    split: bool = True,
    progress: str | None = "training",
) -> Fit:
    """Train a model through a handover, or just train it when there is no plan.

    `batches` is anything that yields batches, again for each epoch; `loss_fn(model, batch)` returns a scalar, to which guidance
    and distillation are added. `scores(model, batch)` returns one number per example by name (by default the loss, or
    `loss_fn.scores`); they are averaged over `validation`, for the blend and for the students alone, at so many `looks` (or at
    these steps), together with the interface similarity at every site and whatever `measure(handover)` returns; `tell(point)`
    is called with each.
    With a `folder`, looks go to metrics.jsonl and the state to checkpoints/, ten times a run or every so many steps, on Ctrl-C
    and on SIGTERM; `resume=True` goes on from there bit for bit. If it fails or is stopped, the model is given back as it was,
    and what was learned is in the checkpoint. Launched in several processes, each takes its part of every batch; with
    `split=False` the batches of a process are its own.
    """
    training = _Training(
        model,
        plan,
        batches,
        loss_fn,
        recipe=recipe,
        validation=validation,
        scores=scores,
        folder=None if folder is None else Path(folder),
        resume=resume,
        looks=looks,
        checkpoint_every=checkpoint_every,
        measure=measure,
        tell=tell,
        trackers=trackers,
        split=split,
        progress=progress,
    )
    try:
        return training.run()
    except BaseException:
        training.give_back()
        raise


class _Training:
    """One call of fit."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None,
        batches: Iterable[Any],
        loss_fn: LossFn,
        *,
        recipe: Recipe,
        validation: Iterable[Any] | None,
        scores: Scores | None,
        folder: Path | None,
        resume: bool,
        looks: int | Sequence[int],
        checkpoint_every: int | None,
        measure: Callable[[Handover], dict[str, Any]] | None,
        tell: Callable[[dict[str, Any]], None] | None,
        trackers: Sequence[str],
        split: bool,
        progress: str | None,
    ) -> None:
        self.accelerator = launch.accelerator(recipe, trackers, folder)
        self.processes = Processes(
            self.accelerator.device, self.accelerator.process_index, self.accelerator.num_processes, split=split
        )
        self.loss_fn, self.recipe, self.folder, self.measure, self.tell = loss_fn, recipe, folder, measure, tell
        self.stream = Stream(batches, seed=recipe.seed)
        self.total = recipe.total_steps(self.stream.per_epoch)
        self.looks = look_steps(looks, self.total)
        self.checkpoint_every = checkpoint_every or max(1, self.total // CHECKPOINTS)
        self.progress = progress if self.accelerator.is_main_process else None
        found = folder is not None and (folder / "checkpoints" / "latest").exists()
        if found and not resume:
            raise CheckpointError(
                f"a training was to begin in {folder}.",
                "An earlier one lies there.",
                "go on with it by resume=True, or give another folder. Nothing was changed.",
            )
        self.handover = None if plan is None else replace_(model, plan, total_steps=self.total)
        model.to(self.accelerator.device)
        self.model = model.train()
        randomness.seed_all(recipe.seed + self.processes.rank)
        self.batches_per_epoch = self.stream.per_epoch or self.total * recipe.accumulate
        self.journal = Journal(folder, writes=self.accelerator.is_main_process)
        per_epoch = max(1, self.batches_per_epoch // recipe.accumulate)
        self.fit = Fit(model, self.handover, self.total, per_epoch, self.journal.points)
        self.network = launch.spread(model, self.handover.units() if self.handover else (), recipe, self.processes)
        named = model.named_parameters() if self.handover is None else self.handover.named_parameters()
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in trained]
        self.raw_optimizer = recipe.optimizer(trained)
        self.optimizer = self.accelerator.prepare_optimizer(self.raw_optimizer)
        self.since_look = SinceLook(list(self.handover.seams) if self.handover else [], self.accelerator.device)
        self.evaluation = None
        if validation is not None:
            scores = scores or getattr(loss_fn, "scores", None) or (lambda model, batch: {"loss": loss_fn(model, batch)})
            self.evaluation = Evaluation(validation, scores, self.processes, self.accelerator.autocast)
        self.done = 0
        self.saved: Path | None = None
        self.resumes = found
        self.trackers = trackers

    def run(self) -> Fit:
        """Train to the end."""
        if self.resumes:
            self._resume()
        else:
            self._go_back_to(-1)
        if self.trackers:
            self.accelerator.init_trackers("segue", config={"total_steps": self.total})
        say = Progress(self.progress, self.total, done=self.done) if self.progress else None
        with Interruption() as interruption:
            if self.done == 0:
                self._look()
            begun = time.perf_counter()
            while self.done < self.total:
                loss, signal = self._step(interruption)
                if self.done in self.looks:
                    self.fit.seconds += time.perf_counter() - begun
                    self._look()
                    begun = time.perf_counter()
                if say is not None:
                    say(self.done, self._status(loss))
                last = self.done == self.total
                if self.folder is not None and (signal or last or self.done % self.checkpoint_every == 0):
                    self.fit.seconds += time.perf_counter() - begun
                    self._save()
                    begun = time.perf_counter()
                if signal and not last:
                    interruption.leave(signal, f"stopped at step {self.done} of {self.total}; {self._how_to_go_on()}")
            if caught := self._caught_by_any(interruption):  # in the last step, whose checkpoint is written
                interruption.leave(caught, f"stopped after the last step; {self._how_to_go_on()}")
        for tracker in self.accelerator.trackers:  # not end_training(), which would part the processes for good
            tracker.finish()
        return self.fit

    def give_back(self) -> None:
        """Leave the model as it was before fit, where its teachers are still there and whole."""
        sharded = self.processes.world > 1 and self.recipe.shard
        if self.handover is not None and not sharded and all(seam.teacher is not None for seam in self.handover.seams.values()):
            self.handover.cancel_()

    def _step(self, interruption: Interruption) -> tuple[float, int]:
        """Take one optimizer step; return its loss and the signal that any process caught."""
        total = torch.zeros((), device=self.accelerator.device)
        self.recipe.set_rate(self.raw_optimizer, self.done, self.total)
        batches = []
        for micro in range(self.recipe.accumulate):
            batch, weight = self.processes.part(next(self.stream))
            batches.append(batch)
            last = micro == self.recipe.accumulate - 1
            with self._without_reduction() if not last else nullcontext():
                with self.accelerator.autocast():
                    loss = self.loss_fn(self.network, batch)
                    if self.handover is not None:
                        loss = loss + self.handover.aux_loss(padding_mask(batch))
                share = weight / self.recipe.accumulate
                self.accelerator.backward(loss * share)
            total += loss.detach().float() * share
        self.accelerator.unscale_gradients()
        norms = self._site_norms()
        norm = full(nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]))
        shared = torch.stack([total, torch.tensor(float(interruption.caught), device=total.device)])
        mean, signal = (self.processes.total(shared) / self.processes.world).tolist()
        scaled = self.accelerator.scaler is not None  # fp16: its scaler leaves out steps whose gradient overflowed
        good = math.isfinite(mean) and (scaled or math.isfinite(norm.item()))
        if good:
            if self.recipe.clip is not None:
                nn.utils.clip_grads_with_norm_(self.parameters, self.recipe.clip, norm)
            self.optimizer.step()
            self.fit.skipped += int(self.optimizer.step_was_skipped)
            self.since_look.add(mean, norms)
        elif self.recipe.on_nan == "stop":
            where = broken_numbers.find(self.model, self.handover, batches, mean, self.loss_fn, self.processes)
            raise broken_numbers.error(where, self.done, mean, norm.item(), str(self.saved) if self.saved else None)
        else:
            self.fit.skipped += 1
        self.optimizer.zero_grad()
        if self.handover is not None:
            self.handover.step()
        self.done += 1
        return mean, round(signal * self.processes.world) and (interruption.caught or 15)

    def _caught_by_any(self, interruption: Interruption) -> int:
        """Return the signal that this process or another one caught."""
        known = torch.tensor(float(interruption.caught), device=self.accelerator.device)
        return 0 if self.processes.total(known).item() == 0 else interruption.caught or 15

    def _site_norms(self) -> Tensor:
        """Return the norm of the gradient of every student, before clipping."""
        seams = self.handover.seams.values() if self.handover is not None else ()
        norms = []
        for seam in seams:
            gradients = [p.grad for p in seam.student.parameters() if p.grad is not None]
            norms.append(full(nn.utils.get_total_norm(gradients)).to(self.accelerator.device))
        return torch.stack(norms) if norms else torch.zeros(0)

    def _look(self) -> None:
        """Measure the model as it is now, and write it down."""
        with randomness.kept():  # looking more often must not change what is learned
            point = self._point()
        self.journal.add(point)
        if self.tell is not None:
            self.tell(point)
        if self.accelerator.trackers:
            self.accelerator.log(flat(point), step=self.done)

    def _point(self) -> dict[str, Any]:
        loss, norms = self.since_look.take()
        epoch = self.done * self.recipe.accumulate / self.batches_per_epoch
        rate = self.recipe.rate(self.done, self.total)
        point: dict[str, Any] = {"step": self.done, "epoch": epoch, "seconds": self.fit.seconds, "loss": loss, "lr": rate}
        if self.handover is None:
            return point | ({} if self.evaluation is None else {"scores": self.evaluation(self.model)})
        alphas = self.handover.alphas
        point |= {"alpha": sum(alphas.values()) / len(alphas), "gradient_norm": norms}
        if self.evaluation is not None:
            students, alike = self.evaluation.of_students(self.handover)
            closed = all(seam.closed for seam in self.handover.seams.values())
            point["blend"] = students if closed else self.evaluation(self.model)
            point["students"] = students
            for measure in ("cosine", "relative_error"):
                point[measure] = {name: site[measure] for name, site in alike.items()}
        if self.measure is not None:
            point |= self.measure(self.handover)
        return point

    def _status(self, loss: float) -> str:
        """Say in one line how the training stands."""
        parts = [f"loss {loss:.3f}"]
        if self.handover is not None:
            alphas = self.handover.alphas
            parts.append(f"alpha {sum(alphas.values()) / len(alphas):.2f}")
        seen = self.fit.points[-1] if self.fit.points else {}
        accuracy = seen.get("students", seen.get("scores", {})).get("accuracy")
        if accuracy is not None:
            parts.append(f"accuracy {accuracy:.3f}")
        if cosines := seen.get("cosine"):
            parts.append(f"cosine {sum(cosines.values()) / len(cosines):.2f}")
        return "  ".join(parts)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs beside model and optimizer."""
        scaler = self.accelerator.scaler
        return {
            "total_steps": self.total,
            "scaler": None if scaler is None else scaler.state_dict(),
            "seconds": self.fit.seconds,
            "skipped": self.fit.skipped,
            "since_look": self.since_look.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what an earlier process had reached."""
        if state["total_steps"] != self.total:
            raise CheckpointError(
                f"a training of {self.total} steps was to go on in {self.folder}.",
                f"The one that lies there was to take {state['total_steps']}: its schedules were made for that.",
                "give the same recipe, or another folder.",
            )
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.fit.seconds, self.fit.skipped = state["seconds"], state["skipped"]
        self.since_look.load_state_dict(state["since_look"])

    def _save(self) -> None:
        assert self.folder is not None
        place = self.folder / "checkpoints"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SegueWarning)  # a student that cannot be saved by name is given again by fit
            self._write(place)

    def _write(self, place: Path) -> None:
        if self.handover is not None:
            self.saved = checkpoint.save(self.handover, place, optimizer=self.raw_optimizer, lr_scheduler=self)
        else:
            self.saved = checkpoint.save_training(self.model, self.done, place, optimizer=self.raw_optimizer, lr_scheduler=self)

    def _resume(self) -> None:
        assert self.folder is not None
        place = self.folder / "checkpoints"
        self.stream.skip(checkpoint.saved_step(place) * self.recipe.accumulate)  # before the random states are set
        if self.handover is not None:
            checkpoint.load_(self.handover, place, optimizer=self.raw_optimizer, lr_scheduler=self)
            self.done = self.handover.steps_done
        else:
            self.done = checkpoint.load_training_(self.model, place, optimizer=self.raw_optimizer, lr_scheduler=self)
        self.saved = place
        self._go_back_to(self.done)

    def _go_back_to(self, step: int) -> None:
        self.journal.go_back_to(step)
        self.processes.wait()

    def _without_reduction(self) -> AbstractContextManager[Any]:
        """Let gradients gather in this process until the last batch of a step."""
        no_sync = getattr(self.network, "no_sync", None)
        return nullcontext() if no_sync is None else no_sync()

    def _how_to_go_on(self) -> str:
        return "nothing was saved (no folder)" if self.folder is None else f"resume from {self.folder}"

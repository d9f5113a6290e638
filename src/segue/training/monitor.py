"""The monitor of a training: what it evaluates while it runs, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from segue.core import randomness
from segue.core.handover import Handover
from segue.training import trackers
from segue.training.evaluation import COMPARED, Evaluator, MetricsLog, flat, named
from segue.training.progress import Progress
from segue.training.tasks import quality_of

if TYPE_CHECKING:
    from segue.training.fit import Loop


@dataclass(frozen=True)
class Monitor:
    """Evaluate a training while it runs, and log the metrics."""

    loop: Loop
    evaluator: Evaluator | None
    log: MetricsLog
    measure: Callable[[Handover], dict[str, Any]] | None
    on_eval: Callable[[dict[str, Any]], None] | None
    of_original: dict[str, float] = field(default_factory=dict)  # its scores, once they are known

    def evaluate(self, progress: Progress) -> None:
        """Measure the model as it is now, and log it."""
        with progress.paused(), randomness.kept():  # the number of evaluations must not change what is learned
            metrics = self._metrics()
            metrics |= self._averaged(metrics)
        if self.loop.guard is not None and (events := self.loop.guard.take_events()):
            metrics["events"] = events
        self.log.add(metrics)
        if self.loop.stopping is not None:
            self.loop.stopping.observe(metrics)
        if self.on_eval is not None:
            with progress.hidden():
                self.on_eval(metrics)
        if self.loop.accelerator.trackers:
            self.loop.accelerator.log(flat(metrics), step=self.loop.done)
            if self.loop.handover is not None:
                trackers.send(self.loop.accelerator, self.log.history, self.loop.handover, self.loop.done)

    def _metrics(self) -> dict[str, Any]:
        loop, handover = self.loop, self.loop.handover
        means = loop.means.take()
        norms = means.pop("gradient_norm")
        epoch = loop.done * loop.recipe.accumulate / loop.batches_per_epoch
        metrics: dict[str, Any] = {"step": loop.done, "epoch": epoch, "seconds": loop.seconds, "lr": loop.rate, **means}
        if handover is None:
            return metrics | ({} if self.evaluator is None else {"scores": self.evaluator(loop.model)})
        metrics |= {"alpha": _mean(handover.alphas), "alphas": handover.alphas, "gradient_norm": norms}
        metrics |= {} if handover.phase is None else {"phase": handover.phase.name}
        if self.evaluator is not None:
            students, similar = self.evaluator.of_students(handover)
            closed = all(seam.closed for seam in handover.seams.values())
            metrics["blend"] = students if closed else self._blend(handover, self.evaluator)
            metrics["students"] = students
            for name in COMPARED:
                metrics[name] = {site: found[name] for site, found in similar.items()}
        if self.measure is not None:
            metrics |= named(self.measure(handover), "measure")
        return metrics

    def _blend(self, handover: Handover, evaluator: Evaluator) -> dict[str, float]:
        """Score the blend; while it is the original model, which does not train, once."""
        plan = handover.plan
        frozen = plan.train == "students" and plan.backbone == "eval"
        if not (frozen and evaluator.repeats and all(seam.state.mean == 0.0 for seam in handover.seams.values())):
            return evaluator(self.loop.model)
        if not self.of_original:
            self.of_original.update(evaluator(self.loop.model))
        return dict(self.of_original)

    def _averaged(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Score the averaged weights of the students, or of a plain model; before the first step they are the weights."""
        ema, handover = self.loop.ema, self.loop.handover
        if ema is None or self.evaluator is None:
            return {}
        if not ema.weights:
            return {"ema": metrics["scores" if handover is None else "students"]}
        with ema.applied(), nullcontext() if handover is None else handover.as_student():
            return {"ema": self.evaluator(self.loop.model)}

    def status(self, loss: float) -> str:
        """Say in one line how the training stands, the most important first."""
        parts = [f"loss {loss:.4g}"]
        if self.loop.handover is not None:
            parts.append(f"alpha {_mean(self.loop.handover.alphas):.2f}")
        latest = self.log.history[-1] if self.log.history else {}
        if text := quality_of(self.loop.loss_fn, latest.get("students", latest.get("scores", {}))):
            parts.append(text)
        if cosines := latest.get("cosine"):
            parts.append(f"cosine {_mean(cosines):.2f}")
        if self.loop.handover is not None and (summands := self.loop.parts.text(self.loop.handover.plan)):
            parts.append(summands)  # last: a narrow terminal cuts the line
        return ", ".join(parts)


def _mean(values: dict[str, float]) -> float:
    return sum(values.values()) / len(values)

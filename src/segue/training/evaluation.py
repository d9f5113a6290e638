"""Evaluations of a training: at which steps, on which batches, and the log of what they measure."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue.core import files
from segue.core.backbone import evaluating
from segue.core.blending import padding_mask
from segue.core.handover import Handover
from segue.core.views import comparing
from segue.errors import CheckpointError, ConfigError
from segue.similarity import Similarity
from segue.training.batches import InOrder, size
from segue.training.distributed import Processes
from segue.training.tasks import Scores

COMPARED = ("cosine", "relative_error")  # of the two sides at a site, in every evaluation


def evaluation_steps(evaluations: int | Sequence[int], total: int) -> frozenset[int]:
    """Return the steps after which to evaluate: this many at even distances, or these; always the last.

    >>> sorted(evaluation_steps(4, 100))
    [25, 50, 75, 100]
    """
    if isinstance(evaluations, int):
        evaluations = min(evaluations, total)
        evaluations = [round(total * i / evaluations) for i in range(1, evaluations + 1)]
    return frozenset({*evaluations, total})


class Evaluator:
    """Score a model on validation batches."""

    def __init__(self, batches: Iterable[Any], scores: Scores, processes: Processes, autocast: Callable[[], Any]) -> None:
        self.batches = list(batches) if isinstance(batches, Iterator) else batches  # every evaluation reads them
        self.scores = scores
        self.processes = processes
        self.autocast = autocast

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return the mean of every score."""
        with evaluating(model):
            return self._mean(self._parts(model, None, {}))

    @property
    def repeats(self) -> bool:
        """Whether every evaluation is known to read the same batches in the same order."""
        return isinstance(self.batches, InOrder)

    @torch.no_grad()
    def of_students(self, handover: Handover) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Return the scores of the students alone and, from the first batch, how similar the sides are at every site."""
        similar: dict[str, dict[str, float]] = {}
        with evaluating(handover.model), handover.as_student():
            scores = self._mean(self._parts(handover.model, handover, similar))
        return scores, similar

    def _parts(
        self, model: nn.Module, handover: Handover | None, similar: dict[str, dict[str, float]]
    ) -> Iterator[tuple[dict[str, Tensor], float]]:
        has_teachers = handover is not None and all(seam.teacher is not None for seam in handover.seams.values())
        for index, batch in enumerate(self.batches):
            part, weight = self.processes.part(batch)
            share = weight / self.processes.world
            first = index == 0 and has_teachers
            sides: AbstractContextManager[Any] = nullcontext({})
            if first and handover is not None:
                sides = comparing(handover, padding_mask(part), COMPARED)
            with sides as found, self.autocast():
                scores = {name: _number(name, one) for name, one in named(self.scores(model, part), "scores").items()}
            if first:
                similar |= self._averaged(found, share)
            yield scores, size(batch) * share if self.processes.split else size(part)

    def _averaged(self, found: dict[str, Similarity], share: float) -> dict[str, dict[str, float]]:
        """Average what each process measured on its share of the batch."""
        if self.processes.world == 1:
            return {name: {"cosine": site.cosine, "relative_error": site.relative_error} for name, site in found.items()}
        mine = torch.tensor([[site.cosine, site.relative_error**2] for site in found.values()], dtype=torch.float64)
        means = self.processes.total(mine * share).tolist()  # of squares: a relative error is the root of a mean
        return {
            name: {"cosine": c, "relative_error": math.sqrt(square)} for name, (c, square) in zip(found, means, strict=True)
        }

    def _mean(self, parts: Iterable[tuple[dict[str, Tensor], float]]) -> dict[str, float]:
        sums: dict[str, Tensor] = {}
        count = 0.0
        for scores, examples in parts:
            count += examples
            for name, value in scores.items():
                sums[name] = sums.get(name, 0.0) + value.detach().cpu().double().mean() * examples
        totals = self.processes.total(torch.stack([*sums.values(), torch.tensor(count, dtype=torch.float64)]))
        return {name: (total / totals[-1]).item() for name, total in zip(sums, totals, strict=False)}


def named(found: object, what: str) -> dict[str, Any]:
    """Return what a user's function measured, and refuse what is not a dictionary by name."""
    if isinstance(found, Mapping) and all(isinstance(name, str) for name in found):
        return dict(found)
    raise ConfigError(
        f"{what} must return a dictionary, got {type(found).__name__}.",
        "Its names are those of the measured values.",
        f"return for example {{'accuracy': ...}} from fit({what}=...).",
    )


def _number(name: str, score: object) -> Tensor:
    if isinstance(score, Tensor) and score.numel() > 0:
        return score
    raise ConfigError(
        f"the score {name!r} must be a tensor, got {type(score).__name__}.",
        "It has one number per example.",
        "return a tensor of shape (batch,) for each name.",
    )


MOST_STEPS = 2**53  # beyond which a float does not count


class RunningMeans:
    """Means since the last evaluation: of the training loss and its parts, and by site of gradient norms and gates."""

    def __init__(self, sites: list[str], device: torch.device) -> None:
        self.sites = sites
        self.device = device
        self._clear()

    def _clear(self) -> None:
        self.losses, self.steps = 0.0, 0
        self.norms = torch.zeros(len(self.sites), device=self.device)
        self.parts: dict[str, float] = {}  # sums, by the names of LossParts
        self.weights: dict[str, float] = {}  # sums over `drawn` steps, also those that are left out
        self.rises: dict[str, int] = {}  # steps in which the alpha of a site has risen
        self.drawn = 0

    def add(self, loss: float, norms: Tensor, parts: Mapping[str, float]) -> None:
        """Count one step in."""
        self.losses += loss
        self.steps += 1
        self.norms += norms
        for name, part in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + part

    def follow(self, handover: Handover) -> None:
        """Move a handover on by one step, and note what its gates had drawn and where alpha rises."""
        weights, before = handover.weights, handover.alphas
        handover.step()
        self.drawn += 1
        for name, alpha in handover.alphas.items():
            self.weights[name] = self.weights.get(name, 0.0) + weights[name]
            if alpha > before[name]:
                self.rises[name] = self.rises.get(name, 0) + 1

    def take(self) -> dict[str, Any]:
        """Return the means and counts by their names in the metrics, and start again."""
        found: dict[str, Any] = {"loss": None, "gradient_norm": {}}
        if self.steps:
            norms = (self.norms / self.steps).tolist()
            found = {"loss": self.losses / self.steps, "gradient_norm": dict(zip(self.sites, norms, strict=True))}
            if self.parts:
                found["losses"] = {name: part / self.steps for name, part in self.parts.items()}
        if self.drawn:
            found["weights"] = {name: weight / self.drawn for name, weight in self.weights.items()}
        if self.rises:
            found["rises"] = self.rises
        if self.steps or self.drawn:
            self._clear()
        return found

    def state_dict(self) -> dict[str, Any]:
        names = ("losses", "steps", "norms", "parts", "weights", "rises", "drawn")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        losses, steps, norms = state["losses"], state["steps"], state["norms"]
        plain = type(losses) is float and math.isfinite(losses) and _is_count(steps)
        if not (plain and norms.shape == self.norms.shape and norms.is_floating_point()):
            raise ValueError(f"a sum of {losses!r:.20} over {steps!r:.20} steps with norms of {len(norms)} sites")
        parts, weights, rises = (dict(state.get(name, {})) for name in ("parts", "weights", "rises"))  # not in 0.1.0
        sums = [*parts.values(), *weights.values()]
        counts = [drawn := state.get("drawn", 0), *rises.values()]
        known = {*weights, *rises} <= {*self.sites} and all(map(_is_count, counts))
        if not (known and all(type(one) is float and math.isfinite(one) for one in sums)):
            raise ValueError(f"sums of {sums!r:.40} over {drawn!r:.20} steps")
        self.losses, self.steps, self.norms = losses, steps, norms.to(self.device)
        self.parts, self.weights, self.rises, self.drawn = parts, weights, rises, drawn


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST_STEPS


class MetricsLog:
    """The evaluations of a training: a list in memory and, with a folder, one line each of metrics.jsonl."""

    def __init__(self, folder: Path | None, *, writes: bool) -> None:
        self.history: list[dict[str, Any]] = []
        self.path = None if folder is None else folder / "metrics.jsonl"
        self.writes = writes  # only one process does

    def add(self, metrics: dict[str, Any]) -> None:
        """Append the metrics of one evaluation."""
        try:
            line = json.dumps(metrics)
        except (TypeError, ValueError) as error:
            fault = "the metrics of an evaluation must be numbers, strings, lists and dictionaries."
            raise ConfigError(fault, f"JSON says: {error}.", "return plain data from fit(measure=...).") from None
        self.history.append(metrics)
        if self.path is not None and self.writes:
            with files.writing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")

    def rewind(self, step: int) -> None:
        """Keep the evaluations up to a step: a resumed run repeats those after its checkpoint."""
        if self.path is None:
            return
        self.history[:] = [metrics for metrics in _read_lines(self.path) if metrics["step"] <= step]
        if self.writes and self.path.exists():
            draft = self.path.with_name(".metrics-new")
            with files.writing(self.path):
                draft.write_text("".join(json.dumps(metrics) + "\n" for metrics in self.history), encoding="utf-8")
                os.replace(draft, self.path)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read JSON lines. A kill may have cut the last, which is left out; any other damage is refused."""
    *lines, rest = files.content(path).split(b"\n") if path.exists() else [b""]
    for number, line in enumerate([*lines, rest], start=1):
        try:
            metrics = json.loads(line)
            if isinstance(metrics["step"], int):
                yield metrics
                continue
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
        if number <= len(lines):
            raise CheckpointError(
                f"{path} cannot be read.",
                f"Line {number} is damaged: {line[:40]!r}.",
                "remove that line; its evaluation will be missing from the history.",
            )


def flat(metrics: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Name every number by its path, as trackers want it.

    >>> flat({"step": 3, "students": {"accuracy": 0.5}, "loss": None})
    {'step': 3, 'students/accuracy': 0.5}
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[f"{prefix}{name}"] = value
    return found

"""Looking at a model in training: its scores as it is, those of the students alone, and how alike the two sides are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.core.handover import Handover
from segue.core.surgery import evaluating
from segue.similarity import Similarity
from segue.training.batches import mapped, part_for, size

LossFn: TypeAlias = Callable[[nn.Module, Any], Tensor]  # (model, batch) -> scalar
Scores: TypeAlias = Callable[[nn.Module, Any], Mapping[str, Tensor]]  # (model, batch) -> one number per example, by name


class Classification:
    """Cross-entropy on (inputs, labels), or on a mapping that holds `labels`; it also scores.

    >>> task = Classification(label_smoothing=0.1)
    >>> task(nn.Identity(), (torch.eye(3), torch.tensor([0, 1, 2]))).item() > 0
    True
    """

    def __init__(self, *, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        logits, labels = self._answer(model, batch)
        return F.cross_entropy(logits.float(), labels, label_smoothing=self.label_smoothing)

    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return accuracy and (unsmoothed) loss of every example."""
        logits, labels = self._answer(model, batch)
        loss = F.cross_entropy(logits.float(), labels, reduction="none")
        return {"accuracy": (logits.argmax(-1) == labels).float(), "loss": loss}

    def _answer(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if isinstance(batch, Mapping):
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            output, labels = model(**inputs), batch["labels"]
        else:
            *given, labels = batch
            output = model(*given)
        return getattr(output, "logits", output), labels


class Processes:
    """The processes that train together; one alone if nobody launched more."""

    def __init__(self, device: torch.device, rank: int = 0, world: int = 1, *, split: bool = True) -> None:
        self.device = device
        self.rank = rank
        self.world = world
        self.split = split  # every process reads the same batches and takes its part

    def part(self, batch: Any) -> tuple[Any, float]:
        """Return this process' part of a batch, on its device, and the part's weight in the mean."""
        part, weight = part_for(batch, self.rank, self.world) if self.split else (batch, 1.0)
        return mapped(lambda tensor: tensor.to(self.device, non_blocking=True), part), weight

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.world > 1:
            torch.distributed.barrier()

    def total(self, values: Tensor) -> Tensor:
        """Sum a tensor over the processes."""
        if self.world == 1:
            return values
        here = values.to(self.device)
        torch.distributed.all_reduce(here)
        return here.to(values.device)


def padding_mask(batch: Any) -> Tensor | None:
    """Return the attention mask of a Hugging Face batch, 1 where a token counts."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


class Evaluation:
    """Score a model on held-out batches."""

    def __init__(self, batches: Iterable[Any], scores: Scores, processes: Processes, autocast: Callable[[], Any]) -> None:
        self.batches = list(batches) if isinstance(batches, Iterator) else batches  # read at every look
        self.scores = scores
        self.processes = processes
        self.autocast = autocast

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return the mean of every score."""
        with evaluating(model):
            return self._mean(self._parts(model, None, {}))

    @torch.no_grad()
    def of_students(self, handover: Handover) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Return the scores of the students alone and, from the first batch, how alike the sides are at every site."""
        alike: dict[str, dict[str, float]] = {}
        with evaluating(handover.model), handover.as_student():
            scores = self._mean(self._parts(handover.model, handover, alike))
        return scores, alike

    def _parts(
        self, model: nn.Module, handover: Handover | None, alike: dict[str, dict[str, float]]
    ) -> Iterator[tuple[dict[str, Tensor], float]]:
        teachers_there = handover is not None and all(seam.teacher is not None for seam in handover.seams.values())
        for index, batch in enumerate(self.batches):
            part, weight = self.processes.part(batch)
            share = weight / self.processes.world
            first = index == 0 and teachers_there
            comparing: AbstractContextManager[Any] = nullcontext({})
            if first and handover is not None:
                comparing = handover.comparing(padding_mask(part))
            with comparing as found, self.autocast():
                scores = self.scores(model, part)
            if first:
                alike |= self._agreed(found, share)
            yield dict(scores), size(batch) * share if self.processes.split else size(part)

    def _agreed(self, alike: dict[str, Similarity], share: float) -> dict[str, dict[str, float]]:
        """Average what each process measured on its share of the batch."""
        if self.processes.world == 1:
            return {name: {"cosine": site.cosine, "relative_error": site.relative_error} for name, site in alike.items()}
        mine = torch.tensor([[site.cosine, site.relative_error**2] for site in alike.values()], dtype=torch.float64)
        means = self.processes.total(mine * share).tolist()  # of squares: a relative error is the root of a mean
        return {
            name: {"cosine": c, "relative_error": math.sqrt(square)} for name, (c, square) in zip(alike, means, strict=True)
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

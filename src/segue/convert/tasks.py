"""Tasks of a conversion: predict the next token, hidden tokens or labels, or return what the original returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.training.tasks import Classification

IGNORED = -100  # the label of tokens that are not predicted


class Task(Protocol):
    """A loss, scores, and the one number that sums up the quality."""

    quality: str
    unit: str

    def __call__(self, model: nn.Module, batch: Any) -> Tensor: ...

    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]: ...

    def of(self, scores: Mapping[str, float]) -> float: ...


class NextToken:
    """Predict each token of packed texts from the ones before it; of texts with labels, those that have one."""

    quality, unit = "perplexity", ""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        losses, _, counted = _predicted(model, batch)
        return losses.mean() if counted is None else losses.sum() / counted.sum().clamp_min(1)

    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the mean loss and the accuracy of every text."""
        losses, hits, counted = _predicted(model, batch)
        if counted is None:
            return {"loss": losses.mean(1), "accuracy": hits.mean(1)}
        return {name: x.sum(1) / counted.sum(1).clamp_min(1) for name, x in {"loss": losses, "accuracy": hits}.items()}

    def output_mask(self, batch: Any) -> Tensor | None:
        """Return 1 where the model predicts a token that counts, for distillation."""
        return F.pad((batch["labels"][:, 1:] != IGNORED).long(), (0, 1)) if "labels" in batch else None

    def of(self, scores: Mapping[str, float]) -> float:
        """Return the perplexity."""
        return math.exp(min(scores["loss"], 100.0))


class HiddenToken(NextToken):
    """Predict hidden tokens."""

    output_mask = None  # type: ignore[assignment]  # distillation is at every token

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        logits = model(**{name: x for name, x in batch.items() if name != "labels"}).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)

    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the mean loss and the accuracy of the hidden tokens of every text."""
        logits = model(**{name: x for name, x in batch.items() if name != "labels"}).logits.float()
        labels = batch["labels"]
        hidden = (labels != IGNORED).float()
        losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
        count = hidden.sum(1).clamp_min(1)
        hits = (logits.argmax(-1) == labels).float() * hidden
        return {"loss": losses.sum(1) / count, "accuracy": hits.sum(1) / count}


class Labels(Classification):
    """Predict the class of a text or an image."""

    quality, unit = "accuracy", " %"

    def of(self, scores: Mapping[str, float]) -> float:
        """Return the accuracy in percent."""
        return 100 * scores["accuracy"]


class Outputs:
    """Return what the original returns: the loss is the plan's distillation between the outputs of the two models."""

    quality, unit = "cosine", ""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return embedded(model, batch).sum() * 0.0

    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the cosine of every example's embedding to the original's."""
        return {"cosine": F.cosine_similarity(embedded(model, batch), batch["targets"], dim=-1)}

    def of(self, scores: Mapping[str, float]) -> float:
        """Return the mean cosine."""
        return scores["cosine"]


def next_token_losses(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of every token but the first, (texts, tokens - 1), and 1 where it is the model's first choice."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return losses, (logits.argmax(-1) == ids[:, 1:]).float()


def _predicted(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return losses, hits and, where texts have labels, which of their tokens count; the others have a loss of 0."""
    if "labels" not in batch:
        return *next_token_losses(model, batch["input_ids"]), None
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    logits, labels = model(**inputs, use_cache=False).logits[:, :-1].float(), batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return losses, (logits.argmax(-1) == labels).float(), labels != IGNORED


def embedded(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean of each example's last hidden states, without padding."""
    inputs = {name: x for name, x in batch.items() if name not in ("labels", "targets")}
    states: Tensor = model(**inputs).last_hidden_state
    mask = inputs.get("attention_mask")
    counts = torch.ones(states.shape[:2], device=states.device) if mask is None else mask.float()
    return (states.float() * counts[..., None]).sum(1) / counts.sum(1, keepdim=True).clamp_min(1)

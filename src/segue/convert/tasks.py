"""Tasks of a conversion: predict the next token, hidden tokens or labels, or return what the original returns."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.reporting.formatting import significant
from segue.similarity import divergence
from segue.training.tasks import Classification

IGNORED = -100  # the label of tokens that are not predicted


class Task(Protocol):
    """A loss, scores, and the one number that sums up the quality.

    With the original, the scores also say how far a model is from it: KL divergence in nats, and equal first choices.
    """

    quality: str
    unit: str

    def __call__(self, model: nn.Module, batch: Any) -> Tensor: ...

    def scores(self, model: nn.Module, batch: Any, original: nn.Module | None = None) -> dict[str, Tensor]: ...

    def of(self, scores: Mapping[str, float]) -> float: ...


class NextToken:
    """Predict each token of packed texts from the ones before it; of texts with labels, those that have one."""

    quality, unit = "perplexity", ""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        logits = self.logits(model, batch)
        return F.cross_entropy(logits.flatten(0, 1), self.labels(batch).flatten(), ignore_index=IGNORED)

    def forward_only(self, model: nn.Module, batch: Any) -> Tensor:
        """Run the model, without the loss."""
        return self.logits(model, batch)

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the logits of every prediction, (texts, predictions, vocabulary)."""
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        logits: Tensor = model(**inputs, use_cache=False).logits
        return logits[:, :-1].float()

    def labels(self, batch: Any) -> Tensor:
        """Return the correct token of every prediction, (texts, predictions)."""
        labels: Tensor = batch["labels" if "labels" in batch else "input_ids"]
        return labels[:, 1:]

    def output_mask(self, batch: Any) -> Tensor | None:
        """Return 1 where the model predicts a token that counts, for distillation."""
        return F.pad((batch["labels"][:, 1:] != IGNORED).long(), (0, 1)) if "labels" in batch else None

    def scores(self, model: nn.Module, batch: Any, original: nn.Module | None = None) -> dict[str, Tensor]:
        """Return the mean loss and the accuracy of every text, and its mean distance from the original."""
        labels = self.labels(batch)
        of_original = None if original is None else self.logits(original, batch)
        found = token_scores(self.logits(model, batch), labels, of_original)
        counted = (labels != IGNORED).float()
        return {name: (each * counted).sum(1) / counted.sum(1).clamp_min(1) for name, each in found.items()}

    def of(self, scores: Mapping[str, float]) -> float:
        """Return the perplexity."""
        return math.exp(min(scores["loss"], 100.0))


class HiddenToken(NextToken):
    """Predict hidden tokens."""

    output_mask = None  # type: ignore[assignment]  # distillation is at every token

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the logits at every token, (texts, tokens, vocabulary)."""
        logits: Tensor = model(**{name: x for name, x in batch.items() if name != "labels"}).logits
        return logits.float()

    def labels(self, batch: Any) -> Tensor:
        """Return the hidden tokens, and elsewhere what is not counted."""
        labels: Tensor = batch["labels"]
        return labels


class Labels(Classification):
    """Predict the class of a text or an image."""

    quality, unit = "accuracy", " %"

    def scores(self, model: nn.Module, batch: Any, original: nn.Module | None = None) -> dict[str, Tensor]:
        """Return loss and accuracy of every example, and its distance from the original."""
        logits, labels = self._predict(model, batch)
        return token_scores(logits.float(), labels, None if original is None else self._predict(original, batch)[0].float())

    def of(self, scores: Mapping[str, float]) -> float:
        """Return the accuracy in percent."""
        return 100 * scores["accuracy"]


class Outputs:
    """Return what the original returns: the loss is the plan's distillation between the outputs of the two models."""

    quality, unit = "cosine", ""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return embedded(model, batch).sum() * 0.0

    def scores(self, model: nn.Module, batch: Any, original: nn.Module | None = None) -> dict[str, Tensor]:
        """Return the cosine of every example's embedding to the original's, which the batch holds."""
        return {"cosine": F.cosine_similarity(embedded(model, batch), batch["targets"], dim=-1)}

    def of(self, scores: Mapping[str, float]) -> float:
        """Return the mean cosine."""
        return scores["cosine"]


def token_scores(logits: Tensor, labels: Tensor, original: Tensor | None = None) -> dict[str, Tensor]:
    """Return loss and accuracy (0 or 1) of every prediction, and with the original's logits the distance from it."""
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
    first = logits.argmax(-1)
    found = {"loss": losses.view(labels.shape), "accuracy": (first == labels).float()}
    if original is not None:
        found |= {"kl": divergence(original, logits), "same_first_choice": (first == original.argmax(-1)).float()}
    return found


def agreement(scores: Mapping[str, float]) -> str:
    """Write how far a model is from the original; empty where that is not measured.

    >>> agreement({"loss": 2.0, "kl": 0.1234, "same_first_choice": 0.875}), agreement({"loss": 2.0})
    ('KL 0.123, same first choice 87.5 %', '')
    """
    if "kl" not in scores:
        return ""
    return f"KL {significant(scores['kl'])}, same first choice {100 * scores['same_first_choice']:.1f} %"


def frozen_copy(model: nn.Module, *, shares: bool) -> nn.Module:
    """Copy a model before modules in it are replaced, to compare with; `shares` says that its weights stay as they are.

    Such weights, and those that are frozen already, are the same memory; a teacher's stay with the copy when it is released.
    """
    weights = {id(p): p.detach() if shares or not p.requires_grad else p.detach().clone() for p in model.parameters()}
    memo: dict[int, Any] = {key: nn.Parameter(weight, requires_grad=False) for key, weight in weights.items()}
    return copy.deepcopy(model, memo).eval()


def embedded(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean of each example's last hidden states, without padding."""
    inputs = {name: x for name, x in batch.items() if name not in ("labels", "targets")}
    states: Tensor = model(**inputs).last_hidden_state
    mask = inputs.get("attention_mask")
    counts = torch.ones(states.shape[:2], device=states.device) if mask is None else mask.float()
    return (states.float() * counts[..., None]).sum(1) / counts.sum(1, keepdim=True).clamp_min(1)

"""Tasks: data, a model, a loss and scores, ready to train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from segue.data.augment import NoAugmentation, normalise
from segue.data.dataset import Dataset, TextDataset
from segue.errors import ConfigError
from segue.lab.models import SentenceClassifier, SmallViT, Timm
from segue.sites import Selector
from segue.training.batches import Batches, InOrder
from segue.training.tasks import Classification

MORE_THAN_ANY = 1 << 40


@dataclass(frozen=True)
class Loaded:
    """A task with its data in memory."""

    train: Callable[[int, int], Batches]  # (batch size, seed) -> shuffled batches
    look: InOrder  # the examples of every look
    final: InOrder  # all examples held out
    build: Callable[[int], nn.Module]  # seed of what is not pretrained -> a fresh model
    examples: int  # to train on


class Task(Protocol):
    """What the lab asks of a task; a dataclass, so that it can be written down."""

    score: str  # the score that counts, higher is better

    @property
    def sites(self) -> Selector: ...

    @property
    def head(self) -> str: ...

    @property
    def loss(self) -> Classification: ...

    def load(self, *, share: float = 1.0, seed: int = 0) -> Loaded:
        """Load the data, with this share of the training part."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Naming:
    """What naming a class has in common, whatever is named."""

    model: SmallViT | Timm | SentenceClassifier
    label_smoothing: float = 0.1
    hold_out: int = 0  # judge by so many training examples instead of the test part, to choose settings by

    score = "accuracy"

    @property
    def sites(self) -> Selector:
        return self.model.sites

    @property
    def head(self) -> str:
        return self.model.head

    @property
    def loss(self) -> Classification:
        return Classification(label_smoothing=self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class ImageTask(_Naming):
    """Name the class of an image."""

    source: Callable[[], Dataset]
    model: SmallViT | Timm
    size: int | None = None  # resize to so many pixels
    mean: tuple[float, ...] | None = None  # of each channel, as a pretrained model expects; the data's own if not given
    std: tuple[float, ...] | None = None
    augment: Callable[[Tensor, torch.Generator], Tensor] = field(default_factory=NoAugmentation)
    look: int = 2000  # so many held-out examples at every look; all of them at the end

    def load(self, *, share: float = 1.0, seed: int = 0) -> Loaded:
        """Load the data, with this share of the training part."""
        data = self.source()
        scale = (self.mean or data.mean, self.std or data.std, self.size)
        train, held = _parts(data.train.labels, self.hold_out)
        judge = data.test if held is None else None
        images, labels = data.train.inputs, data.train.labels
        kept = train[_subset(labels[train], share, seed)]

        def batch(chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
            pixels = normalise(images[kept[chosen]], *scale)
            return self.augment(pixels, generator), labels[kept[chosen]]

        def judged(chosen: Tensor) -> tuple[Tensor, Tensor]:
            if judge is not None:
                return normalise(judge.inputs[chosen], *scale), judge.labels[chosen]
            assert held is not None
            return normalise(images[held[chosen]], *scale), labels[held[chosen]]

        count = len(judge) if judge is not None else self.hold_out
        size = 500 if (self.size or images.shape[-1]) <= 64 else 128
        return Loaded(
            train=lambda size, seed: Batches(len(kept), size, batch, seed=seed),
            look=InOrder(min(self.look, count), size, judged),
            final=InOrder(count, size, judged),
            build=lambda seed: self.model(data, self.size, seed),
            examples=len(kept),
        )


@dataclass(frozen=True, kw_only=True)
class SentenceTask(_Naming):
    """Name the class of a sentence."""

    source: Callable[[], TextDataset]
    model: SentenceClassifier
    longest: int = 32  # tokens
    look: int = MORE_THAN_ANY

    def load(self, *, share: float = 1.0, seed: int = 0) -> Loaded:
        """Load the data, with this share of the training part."""
        data = self.source()
        tokenizer = self.model.tokenizer()
        train, held = _parts(data.train_labels, self.hold_out)
        kept = train[_subset(data.train_labels[train], share, seed)]
        texts, labels = (data.test_texts, data.test_labels)
        if held is not None:
            texts, labels = [data.train_texts[i] for i in held.tolist()], data.train_labels[held]

        def encode(sentences: list[str], answers: Tensor) -> dict[str, Tensor]:
            tokens = tokenizer(sentences, padding=True, truncation=True, max_length=self.longest, return_tensors="pt")
            return {**tokens, "labels": answers}

        def batch(chosen: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
            where = kept[chosen]
            return encode([data.train_texts[i] for i in where.tolist()], data.train_labels[where])

        def judged(chosen: Tensor) -> dict[str, Tensor]:
            return encode([texts[i] for i in chosen.tolist()], labels[chosen])

        return Loaded(
            train=lambda size, seed: Batches(len(kept), size, batch, seed=seed),
            look=InOrder(min(self.look, len(texts)), 128, judged),
            final=InOrder(len(texts), 128, judged),
            build=lambda seed: self.model(data.classes, seed),
            examples=len(kept),
        )


def _parts(labels: Tensor, hold_out: int) -> tuple[Tensor, Tensor | None]:
    """Split the training part by a fixed seed into what is trained on and what settings are chosen by."""
    if not 0 <= hold_out < len(labels):
        raise ConfigError(
            f"hold_out={hold_out} examples were asked for.",
            f"The training part has {len(labels)}.",
            "leave some to train on.",
        )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return order[hold_out:].sort().values, order[:hold_out] if hold_out else None


def _subset(labels: Tensor, share: float, seed: int) -> Tensor:
    """Choose a share of the examples, the same share of every class (at least one each).

    >>> labels = torch.tensor([0, 0, 0, 0, 1, 1])
    >>> labels[_subset(labels, 0.5, seed=0)].tolist()
    [0, 0, 1]
    """
    if not 0 < share <= 1:
        raise ConfigError(f"share={share} of the data was asked for.", "It is not in (0, 1].", "give 1.0 for all of it.")
    if share == 1:
        return torch.arange(len(labels))
    generator = torch.Generator().manual_seed(hash((seed, 0x5A)) & 0x7FFFFFFF)
    chosen = []
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().flatten()
        count = max(1, round(share * len(members)))
        chosen.append(members[torch.randperm(len(members), generator=generator)[:count]])
    return torch.cat(chosen).sort().values

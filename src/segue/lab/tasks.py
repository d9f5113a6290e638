"""Tasks: data, a model, a loss and scores, ready to train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from segue.border import Count, Fraction, PositiveFloat, PositiveInt, Seed, Unit, checked
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
    validation: InOrder  # the held-out examples of every evaluation
    final: InOrder  # all held-out examples; the same object where evaluations use all
    build: Callable[[int], nn.Module]  # seed of what is not pretrained -> a fresh model
    examples: int  # to train on


class Task(Protocol):
    """What the lab needs of a task; a dataclass, so that it can be saved."""

    score: str  # the score that counts, higher is better

    @property
    def sites(self) -> Selector: ...

    @property
    def head(self) -> str: ...

    @property
    def loss(self) -> Classification: ...

    def load(self, *, data_fraction: float = 1.0, seed: int = 0) -> Loaded:
        """Load the data, with this fraction of the training part."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Classifying:
    """What image and sentence classification have in common."""

    model: SmallViT | Timm | SentenceClassifier
    label_smoothing: Unit = 0.1
    hold_out: Count = 0  # evaluate on so many training examples instead of the test part, to choose settings

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


@checked
@dataclass(frozen=True, kw_only=True)
class ImageTask(_Classifying):
    """Classify images."""

    source: Callable[[], Dataset]
    model: SmallViT | Timm
    size: PositiveInt | None = None  # pixels to resize to
    mean: tuple[float, ...] | None = None  # of each channel, as a pretrained model expects; the data's own if not given
    std: tuple[PositiveFloat, ...] | None = None
    augment: Callable[[Tensor, torch.Generator], Tensor] = field(default_factory=NoAugmentation)
    eval_examples: PositiveInt = 2000  # held-out examples of every evaluation; the last one uses all

    @checked
    def load(self, *, data_fraction: Fraction = 1.0, seed: Seed = 0) -> Loaded:
        """Load the data, with this fraction of the training part."""
        data = self.source()
        normalisation = (self.mean or data.mean, self.std or data.std, self.size)
        train, held = _parts(data.train.labels, self.hold_out)
        test = data.test if held is None else None
        images, labels = data.train.inputs, data.train.labels
        kept = train[_subset(labels[train], data_fraction, seed)]

        def batch(chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
            pixels = normalise(images[kept[chosen]], *normalisation)
            return self.augment(pixels, generator), labels[kept[chosen]]

        def held_out(chosen: Tensor) -> tuple[Tensor, Tensor]:
            if test is not None:
                return normalise(test.inputs[chosen], *normalisation), test.labels[chosen]
            assert held is not None
            return normalise(images[held[chosen]], *normalisation), labels[held[chosen]]

        count = len(test) if test is not None else self.hold_out
        size = 500 if (self.size or images.shape[-1]) <= 64 else 128
        final = InOrder(count, size, held_out)
        return Loaded(
            train=lambda size, seed: Batches(len(kept), size, batch, seed=seed),
            validation=final if self.eval_examples >= count else InOrder(self.eval_examples, size, held_out),
            final=final,
            build=lambda seed: self.model(data, self.size, seed),
            examples=len(kept),
        )


@checked
@dataclass(frozen=True, kw_only=True)
class SentenceTask(_Classifying):
    """Classify sentences."""

    source: Callable[[], TextDataset]
    model: SentenceClassifier
    longest: PositiveInt = 32  # tokens
    eval_examples: PositiveInt = MORE_THAN_ANY
    group_by_length: bool = False  # batches of sentences of similar length: less padding

    @checked
    def load(self, *, data_fraction: Fraction = 1.0, seed: Seed = 0) -> Loaded:
        """Load the data, with this fraction of the training part."""
        data = self.source()
        tokenizer = self.model.tokenizer()
        train, held = _parts(data.train_labels, self.hold_out)
        kept = train[_subset(data.train_labels[train], data_fraction, seed)]
        texts, labels = (data.test_texts, data.test_labels)
        if held is not None:
            texts, labels = [data.train_texts[i] for i in held.tolist()], data.train_labels[held]

        def encode(sentences: list[str], answers: Tensor) -> dict[str, Tensor]:
            tokens = tokenizer(sentences, padding=True, truncation=True, max_length=self.longest, return_tensors="pt")
            return {**tokens, "labels": answers}

        def batch(chosen: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
            where = kept[chosen]
            return encode([data.train_texts[i] for i in where.tolist()], data.train_labels[where])

        def held_out(chosen: Tensor) -> dict[str, Tensor]:
            return encode([texts[i] for i in chosen.tolist()], labels[chosen])

        def lengths(sentences: list[str]) -> Tensor:
            tokens = tokenizer(sentences, truncation=True, max_length=self.longest)
            return torch.tensor([len(ids) for ids in tokens["input_ids"]])

        def first(count: int) -> InOrder:
            """Return the first held-out sentences, by length if asked for, with one of median length at the front."""
            if not self.group_by_length:
                return InOrder(count, 128, held_out)
            order = lengths(texts[:count]).argsort(stable=True).roll(-(count // 2))
            return InOrder(count, 32, lambda chosen: held_out(order[chosen]))

        def training(size: int, seed: int) -> Batches:
            of_train = lengths([data.train_texts[i] for i in kept.tolist()])
            return Batches(len(kept), size, batch, seed=seed, lengths=of_train, grouped=self.group_by_length)

        final = first(len(texts))
        return Loaded(
            train=training,
            validation=final if self.eval_examples >= len(texts) else first(self.eval_examples),
            final=final,
            build=lambda seed: self.model(data.classes, seed),
            examples=len(kept),
        )


def _parts(labels: Tensor, hold_out: int) -> tuple[Tensor, Tensor | None]:
    """Split the training part by a fixed seed into training examples and those that settings are chosen by."""
    if not 0 <= hold_out < len(labels):
        raise ConfigError(
            f"hold_out must be at least 0 and below the number of training examples, got {hold_out}.",
            f"There are {len(labels)} training examples.",
            "leave some to train on.",
        )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return order[hold_out:].sort().values, order[:hold_out] if hold_out else None


def _subset(labels: Tensor, data_fraction: float, seed: int) -> Tensor:
    """Choose a fraction of the examples, the same fraction of every class (at least one each).

    >>> labels = torch.tensor([0, 0, 0, 0, 1, 1])
    >>> labels[_subset(labels, 0.5, seed=0)].tolist()
    [0, 0, 1]
    """
    if data_fraction == 1:
        return torch.arange(len(labels))
    generator = torch.Generator().manual_seed(hash((seed, 0x5A)) & 0x7FFFFFFF)
    chosen = []
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().flatten()
        count = max(1, round(data_fraction * len(members)))
        chosen.append(members[torch.randperm(len(members), generator=generator)[:count]])
    return torch.cat(chosen).sort().values

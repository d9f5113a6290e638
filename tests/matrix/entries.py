"""What the matrix tries students on: a model with tiny random weights, a batch for it, and where its parts are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from segue.sites import Pattern

SOURCES = ("transformers_decoders", "transformers_encoders", "transformers_vision", "timm", "diffusers", "torch", "plain")
VOCABULARY = 60
TOKENS = 8
REAL = (8, 5)  # tokens of each sequence that are not padding


@dataclass(frozen=True)
class Batch:
    """The arguments of one call, and what of them may be varied to see what a model reads."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    tokens: str | int | None = None  # the argument with the tokens: ids (batch, tokens) or features (batch, tokens, width)
    real: Tensor | None = None  # (batch, tokens), False at padding
    patch: int | None = None  # the side of the patches of an image, which is then the argument `tokens`

    def varied(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the same call with changed tokens."""
        assert self.tokens is not None
        if isinstance(self.tokens, int):
            args = list(self.args)
            args[self.tokens] = change(args[self.tokens].clone())
            return dataclasses.replace(self, args=tuple(args))
        return dataclasses.replace(self, kwargs={**self.kwargs, self.tokens: change(self.kwargs[self.tokens].clone())})


@dataclass(frozen=True)
class Entry:
    """A model of a family. `build` takes the number of layers where the model has a choice."""

    name: str
    build: Callable[[int], nn.Module]
    batch: Callable[[], Batch]
    attention: Pattern | None = None  # None where there is none
    mlp: Pattern | None = None
    layers: str | None = None  # the list that a span shortens
    blocks: str | None = None  # where norms and activations are looked for; by default in `layers`
    causal: bool = False
    generates: bool = False
    teach: Callable[[], None] | None = None  # registers its attention, as a user does for code that Segue does not know
    softmax: bool = True  # False where the attention is another operator already, which must be refused and not misread
    part: bool = False  # another part of a model that has an entry already: only its attention is tried

    @property
    def has_softmax(self) -> bool:
        return self.softmax and self.attention is not None

    def model(self, layers: int = 2) -> nn.Module:
        """Build the model with weights that depend on nothing else."""
        torch.manual_seed(0)
        model = self.build(layers)
        scramble_(model)
        return model.eval()


def not_softmax(entry: Entry) -> Entry:
    return dataclasses.replace(entry, softmax=False)


@torch.no_grad()
def scramble_(model: nn.Module) -> None:
    """Leave no tensor at its initial constant: zero heads, gates and biases would hide mistakes."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            fan_in = parameter[0].numel() if parameter.dim() > 1 and parameter.numel() else 100
            parameter.add_(torch.randn_like(parameter), alpha=fan_in**-0.5)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def real_tokens(left: bool = False) -> Tensor:
    mask = torch.arange(TOKENS) < torch.tensor(REAL)[:, None]
    return mask.flip(1) if left else mask


def token_ids() -> Tensor:
    return torch.randint(5, VOCABULARY, (len(REAL), TOKENS), generator=generator())


def text(**others: Any) -> Batch:
    """Token ids, padded on the right."""
    mask = real_tokens()
    return Batch(kwargs={"input_ids": token_ids(), "attention_mask": mask.long(), **others}, tokens="input_ids", real=mask)


def unpadded(**others: Any) -> Batch:
    return Batch(kwargs={"input_ids": token_ids(), **others}, tokens="input_ids")


def features(width: int, tokens: int = TOKENS) -> Tensor:
    return torch.randn(len(REAL), tokens, width, generator=generator())


def pixels(size: int = 32, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, size, size, generator=generator())


def images(size: int = 32, patch: int | None = 8) -> Batch:
    """Images as the only argument, as timm and torchvision take them."""
    return Batch((pixels(size),), tokens=0 if patch else None, patch=patch)


def named_images(size: int = 32, patch: int | None = 8, **others: Any) -> Batch:
    """Images as Hugging Face takes them."""
    return Batch(kwargs={"pixel_values": pixels(size), **others}, tokens="pixel_values" if patch else None, patch=patch)


@cache
def all_entries() -> dict[str, Entry]:
    """Return every entry by its name."""
    found: dict[str, Entry] = {}
    for source in SOURCES:
        for entry in import_module(f"tests.matrix.entries_{source}").ENTRIES:
            assert entry.name not in found, entry.name
            found[entry.name] = entry
    return found

"""Signals: the inputs on which damage is measured, which of their predictions count, and how much."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from segue.border import NotNegative, PositiveInt, Seed, checked
from segue.core.blending import padding_mask
from segue.errors import DataError


@checked
@dataclass(frozen=True, kw_only=True)
class Signal:
    """Batches, a mask of the predictions that count in each (None: all of them), and the weight of the signal."""

    name: str
    batches: Sequence[Any]
    masks: Sequence[Tensor | None]
    weight: NotNegative = 1.0


def on_batches(batches: Iterable[Any], name: str = "batches", weight: float = 1.0) -> Signal:
    """Measure on batches as they are, without padding."""
    held = list(batches)
    if not held:
        raise DataError("there are no batches.", "The iterable yields nothing.", "give one that yields at least one batch.")
    return Signal(name=name, batches=held, masks=[padding_mask(batch) for batch in held], weight=weight)


@checked
def recall(
    model: nn.Module,
    *,
    weight: NotNegative = 1.0,
    batches: PositiveInt = 2,
    rows: PositiveInt = 8,
    pairs: PositiveInt = 16,
    seed: Seed = 0,
) -> Signal:
    """Measure retrieval in a causal model: pairs of random tokens (key, value), then the keys again in another order.

    After each repeated key the value is to be predicted; only these predictions count, because generic text hardly needs them.
    """
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(vocabulary, int) or vocabulary < 4 * pairs:
        raise DataError(
            "recall needs a language model with a vocabulary.",
            f"{type(model).__name__} has {vocabulary!r} tokens, and {pairs} pairs take {4 * pairs} to be distinct.",
            "leave recall out, or use fewer pairs. Nothing was changed.",
        )
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    made, masks = [], []
    for _ in range(batches):
        drawn = torch.stack([torch.randperm(vocabulary, generator=generator)[: 2 * pairs] for _ in range(rows)])
        told = drawn.reshape(rows, pairs, 2)
        order = torch.rand(rows, pairs, generator=generator).argsort(1)
        asked = told.gather(1, order[..., None].expand(-1, -1, 2))
        made.append({"input_ids": torch.cat([told.flatten(1), asked.flatten(1)], dim=1).to(device)})
        places = torch.zeros(rows, 4 * pairs, dtype=torch.long)
        places[:, 2 * pairs :: 2] = 1  # at a repeated key the next token is its value
        masks.append(places.to(device))
    return Signal(name="recall", batches=made, masks=masks, weight=weight)


@checked
def augmented(
    batches: Iterable[Any], *, weight: NotNegative = 1.0, shift: float = 0.1, noise: float = 0.1, seed: Seed = 0
) -> Signal:
    """Measure on augmented images: half of them mirrored, all of them moved and with noise."""
    generator = torch.Generator().manual_seed(seed)

    def change(x: Tensor) -> Tensor:
        if x.dim() != 4 or not x.is_floating_point():
            return x
        mirrored = torch.rand(len(x), generator=generator) < 0.5
        moved = torch.where(mirrored[:, None, None, None].to(x.device), x.flip(-1), x)
        rows, columns = (
            ((torch.rand(2, generator=generator) * 2 - 1) * shift * torch.tensor(x.shape[-2:])).round().int().tolist()
        )
        moved = torch.roll(moved, (rows, columns), dims=(-2, -1))
        drawn = torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x)
        return moved + noise * x.std() * drawn

    held = list(batches)
    made = tree_map_only(Tensor, change, held)
    if all(_same(a, b) for a, b in zip(held, made, strict=True)):
        raise DataError(
            "augmented() needs images.",
            "No batch has a floating tensor of four dimensions.",
            "leave it out. Nothing was changed.",
        )
    return on_batches(made, "augmented images", weight)


def _same(a: Any, b: Any) -> bool:
    from segue.core.blending import tensors

    return all(x is y for x, y in zip(tensors(a), tensors(b), strict=True))

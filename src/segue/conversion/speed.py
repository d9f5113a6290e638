"""How fast models generate and read, and how much their caches hold, side by side in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 12  # single tokens that are generated at each context


@torch.no_grad()
def decoding(models: Mapping[str, Any], contexts: Sequence[int], *, steps: int = STEPS) -> list[dict[str, Any]]:
    """Generate single tokens after contexts of so many tokens, the models in turn; medians.

    Each row holds the model's name, the context, tokens per second, seconds to read the context, and bytes of its cache.
    """
    rows = []
    for context in contexts:
        readers = {name: _Reader(model, context) for name, model in models.items()}
        for reader in readers.values():  # the first token is not timed
            reader.step()
        times: dict[str, list[float]] = {name: [] for name in readers}
        for _ in range(steps):
            for name, reader in readers.items():
                times[name].append(reader.step())
        rows += [
            {
                "model": name,
                "context": context,
                "tokens_per_second": 1 / statistics.median(times[name]),
                "seconds_to_read": reader.seconds_to_read,
                "cache_bytes": cache_bytes(reader.cache),
            }
            for name, reader in readers.items()
        ]
    return rows


@torch.no_grad()
def reading(models: Mapping[str, Any], lengths: Sequence[int], *, steps: int = STEPS) -> list[dict[str, Any]]:
    """Read one text of so many tokens as a whole, the models in turn; medians."""
    rows = []
    for length in lengths:
        times: dict[str, list[float]] = {name: [] for name in models}
        for turn in range(steps + 1):
            for name, model in models.items():
                begun = time.perf_counter()
                model(input_ids=_ids(model, length))
                if turn:  # the first is not timed
                    times[name].append(time.perf_counter() - begun)
        rows += [
            {"model": name, "context": length, "tokens_per_second": length / statistics.median(each)}
            for name, each in times.items()
        ]
    return rows


class _Reader:
    """A model that has read a context and generates one token at a time."""

    def __init__(self, model: nn.Module, context: int) -> None:
        self.model = model
        begun = time.perf_counter()
        output = model(input_ids=_ids(model, context), use_cache=True)
        self.seconds_to_read = time.perf_counter() - begun
        self.cache = output.past_key_values
        self.token = output.logits[:, -1:].argmax(-1)

    def step(self) -> float:
        begun = time.perf_counter()
        output = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True)
        self.token = output.logits[:, -1:].argmax(-1)
        self.token.tolist()  # waits for the device
        return time.perf_counter() - begun


def cache_bytes(cache: Any) -> int:
    """Return how many bytes the layers of a Hugging Face cache hold."""
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in _tensors(vars(layer).values()))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _ids(model: Any, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, model.config.vocab_size, (1, length), generator=generator)
    return ids.to(next(model.parameters()).device)

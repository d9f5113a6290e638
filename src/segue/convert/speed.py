"""Speed and memory of models that generate or read, measured in turn in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from segue.diagnostics.counting import PeakBytes, cache_bytes

STEPS = 12  # timed tokens, or passes, of each model


@torch.no_grad()
def decoding(models: Mapping[str, Any], contexts: Sequence[int], *, steps: int = STEPS) -> list[dict[str, Any]]:
    """Generate single tokens after contexts of the given lengths, the models in turn; medians and quartiles.

    Each row has the name of the model, the context, tokens per second, seconds to read the context, and bytes of the cache.
    """
    rows = []
    for context in contexts:
        decoders = {name: _Decoder(model, context) for name, model in models.items()}
        times = _in_turn({name: decoder.step for name, decoder in decoders.items()}, steps)
        for name, decoder in decoders.items():
            held = {"seconds_to_read": decoder.seconds_to_read, "cache_bytes": cache_bytes(decoder.cache)}
            rows.append({"model": name, "context": context, **_per_second(1, times[name]), **held})
    return rows


@torch.no_grad()
def reading(
    models: Mapping[str, Any], sizes: Sequence[int], *, steps: int = STEPS, make: Callable[[Any, int], Any] | None = None
) -> list[dict[str, Any]]:
    """Read one text of every size, or what `make` returns for it; the models in turn, medians and quartiles.

    The rows are those of `decoding` without a cache; "context" is the size.
    """
    make = make or (lambda model, length: {"input_ids": _ids(model, length)})
    rows = []
    for size in sizes:
        reads = {name: partial(_read, model, make(model, size)) for name, model in models.items()}
        times = _in_turn(reads, steps)
        rows += [{"model": name, "context": size, **_per_second(size, times[name])} for name in models]
    return rows


@torch.no_grad()
def peak_bytes(model: nn.Module, context: int) -> int:
    """Return the peak bytes of live tensors, besides the weights, while a context is read and one token is generated.

    Counted, not sampled: the same on every machine. Memory inside an operator is not counted.
    """
    memory = PeakBytes([*model.parameters(), *model.buffers()])
    with memory:
        _Decoder(model, context).step()
    return memory.peak


def _in_turn(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time calls in turn, so that load on the machine affects all of them; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            begun = time.perf_counter()
            work()
            if turn:
                times[name].append(time.perf_counter() - begun)
    return times


def _per_second(count: int, seconds: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return {"tokens_per_second": count / middle, "quartiles": [count / high, count / low]}


def _read(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    model(**inputs)
    _wait(model)


class _Decoder:
    """A model that has read a context and generates one token at a time."""

    def __init__(self, model: nn.Module, context: int) -> None:
        self.model = model
        begun = time.perf_counter()
        output = model(input_ids=_ids(model, context), use_cache=True)
        self.cache = output.past_key_values
        self.token = output.logits[:, -1:].argmax(-1)
        _wait(model)
        self.seconds_to_read = time.perf_counter() - begun

    def step(self) -> None:
        output = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True)
        self.token = output.logits[:, -1:].argmax(-1)
        _wait(self.model)


def _ids(model: Any, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, model.config.vocab_size, (1, length), generator=generator)
    return ids.to(next(model.parameters()).device)


def _wait(model: nn.Module) -> None:
    """Wait until the model's device is idle."""
    if (device := next(model.parameters()).device).type != "cpu":
        torch.accelerator.synchronize(device)

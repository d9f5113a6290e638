"""The stream of batches: epoch after epoch, from any iterable, in the same order after a resume, split among processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from segue.core import randomness
from segue.core.blending import tensors
from segue.errors import DataError


class Stream:
    """Yield batches without end, from the first or from any later one.

    Whatever shuffles with the global random states (a DataLoader) gets states made of (seed, epoch) when an epoch starts, so
    a resumed run sees the batches in the order of an uninterrupted one; those before it are read again and skipped.
    """

    def __init__(self, batches: Iterable[Any], *, seed: int = 0) -> None:
        self.batches = batches
        self.seed = seed
        self.per_epoch = _length(batches)
        self.epoch = 0
        self.taken = 0  # of this epoch
        self._iterator: Iterator[Any] | None = None
        self._once = isinstance(batches, Iterator)

    def skip(self, count: int) -> None:
        """Skip this many batches."""
        if self.per_epoch is not None and not self._once:
            self.epoch, count = divmod(count, self.per_epoch)
        for _ in range(count):
            next(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._iterator is not None:
            for batch in self._iterator:
                self.taken += 1
                return batch
            self.epoch += 1
        return self._first()

    def _first(self) -> Any:
        """Start an epoch and return its first batch, whose request is what makes a DataLoader shuffle."""
        if self._once and self.epoch > 0:
            raise DataError(
                "the training needs more batches than there are.",
                f"They come from a generator, which ended after {self.taken} batches and cannot be read again.",
                "give something that can be read more than once (a DataLoader, a list), or fewer steps.",
            )
        self.taken = 0
        for source in (self.batches, getattr(self.batches, "sampler", None)):
            if callable(set_epoch := getattr(source, "set_epoch", None)):
                set_epoch(self.epoch)
        with randomness.kept():
            randomness.seed_all(self.seed, self.epoch, 0x5E6)
            self._iterator = iter(self.batches)
            for batch in self._iterator:
                self.taken = 1
                return batch
        raise DataError("there are no batches.", "The iterable yields nothing.", "give one that yields at least one batch.")


def part_for(batch: Any, rank: int, world: int) -> tuple[Any, float]:
    """Return a process' part of a batch and its weight in the mean over processes.

    >>> import torch
    >>> part_for(torch.arange(5), rank=0, world=2)
    (tensor([0, 1, 2]), 1.2)
    """
    rows = size(batch)
    if world == 1 or rows < world:
        return batch, 1.0
    cuts = [-(-rows * i // world) for i in range(world + 1)]
    begin, end = cuts[rank], cuts[rank + 1]

    def cut(tensor: Tensor) -> Tensor:
        return tensor[begin:end] if tensor.dim() and len(tensor) == rows else tensor

    return mapped(cut, batch), (end - begin) * world / rows


def size(batch: Any) -> int:
    """Return the number of examples in a batch: the length of its first tensor.

    >>> import torch
    >>> size({"ids": torch.zeros(8, 3)})
    8
    """
    for tensor in tensors(batch):
        if tensor.dim():
            return len(tensor)
    return 1


def mapped(change: Any, batch: Any) -> Any:
    """Apply a function to every tensor of a batch."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {name: mapped(change, value) for name, value in batch.items()}
    if isinstance(batch, Mapping):  # a Hugging Face BatchEncoding
        return type(batch)({name: mapped(change, value) for name, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(change, value) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(mapped(change, value) for value in batch)
    return batch


def _length(batches: Any) -> int | None:
    try:
        return len(batches)
    except TypeError:
        return None

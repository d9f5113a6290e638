"""The stream of batches: epoch after epoch, from any iterable, in the same order after a resume, split among processes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from segue.core import randomness, tensor_files
from segue.core.blending import tensors
from segue.errors import DataError

HASHED = 1 << 16  # numbers of each tensor of a batch
POOL = 50  # batches, within which examples are sorted by length


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
        self.position = 0  # the number of batches taken since the run began
        self.taken = 0  # of this epoch
        self.first = ""  # the fingerprint of the first batch of the epoch that began last
        self._iterator: Iterator[Any] | None = None
        self._once = isinstance(batches, Iterator)

    def skip(self, count: int) -> None:
        """Skip this many batches, in such a way that `first` is known afterwards."""
        position = self.position + count
        if self.per_epoch is not None and not self._once:
            ended = count > 0 and count % self.per_epoch == 0
            self.epoch, count = divmod(count, self.per_epoch)
            if ended:  # no batch of the next epoch is read yet
                self.epoch -= 1
                self._first()
                self.epoch, self.taken, self._iterator = self.epoch + 1, 0, None
        for _ in range(count):
            next(self)
        self.position = position

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.position += 1
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
                self.taken, self.first = 1, fingerprint(batch)
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


def fingerprint(batch: Any) -> str:
    """Describe the tensors of a batch by their shapes, and hash the first numbers of each.

    >>> import torch
    >>> fingerprint({"ids": torch.zeros(8, 3)})
    '2ea9ab91, float32 (8, 3)'
    """
    digest, shapes = hashlib.sha256(), []
    for tensor in tensors(batch):
        shapes.append(f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch."))
        if tensor.layout == torch.strided and not tensor.is_meta:
            digest.update(tensor_files.memory(tensor.detach().reshape(-1)[:HASHED].cpu().contiguous()))
    return ", ".join([digest.hexdigest()[:8], *shapes])


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


class Batches:
    """Shuffled batches that depend on (seed, epoch) alone; what does not fill a batch is left out.

    With `grouped`, a batch has examples of similar length, so that less of it is padding.

    >>> batches = Batches(5, 2, lambda chosen, generator: chosen.tolist(), seed=0)
    >>> len(batches), len({*sum(batches, [])})
    (2, 4)
    """

    def __init__(
        self,
        count: int,
        size: int,
        make: Callable[[Tensor, torch.Generator], Any],
        *,
        seed: int,
        lengths: Tensor | None = None,
        grouped: bool = False,
    ) -> None:
        self.count = count
        self.size = min(size, count)
        self.make = make  # (which examples, the batch's own randomness) -> batch
        self.seed = seed
        self.lengths = lengths  # of the examples
        self.grouped = grouped
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.epoch = epoch

    def in_order(self) -> InOrder:
        """Return all examples in their order, each batch with the same randomness."""
        return InOrder(self.count, self.size, lambda chosen: self.make(chosen, torch.Generator().manual_seed(self.seed)))

    def typical(self) -> Any:
        """Return the batch whose length is nearest to the mean of this epoch, or the first if lengths are unknown."""
        chosen, generator = self._chosen()
        index = 0
        if self.lengths is not None:
            longest = self.lengths[chosen].amax(1).double()
            index = int((longest - longest.mean()).abs().argmin())
        return self.make(chosen[index], generator)

    def __len__(self) -> int:
        return self.count // self.size

    def __iter__(self) -> Iterator[Any]:
        chosen, generator = self._chosen()
        for examples in chosen:
            yield self.make(examples, generator)

    def _chosen(self) -> tuple[Tensor, torch.Generator]:
        """Choose the examples of each batch of this epoch: (batches, size)."""
        generator = torch.Generator().manual_seed(hash((self.seed, self.epoch)) & 0x7FFFFFFF)
        order = torch.randperm(self.count, generator=generator)[: len(self) * self.size]
        if self.lengths is None or not self.grouped:
            return order.view(-1, self.size), generator
        by_length = [pool[self.lengths[pool].argsort(stable=True)] for pool in torch.split(order, POOL * self.size)]
        chosen = torch.cat(by_length).view(-1, self.size)
        return chosen[torch.randperm(len(chosen), generator=generator)], generator


class InOrder:
    """Batches in a fixed order, all of them, for evaluation."""

    def __init__(self, count: int, size: int, make: Callable[[Tensor], Any]) -> None:
        self.count = count
        self.size = size
        self.make = make

    def __len__(self) -> int:
        return math.ceil(self.count / self.size)

    def __iter__(self) -> Iterator[Any]:
        for begin in range(0, self.count, self.size):
            yield self.make(torch.arange(begin, min(begin + self.size, self.count)))

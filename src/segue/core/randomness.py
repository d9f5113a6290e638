"""The random states of a process: Python's, torch's and, where it is loaded, numpy's."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

MERSENNE = 624  # words in the state of Python's and NumPy's generator


def states() -> dict[str, Any]:
    """Return all states as plain data and tensors."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {"python": [version, list(words), gauss], "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state_all()
    if numpy := sys.modules.get("numpy"):
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        found["numpy"] = [name, keys.tolist(), position, has_gauss, cached]
    return found


def restore(found: dict[str, Any]) -> None:
    """Put states back."""
    version, words, gauss = found["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(found["torch"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(found["cuda"])
    if "numpy" in found and (numpy := sys.modules.get("numpy")):
        name, keys, *rest = found["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


def require_valid(found: Any) -> None:
    """Refuse states that a file cannot rightly hold: some generators take any numbers, and cut them to their size."""
    names = set(found)
    if not {"python", "torch"} <= names <= {"python", "torch", "numpy", "cuda"}:
        raise ValueError(f"it has random states of {sorted(map(str, names))!s:.80}")
    version, words, gauss = found["python"]
    if not (version == random.getstate()[0] and _are_words(words[:-1]) and _is_whole(words[-1], MERSENNE + 1)):
        raise ValueError("the random state of Python is none")
    if not (gauss is None or _is_finite(gauss)):
        raise ValueError(f"the random state of Python has the normal number {gauss!r:.40}")
    torch.Generator().set_state(found["torch"])
    for state in found.get("cuda", []):
        if not (isinstance(state, torch.Tensor) and state.dtype == torch.uint8 and state.dim() == 1):
            raise ValueError("a random state of CUDA is none")
    if "numpy" in found:
        name, keys, position, has_gauss, cached = found["numpy"]
        if not (name == "MT19937" and _are_words(keys) and _is_whole(position, MERSENNE + 1)):
            raise ValueError("the random state of NumPy is none")
        if not (_is_whole(has_gauss, 2) and _is_finite(cached) and (has_gauss or cached == 0)):
            raise ValueError(f"the random state of NumPy has {has_gauss!r:.40} normal numbers, {cached!r:.40}")


def _are_words(found: Any) -> bool:
    return len(found) == MERSENNE and all(_is_whole(word, 2**32) for word in found)


def _is_whole(number: Any, below: int) -> bool:
    return type(number) is int and 0 <= number < below


def _is_finite(number: Any) -> bool:
    return type(number) is float and math.isfinite(number)


def states_of_every_rank() -> list[dict[str, Any]]:
    """Gather the states of all processes: each rank draws its own dropout."""
    if not _distributed():
        return [states()]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, states())
    return gathered


def restore_this_rank(every_rank: list[dict[str, Any]]) -> None:
    """Put the states of this process back; one that was not there before keeps its own."""
    rank = torch.distributed.get_rank() if _distributed() else 0
    if rank < len(every_rank):
        restore(every_rank[rank])


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def seed_all(*numbers: int) -> None:
    """Make all states depend on these numbers alone.

    >>> seed_all(1, 2)
    >>> first = random.random()
    >>> seed_all(1, 2)
    >>> random.random() == first
    True
    """
    mixed = numbers[0] if len(numbers) == 1 else hash(numbers) & 0x7FFFFFFF  # of numbers, so the same in every process
    random.seed(mixed)
    torch.manual_seed(mixed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(mixed & 0xFFFFFFFF)


@contextmanager
def kept() -> Iterator[None]:
    """Let a block draw random numbers, and continue afterwards as if it had not."""
    before = states()
    try:
        yield
    finally:
        restore(before)

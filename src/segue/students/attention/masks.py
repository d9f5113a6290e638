"""Masks: a student honours padding and causality, and refuses a mask that says more."""

from __future__ import annotations

import torch
from torch import Tensor

from segue.errors import StudentError

HIDDEN = -1e4  # what an additive mask adds where a token is hidden, or less


class Understanding:
    """Look into the first mask of each shape that a student is called with, outside compiled code."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()

    def __call__(self, mask: Tensor | None, keep: Tensor | None, causal: bool) -> None:
        if torch.compiler.is_compiling() or mask is None or mask.shape[-2] == 1:  # one row says only which tokens are kept
            return
        shape = tuple(mask.shape[-2:])
        if shape not in self.shapes:
            refuse_more(mask, keep, causal)
            self.shapes.add(shape)


def refuse_more(mask: Tensor, keep: Tensor | None, causal: bool) -> None:
    """Refuse a mask that says more than padding and causality: an operator could not honour it."""
    biased = False
    if mask.dtype != torch.bool:
        hidden = mask <= HIDDEN
        biased, mask = bool(((mask != 0) & ~hidden).any()), ~hidden
    queries, keys = mask.shape[-2:]
    expected = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=mask.device)
    if causal:
        expected = expected.tril(keys - queries)
    if keep is not None:
        expected = expected & keep[:, None, None, :]
    if biased or (mask != expected).any():
        raise hides_more()


def hides_more() -> StudentError:
    """Say that a mask means more than padding and causality."""
    return StudentError(
        "an attention student was called with a mask.",
        "It hides more than padding and the future (packed sequences, a window, or pairs of tokens), "
        "which this operator cannot honour.",
        "leave such masks out, or keep softmax attention at these sites.",
    )

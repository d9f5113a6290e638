"""Rotations of queries and keys besides that of Llama."""

from __future__ import annotations

import torch
from torch import Tensor


def turn(x: Tensor, by: Tensor) -> Tensor:
    """Rotate neighbouring features, (batch, heads, tokens, head size), by complex numbers, ((batch,) tokens, head size / 2)."""
    numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    by = by[:, None] if by.dim() == 3 else by[: x.shape[2]]
    return torch.view_as_real(numbers * by).flatten(-2).type_as(x)

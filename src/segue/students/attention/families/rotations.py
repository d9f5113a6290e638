"""Rotations of queries and keys besides that of Llama, and that of Llama for one token in few operations."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from segue.students.attention.spec import rotate


def turn(x: Tensor, by: Tensor) -> Tensor:
    """Rotate neighbouring features, (batch, heads, tokens, head size), by complex numbers, ((batch,) tokens, head size / 2)."""
    numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    by = by[:, None] if by.dim() == 3 else by[: x.shape[2]]
    return torch.view_as_real(numbers * by).flatten(-2).type_as(x)


def rotate_token(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the queries and keys of one token together, bit for bit as `rotate` does."""
    q, k = rotate_joined(torch.cat([q, k], dim=1), cos, sin).split_with_sizes([q.shape[1], k.shape[1]], 1)
    return q, k


def rotate_joined(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Do the same where they are one tensor."""
    cos, sin = _angles(cos, sin)
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


class _Angles:
    """Make cos and sin what `rotate_token` takes, once for the layers that share them: sin is negative in its first half."""

    def __init__(self) -> None:
        self.last: tuple[tuple[Any, ...], tuple[Tensor, Tensor]] | None = None  # in one piece, since threads share it

    def __call__(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self.last is not None:
            given, made = self.last
            if given[0]() is cos and given[1]() is sin and given[2:] == (cos._version, sin._version):
                return made
        first, second = sin[:, None].chunk(2, dim=-1)
        made = cos[:, None], torch.cat([-first, second], dim=-1)
        if not (cos.is_inference() or sin.is_inference()):  # nobody counts when those change
            self.last = (weakref.ref(cos), weakref.ref(sin), cos._version, sin._version), made
        return made


_angles = _Angles()


def is_by_halves(rotation: Callable[..., Any]) -> bool:
    """Try a model's own function: return whether it rotates one token as `rotate` does, bit for bit, also in half precision."""
    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, cos, sin = (torch.randn(2, n, 1, 8, generator=draw, device="cpu").to(dtype) for n in (4, 2, 1, 1))
        cos, sin = cos[:, 0], sin[:, 0]
        try:
            found = rotation(q, k, cos, sin)
        except Exception:  # it takes something else
            return False
        if not (torch.equal(found[0], rotate(q, cos, sin)) and torch.equal(found[1], rotate(k, cos, sin))):
            return False
    return True

"""Arrangements: how vision models hold their tokens, and back: (batch, tokens, width) is what operators mix.

Attention inside a block or a window is still attention: there a sequence is one block or window, and a batch has many of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from segue.students.attention.spec import Groups

Back: TypeAlias = Callable[[Tensor], Tensor]
REGIONS = 4  # of a shifted window at most: it is cut by the edges of the image


class Arranged(NamedTuple):
    """Tokens as a sequence, how outputs return, and which tokens see each other where a window holds several regions."""

    x: Tensor  # (batch, tokens, width)
    back: Back
    groups: Groups | None = None


class Window(NamedTuple):
    """Windows that a module cuts itself, and by how much it shifts them."""

    size: tuple[int, int]
    shift: tuple[int, int] = (0, 0)


def arrange(x: Tensor, kind: str, window: Window | None = None, size: tuple[int, int] | None = None) -> Arranged:
    """Return the tokens of an arrangement as sequences."""
    shape = x.shape
    if kind == "windows" and window is not None:
        grid = x if size is None else x.reshape(shape[0], *size, -1)
        cut = cut_windows(grid, window)
        return cut if size is None else cut._replace(back=lambda y: cut.back(y).flatten(1, 2))
    if x.dim() != 4 or kind == "tokens":
        return Arranged(x, lambda y: y)
    if kind == "channels first":  # (batch, width, height, width of the image)
        return Arranged(x.flatten(2).transpose(1, 2), lambda y: y.transpose(1, 2).reshape(shape[0], -1, *shape[2:]))
    if kind == "blocks":  # (batch, blocks, tokens, width)
        return Arranged(x.flatten(0, 1), lambda y: y.reshape(*shape[:2], *y.shape[1:]))
    return Arranged(x.flatten(1, 2), lambda y: y.reshape(*shape[:3], -1))  # (batch, height, width of the image, width)


def example(x: Tensor, kind: str, window: Window | None = None) -> Tensor:
    """Arrange (batch, tokens, width) as a module of this kind takes it, for a proof; two windows where it cuts them."""
    batch, tokens, width = x.shape
    rows = max(n for n in range(1, math.isqrt(tokens) + 1) if tokens % n == 0)
    if kind == "windows" and window is not None:
        tall, wide = window.size
        grid = x[:, torch.arange(2 * tall * 2 * wide, device=x.device) % tokens]
        ramp = torch.linspace(0.5, 1.5, grid.shape[1], device=x.device, dtype=x.dtype)[:, None]
        return (grid * ramp).view(batch, 2 * tall, 2 * wide, width)
    if kind == "channels first":
        return x.transpose(1, 2).reshape(batch, width, rows, tokens // rows)
    if kind == "blocks":
        return torch.stack([x, x.flip(0)], dim=1)
    return x if kind == "tokens" else x.view(batch, rows, tokens // rows, width)


def cut_windows(x: Tensor, window: Window) -> Arranged:
    """Cut (batch, height, width of the image, width) into windows, shifted around the edges, padded with zeros."""
    batch, height, width, _ = x.shape
    tall, wide = window.size
    x = F.pad(x, (0, 0, 0, -width % wide, 0, -height % tall))
    rows, columns = x.shape[1] // tall, x.shape[2] // wide
    shift = tuple(by if count > 1 else 0 for by, count in zip(window.shift, (rows, columns), strict=True))
    shifted = any(shift)
    if shifted:
        x = x.roll((-shift[0], -shift[1]), (1, 2))

    def cut(y: Tensor) -> Tensor:
        return y.reshape(-1, rows, tall, columns, wide, y.shape[-1]).transpose(2, 3).reshape(-1, tall * wide, y.shape[-1])

    def back(y: Tensor) -> Tensor:
        y = y.reshape(batch, rows, columns, tall, wide, -1).transpose(2, 3).reshape(batch, rows * tall, columns * wide, -1)
        y = y.roll(shift, (1, 2)) if shifted else y
        return y[:, :height, :width].contiguous()

    if not shifted:
        return Arranged(cut(x), back)
    down = torch.arange(x.shape[1], device=x.device) >= x.shape[1] - shift[0]  # came around the edge
    right = torch.arange(x.shape[2], device=x.device) >= x.shape[2] - shift[1]
    region = 2 * down[:, None] + right[None, :].long()
    return Arranged(cut(x), back, Groups(cut(region[None, :, :, None]).squeeze(-1).repeat(batch, 1), REGIONS))


def groups_in(mask: Tensor, batch: int) -> Groups:
    """Read a mask over the pairs of tokens in each window, (windows, tokens, tokens), as the regions that see each other."""
    seen = mask if mask.dtype == torch.bool else mask > -100
    first = seen.byte().argmax(-1)  # of the tokens that each one sees; regions see the same
    begins = first == torch.arange(first.shape[1], device=mask.device)
    number = (begins.cumsum(1) - 1).gather(1, first)
    return Groups(number.repeat(batch // mask.shape[0], 1), REGIONS)

"""Sliding window: softmax attention to the neighbours and to a few global tokens (the Longformer pattern)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from segue.students.attention import Operator, positive
from segue.students.geometry import Geometry
from segue.students.mixers.blocks import distances, join, neighbours, reach, split, within
from segue.students.mixing import Mixer, every_head, softmax_where

SMALLEST_BLOCK = 64  # so that narrow windows still make products worth their overhead


class SlidingWindowMixer(Mixer):
    """Softmax over the tokens less than `window` away, and over the first `global_tokens`, which themselves see everything."""

    can_be_causal = True

    def __init__(self, window: int, global_tokens: int, scale: float) -> None:
        super().__init__()
        self.window, self.global_tokens, self.scale = window, global_tokens, scale

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool) -> Tensor:
        heads, tokens = q.shape[1], q.shape[2]
        k, v = every_head(k, heads), every_head(v, heads)
        q = q * self.scale
        if keep is None:
            keep = torch.ones(q.shape[0], tokens, dtype=torch.bool, device=q.device)
        first = min(self.global_tokens, tokens)
        local = self._local(q, k, v, keep, first, causal)
        if not first:
            return local
        seen = keep[:, None, None, :]
        if causal:
            seen = seen & torch.ones(first, tokens, dtype=torch.bool, device=q.device).tril()
        whole = softmax_where(q[:, :, :first] @ k.transpose(-1, -2), seen) @ v
        return torch.cat([whole, local[:, :, first:]], dim=2)

    def _local(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, first: int, causal: bool) -> Tensor:
        tokens = q.shape[2]
        size = min(max(self.window, SMALLEST_BLOCK), tokens)
        sides = reach(tokens, size, causal)
        near = within(self.window, distances(size, sides, q.device), causal)
        position = torch.arange(tokens, device=q.device)
        local_keys = (keep & (position >= first))[:, None, :, None]  # global keys are seen through their own columns
        seen = neighbours(split(local_keys, size), sides).transpose(-1, -2) & near
        scores = split(q, size) @ neighbours(split(k, size), sides).transpose(-1, -2)
        values = neighbours(split(v, size), sides)  # (batch, heads, blocks, keys, head size)
        if not first:
            return join(softmax_where(scores, seen) @ values, tokens)
        everywhere = split(q, size) @ k[:, :, None, :first].transpose(-1, -2)
        theirs = keep[:, None, None, None, :first].expand(-1, -1, *everywhere.shape[2:])
        weights = softmax_where(torch.cat([scores, everywhere], -1), torch.cat([seen.expand_as(scores[:, :1]), theirs], -1))
        local, theirs = weights[..., :-first], weights[..., -first:]
        return join(local @ values + theirs @ v[:, :, None, :first], tokens)


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Operator):
    """Softmax attention to the tokens less than `window` away and to the first `global_tokens` of the sequence.

    In a causal model a token sees itself and the `window - 1` before it. Unlike Longformer, global tokens use the same
    projections as the others.
    """

    window: int = 64
    global_tokens: int = 1

    def mixer(self, geometry: Geometry) -> Mixer:
        global_tokens = self.global_tokens and positive("global_tokens", self.global_tokens)
        return SlidingWindowMixer(positive("window", self.window), global_tokens, geometry.logit_scale)

"""Sliding window: softmax attention to the neighbours and to the first tokens, the sinks (the pattern of Longformer)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from segue.border import Count, PositiveInt, checked
from segue.students.attention.mixer import (
    Mixer,
    Sinks,
    State,
    additive_mask,
    full_mask,
    group_heads,
    masked_softmax,
    repeat_heads,
    softmax_of,
)
from segue.students.attention.mixers.blocks import band, join, split, within
from segue.students.attention.mixers.near import NearKeys, Slots, WindowMixer
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec

__all__ = ["SlidingWindow"]


class SlidingWindowMixer(WindowMixer):
    """Softmax over the tokens less than `window` away, and over the first `sink_tokens`, which themselves see everything."""

    supports_reduction = True
    honours = frozenset({"bias", "softcap", "sinks", "window"})
    branches = ("sinks", "window")

    def __init__(
        self, window: int, sink_tokens: int, scale: float, softcap: float | None = None, sinks: Tensor | None = None
    ) -> None:
        super().__init__(window, sink_tokens)
        self.scale, self.softcap = scale, softcap
        self.sinks = None if sinks is None else Sinks(sinks)  # the teacher's learned logits, not the first tokens

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool, bias: Tensor | None = None
    ) -> Tensor:
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        q = q * self.scale
        near = NearKeys(q.shape[2], token_mask, q.device, self.window, self.sink_tokens, causal)
        bias = None if bias is None else bias.expand(-1, -1, q.shape[2], k.shape[2])
        local = self._local(q, k, v, near, bias)
        if causal or not near.sinks or self.ablated == "sinks":
            return local
        first, mask = near.first, full_mask(k) if token_mask is None else token_mask
        added = None if bias is None else first.of(bias.expand(q.shape[0], -1, -1, -1))
        rows = self._weights(first.of(q) @ k.transpose(-1, -2), mask[:, None, None, :], added) @ v
        return local.scatter(2, first.positions[:, None, :, None].expand_as(rows), rows)

    def mix_reduced(
        self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, places: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Mix with the keys around each query's place; they are few, so that a mask hides the others."""
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        key, place = torch.arange(k.shape[2], device=k.device), places[:, None]
        to_first = torch.minimum(key, place) < self.sink_tokens
        near, left = within(self.window, key - place, causal=False) | to_first, self._part(to_first)
        visible = near if left is None else near & left
        if token_mask is not None:
            visible = visible & token_mask[:, None, None]
        return self._weights(q * self.scale @ k.transpose(-1, -2), visible, bias) @ v

    def mix_chunk(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> Tensor:
        slots, heads = self._join(k, v, token_mask, state), q.shape[1]
        k, v = repeat_heads(slots.k, heads), repeat_heads(slots.v, heads)
        return self._weights(q * self.scale @ k.transpose(-1, -2), self._seen(slots)) @ v

    def step(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        if token_mask is not None or "mask" in state or self.ablated is not None:
            return super().step(q, k, v, token_mask, state)
        if (ring := self._ring(state)) is None:
            state, _, _ = self._slide(k, v, state)
        else:
            oldest_k, oldest_v = self._oldest(ring)
            oldest_k.copy_(k)
            oldest_v.copy_(v)
            state = self._turned(ring)
        key_heads, k, v = k.shape[1], state["k"], state["v"]  # all of it is near
        grouped = group_heads(q, key_heads)
        if self.softcap is None and self.sinks is None:
            y = F.scaled_dot_product_attention(grouped, k, v, scale=self.scale)
        else:
            y = self._weights(grouped * self.scale @ k.transpose(-1, -2), None, grouped=True) @ v
        return y.reshape(*q.shape[:3], -1), state

    def _local(self, q: Tensor, k: Tensor, v: Tensor, near: NearKeys, bias: Tensor | None) -> Tensor:
        """Mix every token with its window and the sinks."""
        scores = split(q, near.size) @ near.of(k).transpose(-1, -2)  # (batch, heads, blocks, size, keys)
        visible, tokens = near.visible, q.shape[2]
        if self.ablated is not None:
            left = self._part(torch.arange(scores.shape[-1], device=q.device) >= scores.shape[-1] - near.sinks)
            visible = visible if left is None else visible & left
        added = None if bias is None else band(bias, near.size, near.sides)
        if bias is not None and added is not None and near.sinks:
            to_first = near.first.positions[:, None, None].expand(q.shape[0], bias.shape[1], tokens, -1)
            columns = split(bias.expand(q.shape[0], -1, -1, -1).gather(3, to_first), near.size)
            added = torch.cat([added.expand(q.shape[0], *added.shape[1:]), columns], -1)
        return join(self._weights(scores, visible, added) @ near.of(v), tokens)

    def _seen(self, slots: Slots) -> Tensor:
        distance = slots.distance()
        near, left = slots.sink[:, None] | (distance > -self.window), self._part(slots.sink[:, None])
        seen = (near if left is None else near & left) & (distance <= 0)
        return (seen if slots.mask is None else seen & slots.mask[:, None])[:, None]

    def _weights(self, scores: Tensor, visible: Tensor | None, bias: Tensor | None = None, grouped: bool = False) -> Tensor:
        """Softmax over the visible keys, with all that the teacher adds to its logits."""
        if bias is None and self.softcap is None and self.sinks is None:
            return masked_softmax(scores, visible)
        if visible is not None:
            hidden = additive_mask(visible, scores.dtype)
            bias = hidden if bias is None else (bias + hidden).clamp_min(torch.finfo(scores.dtype).min)
        sinks: Tensor | None = None if self.sinks is None else self.sinks.weight
        if sinks is not None:  # (heads, 1, ...), or (key heads, heads of each, 1) where queries are grouped
            sinks = sinks.view(scores.shape[1], -1, 1) if grouped else sinks.view(-1, *(1,) * (scores.dim() - 2))
        weights = softmax_of(scores, bias, self.softcap, sinks)
        return weights if visible is None else weights * visible.any(-1, keepdim=True)


@checked
@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Operator):
    """Softmax attention to the tokens less than `window` away and to the first `sinks` of the sequence.

    In a causal model a token sees itself and the `window - 1` before it; in others the first tokens also see everything.
    Padding before a sequence does not count. Unlike Longformer, the first tokens use the same projections as the others.

    >>> SlidingWindow(window=32).sinks
    1

    Args:
        init: How the student gets its first weights.
        ignore: What the student leaves out of its teacher: bias, softcap, sinks, window.
        window: Tokens less than so far away are seen.
        sinks: So many first tokens of a sequence are always seen.
    """

    cost = "n window d"
    paper = "https://arxiv.org/abs/2004.05150"
    mixer_class = SlidingWindowMixer

    window: PositiveInt = 64
    sinks: Count = 1

    def mixer(self, spec: AttentionSpec) -> Mixer:
        window = self.window if spec.window is None else min(self.window, spec.window)
        return SlidingWindowMixer(window, self.sinks, spec.logit_scale, spec.softcap, spec.sinks)

"""Sliding window: softmax attention to the neighbours and to a few global tokens (the Longformer pattern)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

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
    tail,
)
from segue.students.attention.mixers.blocks import band, distances, join, neighbours, reach, split, within
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec

__all__ = ["SlidingWindow"]

SMALLEST_BLOCK = 64  # so that products of narrow windows are worth their overhead


class GlobalTokens(NamedTuple):
    """The first tokens of each sequence that are not padding."""

    k: Tensor  # (batch, heads, count, head size)
    v: Tensor
    mask: Tensor  # (batch, count), False where a sequence has fewer
    positions: Tensor  # (batch, count), counted from the first token of this call, so negative for earlier ones


class Window(NamedTuple):
    """The tokens that new queries can see: those of a state, then the new ones."""

    k: Tensor
    v: Tensor
    mask: Tensor  # (batch, tokens), True where a token is neither padding nor global
    total: Tensor  # (batch, 1), how many tokens without padding so far
    first: GlobalTokens


class SlidingWindowMixer(Mixer):
    """Softmax over the tokens less than `window` away, and over the first `global_tokens`, which themselves see everything."""

    supports_causal = True
    supports_reduction = True
    recurrent = True
    honours = frozenset({"bias", "softcap", "sinks", "window"})

    def __init__(
        self, window: int, global_tokens: int, scale: float, softcap: float | None = None, sinks: Tensor | None = None
    ) -> None:
        super().__init__()
        self.window, self.global_tokens, self.scale, self.softcap = window, global_tokens, scale, softcap
        self.sinks = None if sinks is None else Sinks(sinks)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool, bias: Tensor | None = None
    ) -> Tensor:
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        q = q * self.scale
        mask = full_mask(k) if token_mask is None else token_mask
        first = self._global_tokens(k, v, mask, None)
        bias = None if bias is None else bias.expand(*bias.shape[:2], q.shape[2], k.shape[2])
        local = self._local(q, k, v, mask, first, causal, bias)
        if causal or not self.global_tokens:
            return local
        added = None if bias is None else _gather(bias.expand(q.shape[0], -1, -1, -1), first.positions)
        rows = self._weights(_gather(q, first.positions) @ k.transpose(-1, -2), mask[:, None, None, :], added) @ v
        return local.scatter(2, first.positions[:, None, :, None].expand_as(rows), rows)

    def mix_reduced(
        self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, places: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Mix with the keys around each query's place; they are few, so that a mask hides the others."""
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        key, place = torch.arange(k.shape[2], device=k.device), places[:, None]
        visible = within(self.window, key - place, causal=False) | (torch.minimum(key, place) < self.global_tokens)
        if token_mask is not None:
            visible = visible & token_mask[:, None, None]
        return self._weights(q * self.scale @ k.transpose(-1, -2), visible, bias) @ v

    def mix_chunk(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> Tensor:
        k, v, mask, _, first = self._window(k, v, token_mask, state)
        heads, tokens = q.shape[1], q.shape[2]
        position = torch.arange(tokens, device=q.device)[:, None]
        near = within(self.window, torch.arange(tokens - k.shape[2], tokens, device=q.device) - position, causal=True)
        to_first = first.mask[:, None] & (first.positions[:, None] <= position)  # (batch, tokens, count)
        visible = torch.cat([mask[:, None] & near, to_first], dim=-1)[:, None]
        k = repeat_heads(torch.cat([k, first.k], dim=2), heads)
        v = repeat_heads(torch.cat([v, first.v], dim=2), heads)
        return self._weights(q * self.scale @ k.transpose(-1, -2), visible) @ v

    def accumulate(self, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State | None) -> State:
        return self._next_state(self._window(k, v, token_mask, state))

    def step(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        key_heads, window = k.shape[1], self._window(k, v, token_mask, state)  # all of it is near
        first = window.first
        visible = torch.cat([window.mask, first.mask], dim=1)[:, None, None]
        k, v = torch.cat([window.k, first.k], dim=2), torch.cat([window.v, first.v], dim=2)
        weights = self._weights(group_heads(q * self.scale, key_heads) @ k.transpose(-1, -2), visible, grouped=True)
        return (weights @ v).reshape(*q.shape[:3], -1), self._next_state(window)

    def _weights(self, scores: Tensor, visible: Tensor, bias: Tensor | None = None, grouped: bool = False) -> Tensor:
        """Softmax over the visible keys, with all that the teacher adds to its logits."""
        if bias is None and self.softcap is None and self.sinks is None:
            return masked_softmax(scores, visible)
        hidden = additive_mask(visible, scores.dtype)
        bias = hidden if bias is None else (bias + hidden).clamp_min(torch.finfo(scores.dtype).min)
        sinks: Tensor | None = None if self.sinks is None else self.sinks.weight
        if sinks is not None:  # (heads, 1, ...), or (key heads, heads of each, 1) where queries are grouped
            sinks = sinks.view(scores.shape[1], -1, 1) if grouped else sinks.view(-1, *(1,) * (scores.dim() - 2))
        return softmax_of(scores, bias, self.softcap, sinks) * visible.any(-1, keepdim=True)

    def _window(self, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State | None) -> Window:
        """Join the tokens of a state with new ones."""
        mask = full_mask(k) if token_mask is None else token_mask
        first = self._global_tokens(k, v, mask, state)
        total = mask.sum(1, keepdim=True)
        if state is None:
            return Window(k, v, self._local_keys(mask), total, first)
        mask = torch.cat([state["mask"], self._local_keys(mask, state["total"])], dim=1)
        k, v = torch.cat([state["k"], k], dim=2), torch.cat([state["v"], v], dim=2)
        return Window(k, v, mask, total + state["total"], first)

    def _next_state(self, window: Window) -> State:
        """Return what later tokens need."""
        k, v, mask, total, first = window
        cut = max(0, k.shape[2] - self.window + 1)
        local = {"k": tail(k, cut), "v": tail(v, cut), "mask": tail(mask, cut, 1), "total": total}
        return local | {"first_k": first.k, "first_v": first.v, "first_mask": first.mask}

    def _global_tokens(self, k: Tensor, v: Tensor, mask: Tensor, state: State | None) -> GlobalTokens:
        earlier = 0
        if state is not None:
            earlier = state["first_k"].shape[2]
            k, v = torch.cat([state["first_k"], k], dim=2), torch.cat([state["first_v"], v], dim=2)
            mask = torch.cat([state["first_mask"], mask], dim=1)
        positions = (~mask).byte().argsort(dim=1, stable=True)[:, : self.global_tokens]
        return GlobalTokens(_gather(k, positions), _gather(v, positions), mask.gather(1, positions), positions - earlier)

    def _local(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, first: GlobalTokens, causal: bool, bias: Tensor | None
    ) -> Tensor:
        tokens = q.shape[2]
        size = min(max(self.window, SMALLEST_BLOCK), tokens)
        sides = reach(tokens, size, causal)
        near = within(self.window, distances(size, sides, q.device), causal)
        local_keys = self._local_keys(mask)[:, None, :, None]
        visible = neighbours(split(local_keys, size), sides).transpose(-1, -2) & near
        q = split(q, size)
        scores = q @ neighbours(split(k, size), sides).transpose(-1, -2)
        values = neighbours(split(v, size), sides)  # (batch, heads, blocks, keys, head size)
        count = first.mask.shape[1]
        added = None if bias is None else band(bias, size, sides)
        if not count:
            return join(self._weights(scores, visible, added) @ values, tokens)
        first_scores = q @ first.k[:, :, None].transpose(-1, -2)
        to_first = first.mask[:, None, None, None].expand(-1, -1, *first_scores.shape[2:])
        if causal:
            position = torch.arange(q.shape[2] * size, device=q.device).reshape(q.shape[2], size, 1)
            to_first = to_first & (first.positions[:, None, None, None] <= position)
        visible = torch.cat([visible.expand_as(scores[:, :1]), to_first], -1)
        if bias is not None and added is not None:
            to_columns = first.positions[:, None, None].expand(-1, bias.shape[1], tokens, -1)
            columns = split(bias.expand(q.shape[0], -1, -1, -1).gather(3, to_columns), size)
            added = torch.cat([added.expand(q.shape[0], *added.shape[1:]), columns], -1)
        weights = self._weights(torch.cat([scores, first_scores], -1), visible, added)
        return join(weights[..., :-count] @ values + weights[..., -count:] @ first.v[:, :, None], tokens)

    def _local_keys(self, mask: Tensor, before: Tensor | int = 0) -> Tensor:
        """Mark the tokens that only neighbours see: the global ones have columns of their own."""
        return mask & (mask.cumsum(1) + before > self.global_tokens)


@checked
@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Operator):
    """Softmax attention to the tokens less than `window` away and to the first `global_tokens` of the sequence.

    In a causal model a token sees itself and the `window - 1` before it. Padding before a sequence does not count. Unlike
    Longformer, global tokens use the same projections as the others.
    """

    cost = "n window d"
    paper = "https://arxiv.org/abs/2004.05150"
    mixer_class = SlidingWindowMixer

    window: PositiveInt = 64
    global_tokens: Count = 1

    def mixer(self, spec: AttentionSpec) -> Mixer:
        window = self.window if spec.window is None else min(self.window, spec.window)
        return SlidingWindowMixer(window, self.global_tokens, spec.logit_scale, spec.softcap, spec.sinks)


def _gather(x: Tensor, positions: Tensor) -> Tensor:
    """Gather the tokens of (batch, heads, tokens, n) at (batch, count) positions."""
    return x.gather(2, positions[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

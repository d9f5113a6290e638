"""Sliding window: softmax attention to the neighbours and to a few global tokens (the Longformer pattern)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from segue.students.attention.mixer import Mixer, State, all_kept, by_key_head, every_head, from_place, softmax_where
from segue.students.attention.mixers.blocks import distances, join, neighbours, reach, split, within
from segue.students.attention.module import Operator, positive
from segue.students.attention.spec import Geometry

SMALLEST_BLOCK = 64  # so that narrow windows still make products worth their overhead


class Firsts(NamedTuple):
    """The global tokens: the first of each sequence that are not padding."""

    k: Tensor  # (batch, heads, count, head size)
    v: Tensor
    there: Tensor  # (batch, count), False where a sequence has fewer
    places: Tensor  # (batch, count), counted from the first token of this call, so negative for earlier ones


class SlidingWindowMixer(Mixer):
    """Softmax over the tokens less than `window` away, and over the first `global_tokens`, which themselves see everything."""

    can_be_causal = True
    recurrent = True

    def __init__(self, window: int, global_tokens: int, scale: float) -> None:
        super().__init__()
        self.window, self.global_tokens, self.scale = window, global_tokens, scale

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool) -> Tensor:
        k, v = every_head(k, q.shape[1]), every_head(v, q.shape[1])
        q = q * self.scale
        keep = all_kept(k) if keep is None else keep
        firsts = self._firsts(k, v, keep, None)
        local = self._local(q, k, v, keep, firsts, causal)
        if causal or not self.global_tokens:
            return local
        whole = softmax_where(_taken(q, firsts.places) @ k.transpose(-1, -2), keep[:, None, None, :]) @ v
        return local.scatter(2, firsts.places[:, None, :, None].expand_as(whole), whole)

    def recall(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, state: State) -> Tensor:
        return self._recalled(q, *self._together(k, v, keep, state))

    def remember(self, k: Tensor, v: Tensor, keep: Tensor | None, state: State | None) -> State:
        return self._left(*self._together(k, v, keep, state))

    def step(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, state: State) -> tuple[Tensor, State]:
        key_heads = k.shape[1]
        k, v, local, _, firsts = together = self._together(k, v, keep, state)  # all of it is near
        seen = torch.cat([local, firsts.there], dim=1)[:, None, None]
        k, v = torch.cat([k, firsts.k], dim=2), torch.cat([v, firsts.v], dim=2)
        weights = softmax_where(by_key_head(q * self.scale, key_heads) @ k.transpose(-1, -2), seen)
        return (weights @ v).reshape(q.shape), self._left(*together)

    def _together(
        self, k: Tensor, v: Tensor, keep: Tensor | None, state: State | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Firsts]:
        """Put the tokens that a state holds before new ones; return them, which are local, how many count, and the firsts."""
        keep = all_kept(k) if keep is None else keep
        firsts = self._firsts(k, v, keep, state)
        count = keep.sum(1, keepdim=True)
        if state is None:
            return k, v, self._local_keys(keep), count, firsts
        local = torch.cat([state["local"], self._local_keys(keep, state["count"])], dim=1)
        return torch.cat([state["k"], k], dim=2), torch.cat([state["v"], v], dim=2), local, count + state["count"], firsts

    def _recalled(self, q: Tensor, k: Tensor, v: Tensor, local: Tensor, count: Tensor, firsts: Firsts) -> Tensor:
        heads, tokens = q.shape[1], q.shape[2]
        place = torch.arange(tokens, device=q.device)[:, None]
        near = within(self.window, torch.arange(tokens - k.shape[2], tokens, device=q.device) - place, causal=True)
        theirs = firsts.there[:, None] & (firsts.places[:, None] <= place)  # (batch, tokens, count)
        seen = torch.cat([local[:, None] & near, theirs], dim=-1)[:, None]
        k = every_head(torch.cat([k, firsts.k], dim=2), heads)
        v = every_head(torch.cat([v, firsts.v], dim=2), heads)
        return softmax_where(q * self.scale @ k.transpose(-1, -2), seen) @ v

    def _left(self, k: Tensor, v: Tensor, local: Tensor, count: Tensor, firsts: Firsts) -> State:
        """Return what later tokens need."""
        cut = max(0, k.shape[2] - self.window + 1)
        window = {"k": from_place(k, cut), "v": from_place(v, cut), "local": from_place(local, cut, 1), "count": count}
        return window | {"first_k": firsts.k, "first_v": firsts.v, "first_there": firsts.there}

    def _firsts(self, k: Tensor, v: Tensor, keep: Tensor, state: State | None) -> Firsts:
        earlier = 0
        if state is not None:
            earlier = state["first_k"].shape[2]
            k, v = torch.cat([state["first_k"], k], dim=2), torch.cat([state["first_v"], v], dim=2)
            keep = torch.cat([state["first_there"], keep], dim=1)
        places = (~keep).byte().argsort(dim=1, stable=True)[:, : self.global_tokens]
        return Firsts(_taken(k, places), _taken(v, places), keep.gather(1, places), places - earlier)

    def _local(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, firsts: Firsts, causal: bool) -> Tensor:
        tokens = q.shape[2]
        size = min(max(self.window, SMALLEST_BLOCK), tokens)
        sides = reach(tokens, size, causal)
        near = within(self.window, distances(size, sides, q.device), causal)
        local_keys = self._local_keys(keep)[:, None, :, None]
        seen = neighbours(split(local_keys, size), sides).transpose(-1, -2) & near
        q = split(q, size)
        scores = q @ neighbours(split(k, size), sides).transpose(-1, -2)
        values = neighbours(split(v, size), sides)  # (batch, heads, blocks, keys, head size)
        count = firsts.there.shape[1]
        if not count:
            return join(softmax_where(scores, seen) @ values, tokens)
        everywhere = q @ firsts.k[:, :, None].transpose(-1, -2)
        theirs = firsts.there[:, None, None, None].expand(-1, -1, *everywhere.shape[2:])
        if causal:
            place = torch.arange(q.shape[2] * size, device=q.device).reshape(q.shape[2], size, 1)
            theirs = theirs & (firsts.places[:, None, None, None] <= place)
        weights = softmax_where(torch.cat([scores, everywhere], -1), torch.cat([seen.expand_as(scores[:, :1]), theirs], -1))
        near_weights, theirs = weights[..., :-count], weights[..., -count:]
        return join(near_weights @ values + theirs @ firsts.v[:, :, None], tokens)

    def _local_keys(self, keep: Tensor, before: Tensor | int = 0) -> Tensor:
        """Mark the tokens that are seen from near only: the global ones are seen through columns of their own."""
        return keep & (keep.cumsum(1) + before > self.global_tokens)


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Operator):
    """Softmax attention to the tokens less than `window` away and to the first `global_tokens` of the sequence.

    In a causal model a token sees itself and the `window - 1` before it. Padding before a sequence does not count. Unlike
    Longformer, global tokens use the same projections as the others.
    """

    window: int = 64
    global_tokens: int = 1

    def mixer(self, geometry: Geometry) -> Mixer:
        global_tokens = self.global_tokens and positive("global_tokens", self.global_tokens)
        return SlidingWindowMixer(positive("window", self.window), global_tokens, geometry.logit_scale)


def _taken(x: Tensor, places: Tensor) -> Tensor:
    """Take the tokens at (batch, count) places out of (batch, heads, tokens, n)."""
    return x.gather(2, places[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

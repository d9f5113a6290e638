"""Windowed linear attention: softmax near, linear far, under one normalisation (the operator of LoLCATs)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.border import Count, PositiveFloat, PositiveInt, checked
from segue.students.attention.mixer import Mixer, State, append_ones, group_heads, masked_softmax, normalise, repeat_heads
from segue.students.attention.mixers.blocks import join, split, sums_after, sums_before
from segue.students.attention.mixers.linear import FeatureMap, feature_map
from segue.students.attention.mixers.near import NearKeys, WindowMixer
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec

__all__ = ["WindowedLinear"]


class WindowedLinearMixer(WindowMixer):
    """Weights p_ts near and c f(q_t) . f(k_s) far, divided by their common sum; p is the softmax over near tokens alone.

    Near are the tokens less than `window` away and the sinks; c > 0 is learned per head. With `far=None` it is max_s p_ts / g,
    g in (0, 1) learned per head, as in version 0.1.0.
    """

    branches = ("sinks", "window", "far")

    def __init__(
        self,
        *,
        window: int,
        sink_tokens: int,
        kind: FeatureMap,
        far: float | None,
        heads: int,
        key_heads: int,
        head_size: int,
        scale: float,
    ) -> None:
        super().__init__(window, sink_tokens)
        self.scale, self.far = scale, far
        self.of_queries = feature_map(kind, heads, head_size)
        self.of_keys = feature_map(kind, key_heads, head_size)
        if far is None:
            self.near_share = nn.Parameter(torch.empty(heads, 1, 1))
        else:
            self.log_far = nn.Parameter(torch.empty(heads, 1, 1))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with c as in the settings; in the way of version 0.1.0 with g = 1/2."""
        if self.far is None:
            self.near_share.zero_()
        else:
            self.log_far.fill_(math.log(self.far))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool) -> Tensor:
        heads, tokens = q.shape[1], q.shape[2]
        near = NearKeys(tokens, token_mask, q.device, self.window, self.sink_tokens, causal)
        q_features, k_features = split(self.of_queries(q), near.size), repeat_heads(self.of_keys(k), heads)
        k, v = repeat_heads(k, heads), append_ones(repeat_heads(v, heads))
        scores = split(q * self.scale, near.size) @ near.of(k).transpose(-1, -2)  # (batch, heads, blocks, size, keys)
        weights = near.softmax(scores)
        q_features = q_features * self._factor(weights, 5)
        if self.ablated is not None:
            weights = self._ablate(weights, torch.arange(scores.shape[-1], device=q.device) >= scores.shape[-1] - near.sinks)
        sums = weights @ near.of(v)
        if self.ablated != "far":
            sums = sums + self._far_sums(q_features, k_features, v, near, causal)
        return join(normalise(sums), tokens)

    def _far_sums(self, q_features: Tensor, k_features: Tensor, v: Tensor, near: NearKeys, causal: bool) -> Tensor:
        """Sum over the tokens outside of the window, but for the sinks."""
        if near.sinks or near.padded:
            v = v * near.local[:, None, :, None].to(v.dtype)  # the ones too: padding and sinks then add to no sum
        far = ~near.in_window & (near.distance <= 0) if causal else ~near.in_window
        soft = (q_features @ near.neighbours(k_features).transpose(-1, -2)).mul_(far.to(v.dtype))
        sums = soft @ near.neighbours(v)
        states = split(k_features, near.size).transpose(-1, -2) @ split(
            v, near.size
        )  # (batch, heads, blocks, features, size + 1)
        if states.shape[2] > 2:
            others = sums_before(states, 2) if causal else sums_before(states, 2) + sums_after(states, 2)
            sums = sums + q_features @ others
        return sums

    def mix_chunk(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> Tensor:
        slots, heads = self._join(k, v, token_mask, state), q.shape[1]
        distance, sink = slots.distance(), slots.sink[:, None, None]  # (new, tokens), (batch or 1, 1, 1, tokens)
        seen = distance <= 0 if slots.mask is None else (distance <= 0) & slots.mask[:, None, None]
        near = seen & (sink | (distance > -self.window))
        weights = masked_softmax(q * self.scale @ repeat_heads(slots.k, heads).transpose(-1, -2), near)
        q_features, k_features = self.of_queries(q) * self._factor(weights, 4), repeat_heads(self.of_keys(slots.k), heads)
        far = (q_features @ k_features.transpose(-1, -2)) * (seen & ~near).to(q.dtype)
        if self.ablated is not None:
            weights, far = self._ablate(weights, sink), far * (self.ablated != "far")
        sums = (weights + far) @ append_ones(repeat_heads(slots.v, heads))
        if self.ablated != "far":
            sums = sums + q_features @ repeat_heads(state["sums"], heads)
        return normalise(sums)

    def step(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        if token_mask is not None or "mask" in state or self.ablated is not None or self.far is None:
            return super().step(q, k, v, token_mask, state)
        state = self.accumulate(k, v, None, state)  # without padding, all of it is near but for what is in the sums
        key_heads = k.shape[1]
        near = F.scaled_dot_product_attention(group_heads(q, key_heads), state["k"], state["v"], scale=self.scale)
        far = group_heads(self.of_queries(q) * self.log_far.exp(), key_heads) @ state["sums"]
        y = (near + far[..., :-1]) / (far[..., -1:] + 1)
        return y.reshape(*q.shape[:3], -1), state

    def _evict(self, k: Tensor, v: Tensor, mask: Tensor | None, state: State | None) -> State:
        """Add the tokens that leave the window to the sums."""
        if state and not k.shape[2]:
            return {"sums": state["sums"]}
        v = append_ones(v) if mask is None else append_ones(v) * mask[:, None, :, None].to(v.dtype)
        sums = self.of_keys(k).transpose(-1, -2) @ v  # (batch, key heads, features, size + 1)
        return {"sums": state["sums"] + sums if state else sums}

    def _factor(self, weights: Tensor, dims: int) -> Tensor:
        """Return what far weights are multiplied by, for each query."""
        if self.far is not None:
            return self.log_far.to(weights.dtype).exp().view(-1, *(1,) * (dims - 2))
        share = self.near_share.to(weights.dtype).sigmoid().view(-1, *(1,) * (dims - 2))
        return weights.amax(-1, keepdim=True) / share

    def _ablate(self, weights: Tensor, sink: Tensor) -> Tensor:
        left = self._part(sink)
        return weights if left is None else weights * left.to(weights.dtype)


@checked
@dataclass(frozen=True, kw_only=True)
class WindowedLinear(Operator):
    """Softmax attention to the tokens less than `window` away and to the first `sinks`, linear attention to the rest.

    Both are normalised together. Each head learns what its linear part is multiplied by, from `far` on.
    """

    cost = "n (window + d) d"
    paper = "https://arxiv.org/abs/2410.10254"
    mixer_class = WindowedLinearMixer

    window: PositiveInt = 64
    feature_map: FeatureMap = "hedgehog"
    sinks: Count = 1
    far: PositiveFloat | None = 0.05  # None: a share of the near part is learned instead, as in version 0.1.0

    def mixer(self, spec: AttentionSpec) -> Mixer:
        return WindowedLinearMixer(
            window=self.window,
            sink_tokens=self.sinks,
            kind=self.feature_map,
            far=self.far,
            heads=spec.heads,
            key_heads=spec.key_heads,
            head_size=spec.head_size,
            scale=spec.logit_scale,
        )

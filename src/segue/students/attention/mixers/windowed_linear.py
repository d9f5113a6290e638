"""Windowed linear attention: softmax near, linear far, under one normalisation (the LoLCATs operator)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.border import PositiveInt, checked
from segue.students.attention.mixer import (
    Mixer,
    State,
    additive_mask,
    append_ones,
    full_mask,
    group_heads,
    normalise,
    repeat_heads,
    tail,
)
from segue.students.attention.mixers.blocks import distances, join, neighbours, reach, split, sums_after, sums_before, within
from segue.students.attention.mixers.linear import FeatureMap, feature_map
from segue.students.attention.mixers.sliding_window import SMALLEST_BLOCK
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec

__all__ = ["WindowedLinear"]


class WindowedLinearMixer(Mixer):
    """Weights g exp(scale q_t . k_s - largest in the window) near and f(q_t) . f(k_s) far, divided by their common sum.

    Near is less than `window` away; g in (0, 1) is learned per head.
    """

    supports_causal = True
    recurrent = True

    def __init__(self, window: int, kind: FeatureMap, heads: int, key_heads: int, head_size: int, scale: float) -> None:
        super().__init__()
        self.window, self.scale = window, scale
        self.of_queries = feature_map(kind, heads, head_size)
        self.of_keys = feature_map(kind, key_heads, head_size)
        self.near_share = nn.Parameter(torch.empty(heads, 1, 1))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with g = 1/2."""
        self.near_share.zero_()

    def mix(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool) -> Tensor:
        heads, tokens = q.shape[1], q.shape[2]
        q_features, k_features = self.of_queries(q), repeat_heads(self.of_keys(k), heads)
        k, v = repeat_heads(k, heads), append_ones(repeat_heads(v, heads))
        if token_mask is None:
            token_mask = full_mask(k)
        else:
            v = v * token_mask[:, None, :, None]  # the ones too: padding then adds to no sum
        size = min(max(self.window, SMALLEST_BLOCK), tokens)
        sides = reach(tokens, size, causal)
        q, q_features = split(q * self.scale, size), split(q_features, size)
        k, k_features, v, mask = (split(x, size) for x in (k, k_features, v, token_mask[:, None, :, None]))
        distance = distances(size, sides, q.device)
        near = within(self.window, distance, causal)
        far = (~near & (distance <= 0) if causal else ~near).to(q.dtype)

        scores = q @ neighbours(k, sides).transpose(-1, -2)  # (batch, heads, blocks, size, keys)
        sharp = self._sharp(scores, neighbours(mask, sides).transpose(-1, -2) & near, self.near_share[:, None])
        soft = (q_features @ neighbours(k_features, sides).transpose(-1, -2)).mul_(far)
        sums = soft.add_(sharp) @ neighbours(v, sides)
        states = k_features.transpose(-1, -2) @ v  # (batch, heads, blocks, features, head size + 1)
        if states.shape[2] > 2:
            others = sums_before(states, 2) if causal else sums_before(states, 2) + sums_after(states, 2)
            sums = sums + q_features @ others
        return join(normalise(sums), tokens)

    def mix_chunk(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> Tensor:
        heads, tokens, past = q.shape[1], q.shape[2], state["k"].shape[2]
        k, v, mask = self._window(k, v, token_mask, state)
        distance = torch.arange(-past, tokens, device=q.device) - torch.arange(tokens, device=q.device)[:, None]
        near = within(self.window, distance, causal=True)
        scores = (q * self.scale) @ repeat_heads(k, heads).transpose(-1, -2)
        sharp = self._sharp(scores, near if mask is None else mask[:, None, None] & near, self.near_share)
        q_features, k_features = self.of_queries(q), repeat_heads(self.of_keys(k), heads)
        soft = (q_features @ k_features.transpose(-1, -2)) * (~near & (distance <= 0)).to(q.dtype)
        return normalise((sharp + soft) @ repeat_heads(v, heads) + q_features @ repeat_heads(state["sums"], heads))

    def step(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        key_heads = k.shape[1]
        k, v, mask = self._window(k, v, token_mask, state)  # all of it is near
        scores = group_heads(q * self.scale, key_heads) @ k.transpose(-1, -2)
        sharp = self._sharp(scores, None if mask is None else mask[:, None, None], self.near_share.view(key_heads, -1, 1))
        y = normalise(sharp @ v + group_heads(self.of_queries(q), key_heads) @ state["sums"])
        return y.reshape(*q.shape[:3], -1), self._next_state(k, v, mask, state)

    def accumulate(self, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State | None) -> State:
        return self._next_state(*self._window(k, v, token_mask, state), state)

    def _window(
        self, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Join the tokens of a state with new ones; values get a column of ones, which are zeros at padding."""
        v = append_ones(v)
        if token_mask is not None:
            v = v * token_mask[:, None, :, None]
        if state is None:
            return k, v, token_mask
        if token_mask is not None or "mask" in state:
            before = state.get("mask", full_mask(state["k"]))
            token_mask = torch.cat([before, full_mask(k) if token_mask is None else token_mask], dim=1)
        return torch.cat([state["k"], k], dim=2), torch.cat([state["v"], v], dim=2), token_mask

    def _next_state(self, k: Tensor, v: Tensor, mask: Tensor | None, state: State | None) -> State:
        """Return what later tokens need: the last `window - 1`, and sums over those before them."""
        cut = max(0, k.shape[2] - self.window + 1)
        sums = None if state is None else state["sums"]
        if cut or sums is None:
            older = self.of_keys(k[:, :, :cut]).transpose(-1, -2) @ v[:, :, :cut]
            sums = older if sums is None else sums + older
        state = {"k": tail(k, cut), "v": tail(v, cut), "sums": sums}
        return state if mask is None else {**state, "mask": tail(mask, cut, 1)}

    def _sharp(self, scores: Tensor, visible: Tensor | None, near_share: Tensor) -> Tensor:
        """Return the weights of the window: g exp(score - largest), and zeros where nothing is visible."""
        if visible is not None:
            scores = scores.add_(additive_mask(visible, scores.dtype))
        largest = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min / 2)
        return (scores - (largest - F.logsigmoid(near_share.to(scores.dtype)))).exp_()


@checked
@dataclass(frozen=True, kw_only=True)
class WindowedLinear(Operator):
    """Softmax attention to the tokens less than `window` away and linear attention to the rest, normalised together."""

    cost = "n (window + d) d"
    paper = "https://arxiv.org/abs/2410.10254"
    mixer_class = WindowedLinearMixer

    window: PositiveInt = 64
    feature_map: FeatureMap = "hedgehog"

    def mixer(self, spec: AttentionSpec) -> Mixer:
        shape = spec.heads, spec.key_heads, spec.head_size
        return WindowedLinearMixer(self.window, self.feature_map, *shape, spec.logit_scale)

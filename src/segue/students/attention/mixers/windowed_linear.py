"""Windowed linear attention: softmax near, linear far, under one normalisation (the LoLCATs operator)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.students.attention.mixer import (
    Mixer,
    State,
    all_kept,
    by_key_head,
    divided,
    every_head,
    from_place,
    hiding,
    with_ones,
)
from segue.students.attention.mixers.blocks import distances, join, neighbours, reach, split, sums_after, sums_before, within
from segue.students.attention.mixers.feature_maps import FeatureMap, feature_map
from segue.students.attention.mixers.sliding_window import SMALLEST_BLOCK
from segue.students.attention.module import Operator, positive
from segue.students.attention.spec import Geometry


class WindowedLinearMixer(Mixer):
    """Weights g exp(scale q_t . k_s - largest in the window) near and f(q_t) . f(k_s) far, divided by their common sum.

    Near is less than `window` away; g in (0, 1) is learned per head.
    """

    can_be_causal = True
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
        """Begin with g = 1/2."""
        self.near_share.zero_()

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool) -> Tensor:
        heads, tokens = q.shape[1], q.shape[2]
        q_features, k_features = self.of_queries(q), every_head(self.of_keys(k), heads)
        k, v = every_head(k, heads), with_ones(every_head(v, heads))
        if keep is None:
            keep = all_kept(k)
        else:
            v = v * keep[:, None, :, None]  # the ones too: padding then adds to no sum
        size = min(max(self.window, SMALLEST_BLOCK), tokens)
        sides = reach(tokens, size, causal)
        q, q_features = split(q * self.scale, size), split(q_features, size)
        k, k_features, v, kept = (split(x, size) for x in (k, k_features, v, keep[:, None, :, None]))
        distance = distances(size, sides, q.device)
        near = within(self.window, distance, causal)
        far = (~near & (distance <= 0) if causal else ~near).to(q.dtype)

        scores = q @ neighbours(k, sides).transpose(-1, -2)  # (batch, heads, blocks, size, keys)
        sharp = self._sharp(scores, neighbours(kept, sides).transpose(-1, -2) & near, self.near_share[:, None])
        soft = (q_features @ neighbours(k_features, sides).transpose(-1, -2)).mul_(far)
        sums = soft.add_(sharp) @ neighbours(v, sides)
        states = k_features.transpose(-1, -2) @ v  # (batch, heads, blocks, features, head size + 1)
        if states.shape[2] > 2:
            others = sums_before(states, 2) if causal else sums_before(states, 2) + sums_after(states, 2)
            sums = sums + q_features @ others
        return join(divided(sums), tokens)

    def recall(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, state: State) -> Tensor:
        heads, tokens, past = q.shape[1], q.shape[2], state["k"].shape[2]
        k, v, kept = self._window(k, v, keep, state)
        distance = torch.arange(-past, tokens, device=q.device) - torch.arange(tokens, device=q.device)[:, None]
        near = within(self.window, distance, causal=True)
        scores = (q * self.scale) @ every_head(k, heads).transpose(-1, -2)
        sharp = self._sharp(scores, near if kept is None else kept[:, None, None] & near, self.near_share)
        q_features, k_features = self.of_queries(q), every_head(self.of_keys(k), heads)
        soft = (q_features @ k_features.transpose(-1, -2)) * (~near & (distance <= 0)).to(q.dtype)
        return divided((sharp + soft) @ every_head(v, heads) + q_features @ every_head(state["sums"], heads))

    def step(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, state: State) -> tuple[Tensor, State]:
        key_heads = k.shape[1]
        k, v, kept = self._window(k, v, keep, state)  # all of it is near
        scores = by_key_head(q * self.scale, key_heads) @ k.transpose(-1, -2)
        sharp = self._sharp(scores, None if kept is None else kept[:, None, None], self.near_share.view(key_heads, -1, 1))
        y = divided(sharp @ v + by_key_head(self.of_queries(q), key_heads) @ state["sums"])
        return y.reshape(q.shape), self._left(k, v, kept, state)

    def remember(self, k: Tensor, v: Tensor, keep: Tensor | None, state: State | None) -> State:
        return self._left(*self._window(k, v, keep, state), state)

    def _window(self, k: Tensor, v: Tensor, keep: Tensor | None, state: State | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Put the tokens that a state holds before new ones; values come with ones, which are zeros at padding."""
        v = with_ones(v)
        if keep is not None:
            v = v * keep[:, None, :, None]
        if state is None:
            return k, v, keep
        if keep is not None or "kept" in state:
            before = state.get("kept", all_kept(state["k"]))
            keep = torch.cat([before, all_kept(k) if keep is None else keep], dim=1)
        return torch.cat([state["k"], k], dim=2), torch.cat([state["v"], v], dim=2), keep

    def _left(self, k: Tensor, v: Tensor, kept: Tensor | None, state: State | None) -> State:
        """Return what later tokens need: those that can still be near, and the sums over those that cannot."""
        cut = max(0, k.shape[2] - self.window + 1)
        sums = None if state is None else state["sums"]
        if cut or sums is None:
            gone = self.of_keys(k[:, :, :cut]).transpose(-1, -2) @ v[:, :, :cut]
            sums = gone if sums is None else sums + gone
        left = {"k": from_place(k, cut), "v": from_place(v, cut), "sums": sums}
        return left if kept is None else {**left, "kept": from_place(kept, cut, 1)}

    def _sharp(self, scores: Tensor, seen: Tensor | None, near_share: Tensor) -> Tensor:
        """Return the weights of what is near: g exp(score - largest); where nothing is seen, nothing is left."""
        if seen is not None:
            scores = scores.add_(hiding(seen, scores.dtype))
        largest = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min / 2)
        return (scores - (largest - F.logsigmoid(near_share.to(scores.dtype)))).exp_()


@dataclass(frozen=True, kw_only=True)
class WindowedLinear(Operator):
    """Softmax attention to the tokens less than `window` away and linear attention to the rest, normalised together."""

    window: int = 64
    feature_map: FeatureMap = "hedgehog"

    def mixer(self, geometry: Geometry) -> Mixer:
        shape = geometry.heads, geometry.key_heads, geometry.head_size
        return WindowedLinearMixer(positive("window", self.window), self.feature_map, *shape, geometry.logit_scale)

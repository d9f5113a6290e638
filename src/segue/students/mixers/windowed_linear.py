"""Windowed linear attention: softmax near, linear far, under one normalisation (the LoLCATs operator)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.students.attention import Operator, positive
from segue.students.geometry import Geometry
from segue.students.mixers.blocks import distances, join, neighbours, reach, split, sums_after, sums_before, within
from segue.students.mixers.feature_maps import FeatureMap, feature_map
from segue.students.mixers.sliding_window import SMALLEST_BLOCK
from segue.students.mixing import Mixer, divided, every_head, hiding, with_ones


class WindowedLinearMixer(Mixer):
    """Weights g exp(scale q_t . k_s - largest in the window) near and f(q_t) . f(k_s) far, divided by their common sum.

    Near is less than `window` away; g in (0, 1) is learned per head.
    """

    can_be_causal = True

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
            keep = torch.ones(q.shape[0], tokens, dtype=torch.bool, device=q.device)
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
        scores = scores.add_(hiding(neighbours(kept, sides).transpose(-1, -2) & near, q.dtype))
        largest = scores.amax(-1, keepdim=True).clamp_min(
            torch.finfo(q.dtype).min / 2
        )  # where nothing is seen, nothing is left
        sharp = (scores - (largest - F.logsigmoid(self.near_share.to(q.dtype))[:, None])).exp_()
        soft = (q_features @ neighbours(k_features, sides).transpose(-1, -2)).mul_(far)
        sums = soft.add_(sharp) @ neighbours(v, sides)
        states = k_features.transpose(-1, -2) @ v  # (batch, heads, blocks, features, head size + 1)
        if states.shape[2] > 2:
            others = sums_before(states, 2) if causal else sums_before(states, 2) + sums_after(states, 2)
            sums = sums + q_features @ others
        return join(divided(sums), tokens)


@dataclass(frozen=True, kw_only=True)
class WindowedLinear(Operator):
    """Softmax attention to the tokens less than `window` away and linear attention to the rest, normalised together."""

    window: int = 64
    feature_map: FeatureMap = "hedgehog"

    def mixer(self, geometry: Geometry) -> Mixer:
        shape = geometry.heads, geometry.key_heads, geometry.head_size
        return WindowedLinearMixer(positive("window", self.window), self.feature_map, *shape, geometry.logit_scale)

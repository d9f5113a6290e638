"""Linear attention: softmax's exp(q . k) replaced by a product of features, so that sums over keys are made once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from segue.students.attention.mixer import Mixer, State, by_key_head, divided, every_head, with_ones
from segue.students.attention.mixers.blocks import causal_sums
from segue.students.attention.mixers.feature_maps import FeatureMap, feature_map
from segue.students.attention.module import Operator
from segue.students.attention.spec import Geometry


class LinearMixer(Mixer):
    """sum over s of (f(q_t) . f(k_s)) v_s, divided by the sum of the weights."""

    can_be_causal = True
    recurrent = True

    def __init__(self, kind: FeatureMap, heads: int, key_heads: int, head_size: int) -> None:
        super().__init__()
        self.of_queries = feature_map(kind, heads, head_size)
        self.of_keys = feature_map(kind, key_heads, head_size)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool) -> Tensor:
        if causal:
            return divided(self._causal(self.of_queries(q), k, v, keep))
        return divided(self.of_queries(q) @ every_head(self._sums(k, v, keep), q.shape[1]))

    def recall(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, state: State) -> Tensor:
        q = self.of_queries(q)
        return divided(self._causal(q, k, v, keep) + q @ every_head(state["sums"], q.shape[1]))

    def step(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, state: State) -> tuple[Tensor, State]:
        sums = torch.addcmul(state["sums"], self._features(k, keep).transpose(-1, -2), with_ones(v))
        y = divided(by_key_head(self.of_queries(q), k.shape[1]) @ sums)
        return y.reshape(q.shape), {"sums": sums}

    def remember(self, k: Tensor, v: Tensor, keep: Tensor | None, state: State | None) -> State:
        sums = self._sums(k, v, keep)
        return {"sums": sums if state is None else state["sums"] + sums}

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        heads = q.shape[1]
        return causal_sums(q, every_head(self._features(k, keep), heads), with_ones(every_head(v, heads)))

    def _sums(self, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        """Sum f(k_s) (v_s, 1) over the tokens, (batch, key heads, features, head size + 1)."""
        return self._features(k, keep).transpose(-1, -2) @ with_ones(v)

    def _features(self, k: Tensor, keep: Tensor | None) -> Tensor:
        k = self.of_keys(k)  # (batch, key heads, tokens, features)
        return k if keep is None else k.masked_fill(~keep[:, None, :, None], 0.0)


@dataclass(frozen=True, kw_only=True)
class LinearAttention(Operator):
    """Linear attention with the feature map 'elu' (Katharopoulos et al.), 'relu', 'hedgehog' (learned), or your own function.

    >>> LinearAttention(feature_map="hedgehog")
    LinearAttention(init=CopyMatching(), feature_map='hedgehog')
    """

    feature_map: FeatureMap = "elu"

    def mixer(self, geometry: Geometry) -> Mixer:
        return LinearMixer(self.feature_map, geometry.heads, geometry.key_heads, geometry.head_size)

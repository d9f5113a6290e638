"""Linear attention: softmax's exp(q . k) replaced by a product of features, so that sums over keys are made once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from segue.students.attention import Operator
from segue.students.geometry import Geometry
from segue.students.mixers.blocks import causal_sums
from segue.students.mixers.feature_maps import FeatureMap, feature_map
from segue.students.mixing import Mixer, divided, every_head, with_ones


class LinearMixer(Mixer):
    """sum over s of (f(q_t) . f(k_s)) v_s, divided by the sum of the weights."""

    can_be_causal = True

    def __init__(self, kind: FeatureMap, heads: int, key_heads: int, head_size: int) -> None:
        super().__init__()
        self.of_queries = feature_map(kind, heads, head_size)
        self.of_keys = feature_map(kind, key_heads, head_size)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool) -> Tensor:
        q, k = self.of_queries(q), self.of_keys(k)  # (batch, heads, tokens, features)
        if keep is not None:
            k = k.masked_fill(~keep[:, None, :, None], 0.0)
        heads = q.shape[1]
        if causal:
            return divided(causal_sums(q, every_head(k, heads), with_ones(every_head(v, heads))))
        return divided(q @ every_head(k.transpose(-1, -2) @ with_ones(v), heads))


@dataclass(frozen=True, kw_only=True)
class LinearAttention(Operator):
    """Linear attention with the feature map 'elu' (Katharopoulos et al.), 'relu', 'hedgehog' (learned), or your own function.

    >>> LinearAttention(feature_map="hedgehog")
    LinearAttention(init=CopyMatching(), feature_map='hedgehog')
    """

    feature_map: FeatureMap = "elu"

    def mixer(self, geometry: Geometry) -> Mixer:
        return LinearMixer(self.feature_map, geometry.heads, geometry.key_heads, geometry.head_size)

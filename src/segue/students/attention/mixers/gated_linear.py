"""Gated linear attention: linear attention whose past fades, at a rate per head that each token decides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from segue.border import checked
from segue.students.attention.mixer import EPSILON, Mixer, append_ones
from segue.students.attention.mixers.gated import GatedMixer
from segue.students.attention.mixers.linear import FeatureMap
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec

__all__ = ["GatedLinear"]


class GatedLinearMixer(GatedMixer):
    """S_t = a_t S_(t-1) + w_t f(k_t) (v_t, 1)'; what f(q_t) reads is divided by the sum of its weights, the last column."""

    def written(self, k: Tensor, v: Tensor, write: Tensor, logs: Tensor) -> tuple[Tensor, Tensor | None]:
        return append_ones(v) * write, None

    def write_one(self, k: Tensor, v: Tensor, write: Tensor, faded: Tensor) -> Tensor:
        return torch.cat([v * write, write], dim=-1)

    def finish(self, y: Tensor, factor: Tensor) -> Tensor:
        values, weights = y.split_with_sizes([y.shape[-1] - 1, 1], -1)
        return values * (factor / weights.clamp_min(EPSILON))


@checked
@dataclass(frozen=True, kw_only=True)
class GatedLinear(Operator):
    """Linear attention with a decay, a write gate and an output gate, which each token decides."""

    cost = "n d²"
    paper = "https://arxiv.org/abs/2312.06635"
    mixer_class = GatedLinearMixer

    feature_map: FeatureMap = "hedgehog"

    def mixer(self, spec: AttentionSpec) -> Mixer:
        return GatedLinearMixer(self.feature_map, spec, decay=True)

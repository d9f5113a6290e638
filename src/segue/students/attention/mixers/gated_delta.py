"""The gated delta rule: a memory that corrects what it holds at a key, instead of adding to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from segue.border import checked
from segue.students.attention.mixer import Mixer, join_heads
from segue.students.attention.mixers.gated import GatedMixer, fading
from segue.students.attention.mixers.linear import FeatureMap
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec

__all__ = ["GatedDeltaNet"]


class GatedDeltaNetMixer(GatedMixer):
    """S_t = a_t (I - b_t f(k_t) f(k_t)') S_(t-1) + b_t f(k_t) v_t', read by f(q_t); features have length 1."""

    def scaled(self, features: Tensor) -> Tensor:
        return F.normalize(features, dim=-1, eps=1e-6)

    def both(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().both(q, k)
        q, k = self.scaled(join_heads(q, k)).split_with_sizes([q.shape[1], k.shape[1]], 1)
        return q, k

    def written(self, k: Tensor, v: Tensor, write: Tensor, logs: Tensor) -> tuple[Tensor, Tensor | None]:
        # u_t = b_t (v_t - what the state holds at k_t): its own chunk's part is a triangular system (the UT transform)
        known = write * (k @ k.transpose(-1, -2)) * fading(logs)
        right = torch.cat([write * v, write * logs.exp() * k], dim=-1)
        u = torch.linalg.solve_triangular(known.tril(-1), right, upper=False, unitriangular=True)
        return u[..., : v.shape[-1]], u[..., v.shape[-1] :]

    def write_one(self, k: Tensor, v: Tensor, write: Tensor, faded: Tensor) -> Tensor:
        known = torch.baddbmm(v.flatten(0, 1), k.flatten(0, 1), faded.flatten(0, 1), alpha=-1)
        return known.view(v.shape) * write


@checked
@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(Operator):
    """The delta rule with a decay that each token decides; `decay=False` is DeltaNet, which forgets only what it corrects."""

    cost = "n d²"
    paper = "https://arxiv.org/abs/2412.06464"
    mixer_class = GatedDeltaNetMixer

    feature_map: FeatureMap = "relu"
    decay: bool = True

    def mixer(self, spec: AttentionSpec) -> Mixer:
        return GatedDeltaNetMixer(self.feature_map, spec, self.decay)

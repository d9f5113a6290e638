"""Softmax attention itself: the control, equal to the teacher when its projections are copied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from segue.students.attention.mixer import Mixer, every_head
from segue.students.attention.module import Operator
from segue.students.attention.spec import Geometry


class SoftmaxMixer(Mixer):
    """sum over s of softmax_s(scale q_t . k_s) v_s."""

    can_be_causal = True

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool) -> Tensor:
        k, v = every_head(k, q.shape[1]), every_head(v, q.shape[1])
        if keep is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=self.scale)
        seen = keep[:, None, None, :]
        if causal:
            seen = seen & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)
        return y.masked_fill(~seen.any(-1, keepdim=True), 0.0)


@dataclass(frozen=True, kw_only=True)
class Softmax(Operator):
    """Softmax attention with projections of its own: what other operators are compared with."""

    def mixer(self, geometry: Geometry) -> Mixer:
        return SoftmaxMixer(geometry.logit_scale)

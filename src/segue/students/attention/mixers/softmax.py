"""Softmax attention itself: the control, equal to the teacher when its projections are copied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from segue.border import checked
from segue.students.attention.mixer import Mixer, repeat_heads
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec

__all__ = ["Softmax"]


class SoftmaxMixer(Mixer):
    """sum over s of softmax_s(scale q_t . k_s) v_s."""

    supports_causal = True

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def mix(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool) -> Tensor:
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        if token_mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=self.scale)
        visible = token_mask[:, None, None, :]
        if causal:
            visible = visible & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale)
        return y.masked_fill(~visible.any(-1, keepdim=True), 0.0)


@checked
@dataclass(frozen=True, kw_only=True)
class Softmax(Operator):
    """Softmax attention with projections of its own: the control for other operators."""

    cost = "n² d"
    paper = "https://arxiv.org/abs/1706.03762"
    mixer_class = SoftmaxMixer

    def mixer(self, spec: AttentionSpec) -> Mixer:
        return SoftmaxMixer(spec.logit_scale)

"""Softmax attention itself: the control, equal to the teacher when its projections are copied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from segue.border import checked
from segue.students.attention.mixer import Mixer, Sinks, additive_mask, repeat_heads, softmax_of
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec

__all__ = ["Softmax"]


class SoftmaxMixer(Mixer):
    """sum over s of softmax_s(scale q_t . k_s + bias_ts) v_s, with everything that a teacher may add to it."""

    supports_causal = True
    supports_cross = True
    dense = True
    honours = frozenset({"bias", "softcap", "sinks", "window"})

    def __init__(self, scale: float, softcap: float | None = None, sinks: Tensor | None = None) -> None:
        super().__init__()
        self.scale, self.softcap = scale, softcap
        self.sinks = None if sinks is None else Sinks(sinks)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool, bias: Tensor | None = None
    ) -> Tensor:
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        square = q.shape[2] == k.shape[2] or not causal
        if token_mask is None and bias is None and self.softcap is None and self.sinks is None and square:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=self.scale)
        visible = _visible(q, k, token_mask, causal)
        if bias is None and self.softcap is None and self.sinks is None:
            assert visible is not None
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale)
            return y.masked_fill(~visible.any(-1, keepdim=True), 0.0)
        y = self._weights(q, k, visible, bias) @ v
        return y if visible is None else y.masked_fill(~visible.any(-1, keepdim=True), 0.0)

    def weights(self, q: Tensor, k: Tensor, token_mask: Tensor | None, causal: bool, bias: Tensor | None) -> Tensor:
        """Return the weights of all pairs, (batch, heads, queries, keys)."""
        visible = _visible(q, k, token_mask, causal)
        bias = None if bias is None else bias.float()
        return self._weights(q.float(), repeat_heads(k, q.shape[1]).float(), visible, bias).to(q.dtype)

    def _weights(self, q: Tensor, k: Tensor, visible: Tensor | None, bias: Tensor | None) -> Tensor:
        if visible is not None:
            hidden = additive_mask(visible, q.dtype)
            bias = hidden if bias is None else (bias + hidden).clamp_min(torch.finfo(q.dtype).min)
        sinks = None if self.sinks is None else self.sinks.weight.view(-1, 1, 1)
        return softmax_of(self.scale * q @ k.transpose(-1, -2), bias, self.softcap, sinks)


def _visible(q: Tensor, k: Tensor, token_mask: Tensor | None, causal: bool) -> Tensor | None:
    visible = None if token_mask is None else token_mask[:, None, None, :]
    if not causal:
        return visible
    past = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return past if visible is None else visible & past


@checked
@dataclass(frozen=True, kw_only=True)
class Softmax(Operator):
    """Softmax attention with projections of its own: the control for other operators."""

    cost = "n² d"
    paper = "https://arxiv.org/abs/1706.03762"
    mixer_class = SoftmaxMixer

    def mixer(self, spec: AttentionSpec) -> Mixer:
        return SoftmaxMixer(spec.logit_scale, spec.softcap, spec.sinks)

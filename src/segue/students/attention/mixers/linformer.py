"""Linformer: keys and values projected along the sequence to a fixed number of rows, learned by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from segue.border import PositiveInt, checked
from segue.errors import StudentError
from segue.students.attention.mixer import Mixer, repeat_heads
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec

__all__ = ["Linformer"]


class LinformerMixer(Mixer):
    """softmax(scale q . (E k)) (F v), with E and F (rank, tokens) shared by the heads."""

    supports_cross = True

    def __init__(self, rank: int, tokens: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.of_keys = nn.Parameter(torch.empty(rank, tokens))
        self.of_values = nn.Parameter(torch.empty(rank, tokens))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw rows whose sums have the variance of what they sum."""
        for weight in (self.of_keys, self.of_values):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool) -> Tensor:
        tokens, longest = k.shape[2], self.of_keys.shape[1]
        if tokens > longest:
            raise StudentError(
                f"Linformer takes at most {longest} tokens, got {tokens}.",
                "It learns one weight per position.",
                f"make it longer: Linformer(tokens={tokens}).",
            )
        k = self.of_keys[:, :tokens].to(k.dtype) @ k  # (batch, heads, rank, head size)
        v = self.of_values[:, :tokens].to(v.dtype) @ v
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        return (self.scale * q @ k.transpose(-1, -2)).softmax(-1) @ v


@checked
@dataclass(frozen=True, kw_only=True)
class Linformer(Operator):
    """Attention to `rank` learned sums over the sequence, of at most `tokens` tokens (needed where the model has no limit)."""

    cost = "n rank d"
    paper = "https://arxiv.org/abs/2006.04768"
    mixer_class = LinformerMixer

    rank: PositiveInt = 64
    tokens: PositiveInt | None = None

    def mixer(self, spec: AttentionSpec) -> Mixer:
        tokens = self.tokens or spec.tokens
        if tokens is None:
            raise StudentError(
                "Linformer needs the length of the longest sequence.",
                "It learns one weight per position, and this model does not say how many positions it has.",
                "give it: Linformer(rank=64, tokens=197). Nothing was changed.",
            )
        return LinformerMixer(self.rank, tokens, spec.logit_scale)

"""Linformer: the sequence of keys and values is projected to a fixed number of rows, learned by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from segue.errors import StudentError
from segue.students.attention.mixer import Mixer, every_head
from segue.students.attention.module import Operator, positive
from segue.students.attention.spec import Geometry


class LinformerMixer(Mixer):
    """softmax(scale q . (E k)) (F v), with E and F (rank, tokens) shared by the heads."""

    def __init__(self, rank: int, tokens: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.of_keys = nn.Parameter(torch.empty(rank, tokens))
        self.of_values = nn.Parameter(torch.empty(rank, tokens))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw rows that keep the size of what they sum."""
        for weight in (self.of_keys, self.of_values):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool) -> Tensor:
        tokens, longest = k.shape[2], self.of_keys.shape[1]
        if tokens > longest:
            raise StudentError(
                f"Linformer was called with {tokens} tokens.",
                f"It has learned positions for {longest}.",
                f"make it longer: Linformer(tokens={tokens}).",
            )
        k = self.of_keys[:, :tokens].to(k.dtype) @ k  # (batch, heads, rank, head size)
        v = self.of_values[:, :tokens].to(v.dtype) @ v
        k, v = every_head(k, q.shape[1]), every_head(v, q.shape[1])
        return (self.scale * q @ k.transpose(-1, -2)).softmax(-1) @ v


@dataclass(frozen=True, kw_only=True)
class Linformer(Operator):
    """Attention to `rank` learned sums over the sequence, which has at most `tokens` tokens (where the model does not say)."""

    rank: int = 64
    tokens: int | None = None

    def mixer(self, geometry: Geometry) -> Mixer:
        tokens = self.tokens or geometry.tokens
        if tokens is None:
            raise StudentError(
                "Linformer was asked for a student.",
                "It learns one weight per position, and this model does not say how many positions it has.",
                "say the longest sequence: Linformer(rank=64, tokens=197). Nothing was changed.",
            )
        return LinformerMixer(positive("rank", self.rank), positive("tokens", tokens), geometry.logit_scale)

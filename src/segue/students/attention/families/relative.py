"""Relative positions: what modules of vision models add to their logits, and the cosine that some of them take instead.

A bias is a module, (queries, keys) -> (1, heads, queries, keys), and knows for how many `tokens` it is made.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEEPEST = math.log(100.0)  # the logarithm of the largest factor of a cosine


class TableBias(nn.Module):
    """One number for each head and each distance between two tokens (Swin, BEiT, LeViT)."""

    index: Tensor

    def __init__(self, table: Tensor, index: Tensor) -> None:
        super().__init__()
        self.tokens = math.isqrt(index.numel())
        self.table = nn.Parameter(table.detach().clone())  # (distances, heads)
        self.register_buffer("index", index.detach().clone().flatten(), persistent=False)

    def reset_parameters(self) -> None:
        """Start without a preference."""
        nn.init.zeros_(self.table)

    def forward(self, queries: int, keys: int) -> Tensor:
        return _pairs(self.table, self.index, self.tokens)


class ContinuousBias(nn.Module):
    """The same, computed from the distances by an MLP (Swin v2)."""

    distances: Tensor
    index: Tensor

    def __init__(self, mlp: nn.Module, distances: Tensor, index: Tensor) -> None:
        super().__init__()
        self.tokens = math.isqrt(index.numel())
        self.mlp = mlp
        self.register_buffer("distances", distances.detach().clone(), persistent=False)
        self.register_buffer("index", index.detach().clone().flatten(), persistent=False)

    def forward(self, queries: int, keys: int) -> Tensor:
        table = self.mlp(self.distances).flatten(0, -2)
        return 16 * _pairs(table, self.index, self.tokens).sigmoid()


class OwnBias(nn.Module):
    """A module of timm that computes its bias itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        with torch.no_grad():
            self.tokens = int(self(0, 0).shape[-1])

    def forward(self, queries: int, keys: int) -> Tensor:
        bias: Tensor = self.module.get_bias()  # type: ignore[operator]
        return bias


class UnitLength(nn.Module):
    """Divide keys by their length."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


class ScaledUnitLength(nn.Module):
    """Divide queries by their length and multiply them by a factor of each head: the logits are scaled cosines."""

    def __init__(self, logit_scale: Tensor) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(logit_scale.detach().clone())  # a logarithm, (heads, 1, 1)

    def reset_parameters(self) -> None:
        """Start with the factor that Swin v2 starts with."""
        nn.init.constant_(self.logit_scale, math.log(10.0))

    def forward(self, x: Tensor) -> Tensor:
        factor = self.logit_scale.clamp(max=STEEPEST).exp().view(-1, 1)
        return F.normalize(x, dim=-1) * factor  # (batch, tokens, heads, head size)


def relative_bias(module: nn.Module) -> nn.Module | None:
    """Return what a module adds to its logits by the relative positions of tokens, where its parts have known names."""
    held: dict[str, Any] = {**module._parameters, **module._buffers, **module._modules}
    inside = held.get("relative_position_bias")  # of Hugging Face's Swin
    if isinstance(inside, nn.Module):
        held |= {**inside._parameters, **inside._buffers}
    index, table = held.get("relative_position_index"), held.get("relative_position_bias_table")
    mlp, distances = held.get("cpb_mlp", held.get("continuous_position_bias_mlp")), held.get("relative_coords_table")
    if isinstance(index, Tensor) and isinstance(table, Tensor):
        return TableBias(table, index)
    if isinstance(index, Tensor) and isinstance(mlp, nn.Module) and isinstance(distances, Tensor):
        return ContinuousBias(mlp, distances, index)
    index, table = held.get("attention_bias_idxs"), held.get("attention_biases")
    if isinstance(index, Tensor) and isinstance(table, Tensor):
        return TableBias(table.T, index)
    own = held.get("rel_pos")
    return OwnBias(own) if isinstance(own, nn.Module) and hasattr(own, "get_bias") else None


def _pairs(table: Tensor, index: Tensor, tokens: int) -> Tensor:
    return table[index].view(tokens, tokens, -1).permute(2, 0, 1)[None]

"""Feature maps: how linear attention turns queries and keys into non-negative features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.errors import StudentError

FeatureMap: TypeAlias = "Literal['elu', 'relu', 'hedgehog'] | Callable[[Tensor], Tensor]"


class Hedgehog(nn.Module):
    """A learned map per head, softmax(x W) beside softmax(-x W): twice the head size, each half summing to 1."""

    def __init__(self, heads: int, head_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, head_size, head_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Begin with the identity, as the authors do."""
        self.weight.copy_(torch.eye(self.weight.shape[-1], device=self.weight.device).expand_as(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.to(x.dtype)
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], dim=-1)


class Fixed(nn.Module):
    """A map without weights."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def elu_plus_one(x: Tensor) -> Tensor:
    """Map to exp(x) below 0 and to 1 + x above."""
    return F.elu(x) + 1


def feature_map(kind: FeatureMap, heads: int, head_size: int) -> nn.Module:
    """Make the map for so many heads.

    >>> feature_map("elu", 2, 4)(torch.zeros(1, 2, 3, 4)).unique().item()
    1.0
    """
    if kind == "elu":
        return Fixed(elu_plus_one)
    if kind == "relu":
        return Fixed(F.relu)
    if kind == "hedgehog":
        return Hedgehog(heads, head_size)
    if callable(kind) and not isinstance(kind, type | nn.Module):
        return Fixed(kind)
    raise StudentError(
        f"feature_map={kind!r} was asked for.",
        "The choices are 'elu', 'relu', 'hedgehog', or a function from a tensor to non-negative features.",
        "wrap a module or a class in a function.",
    )

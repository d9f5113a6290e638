"""A small vision transformer, written to be read."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.border import PositiveInt, checked
from segue.students import AttentionCall, AttentionInterface, AttentionSpec, projection, register_attention, split_qkv


class Attention(nn.Module):
    """Multi-head self-attention with its output projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, heads, N, width / heads)
        y = F.scaled_dot_product_attention(q, k, v)
        output: Tensor = self.proj(y.transpose(1, 2).flatten(2))  # (B, N, width)
        return output


class SmallVitAttention(AttentionInterface):
    """How operators read and call it; a model of your own needs the same few lines."""

    def parse(self, module: nn.Module) -> AttentionSpec:
        assert isinstance(module, Attention)
        query, key, value = split_qkv(projection(module.qkv))
        size = query.weight.shape[0] // module.heads
        output = projection(module.proj)
        return AttentionSpec(heads=module.heads, head_size=size, query=query, key=key, value=value, output=output)

    def unpack(self, x: Tensor) -> AttentionCall:
        return AttentionCall(x)


register_attention(Attention, SmallVitAttention)


class Block(nn.Module):
    """A pre-norm residual block: what `.attn` and `.mlp` return is added to the stream."""

    def __init__(self, width: int, heads: int, expansion: int = 4) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, expansion * width), nn.GELU(), nn.Linear(expansion * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


def convolutional_stem(channels: int, patch: int, width: int) -> nn.Sequential:
    """Halve the image until a pixel stands for a patch; group norms, which have no running statistics to drift."""
    halvings = patch.bit_length() - 1
    widths = [channels, *(width >> step for step in reversed(range(halvings)))]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, kernel_size=3, stride=2, padding=1), nn.GroupNorm(1, after), nn.GELU()]
    return nn.Sequential(*layers[:-2])  # the blocks have norms of their own


class VisionTransformer(nn.Module):
    """Read an image as patches and name its class.

    >>> VisionTransformer()(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """

    @checked
    def __init__(
        self,
        *,
        pixels: PositiveInt = 8,
        channels: PositiveInt = 1,
        patch: PositiveInt = 2,
        width: PositiveInt = 48,
        depth: PositiveInt = 6,
        heads: PositiveInt = 4,
        classes: PositiveInt = 10,
        convolutional: bool = False,
    ) -> None:
        super().__init__()
        self.patches = (
            convolutional_stem(channels, patch, width)
            if convolutional
            else nn.Conv2d(channels, width, kernel_size=patch, stride=patch)
        )
        self.positions = nn.Parameter(0.02 * torch.randn(1, (pixels // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)  # (B, N, width)
        x = self.blocks(x + self.positions)
        logits: Tensor = self.head(self.norm(x).mean(1))  # (B, classes)
        return logits

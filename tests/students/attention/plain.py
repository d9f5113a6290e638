"""Attention as people write it in their own repositories, such as nanoGPT, minGPT, vit-pytorch, torchtune and torchtitan."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS = 32, 4
SIZE = WIDTH // HEADS


class NanoAttention(nn.Module):
    """One projection, causal inside, as in nanoGPT."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, flash: bool = True) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.n_head, self.n_embd, self.dropout, self.flash = heads, width, 0.0, flash

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.size()
        q, k, v = (part.view(batch, tokens, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(self.n_embd, 2))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
            seen = torch.ones(tokens, tokens, device=x.device).tril() > 0
            y = self.attn_dropout(scores.masked_fill(~seen, -torch.inf).softmax(-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(batch, tokens, width)))


class MiniAttention(nn.Module):
    """Three projections and a buffer with the causal mask, as in the first minGPT."""

    def __init__(self, longest: int = 16) -> None:
        super().__init__()
        self.key, self.query, self.value, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attn_drop, self.resid_drop = nn.Dropout(0.0), nn.Dropout(0.0)
        self.register_buffer("mask", torch.ones(longest, longest).tril().view(1, 1, longest, longest))
        self.n_head = HEADS

    def forward(self, x: Tensor, layer_past: None = None) -> Tensor:
        batch, tokens, width = x.size()
        q, k, v = (part(x).view(batch, tokens, self.n_head, -1).transpose(1, 2) for part in (self.query, self.key, self.value))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :tokens, :tokens] == 0, -torch.inf)
        y = (self.attn_drop(scores.softmax(-1)) @ v).transpose(1, 2).reshape(batch, tokens, width)
        return self.resid_drop(self.proj(y))


class NormedAttention(nn.Module):
    """A norm inside and the output in a Sequential, as in vit-pytorch."""

    def __init__(self, project: bool = True) -> None:
        super().__init__()
        self.heads, self.scale = HEADS, SIZE**-0.5
        self.norm = nn.LayerNorm(WIDTH)
        self.attend, self.dropout = nn.Softmax(dim=-1), nn.Dropout(0.0)
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.to_qkv(self.norm(x)).chunk(3, -1))
        weights = self.dropout(self.attend(q @ k.transpose(-1, -2) * self.scale))
        y: Tensor = self.to_out((weights @ v).transpose(1, 2).flatten(2))
        return y


class ComplexRotation(nn.Module):
    """Grouped queries and a rotation by complex numbers, as in torchtitan's Llama."""

    def __init__(self, key_heads: int = 2) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.n_rep, self.head_dim = HEADS, key_heads, HEADS // key_heads, SIZE
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, key_heads * SIZE, bias=False) for _ in range(2))

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.wq, self.wk, self.wv))
        q, k = (turn(part, freqs_cis) for part in (q, k))
        k, v = (part.repeat_interleave(self.n_rep, dim=2) for part in (k, v))
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def turn(x: Tensor, by: Tensor) -> Tensor:
    """Multiply neighbouring features, read as complex numbers, by others; x is (batch, tokens, heads, head size)."""
    numbers = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(numbers * by[None, : x.shape[1], None]).flatten(-2).type_as(x)


def angles(tokens: int) -> Tensor:
    """Return the rotation of each token, (tokens, head size / 2)."""
    speeds = 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    return torch.polar(torch.ones(tokens, SIZE // 2), torch.arange(tokens)[:, None] * speeds)


class Rotary(nn.Module):
    """Rotate (batch, tokens, heads, head size) by interleaved pairs, from positions that it knows itself."""

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        return turn(x, angles(x.shape[1]))


class RotaryInside(nn.Module):
    """A module that rotates, inside; torchtune's names."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.is_causal = HEADS, 2, SIZE, True
        self.q_proj, self.output_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, 2 * SIZE, bias=False) for _ in range(2))
        self.pos_embeddings = Rotary()

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, mask: Tensor | None = None, input_pos: Tensor | None = None
    ) -> Tensor:
        y = x if y is None else y
        q, k, v = (part(z).unflatten(-1, (-1, SIZE)) for part, z in ((self.q_proj, x), (self.k_proj, y), (self.v_proj, y)))
        q, k = (self.pos_embeddings(part, input_pos=input_pos) for part in (q, k))
        q, k, v = (part.repeat_interleave(HEADS // part.shape[2], dim=2).transpose(1, 2) for part in (q, k, v))
        seen = None if mask is None else mask[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=mask is None)
        return self.output_proj(out.transpose(1, 2).flatten(2))


class Alibi(nn.Module):
    """A penalty for distance that is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=slopes(x.shape[1], x.shape[1]))
        return self.proj(y.transpose(1, 2).flatten(2))


def slopes(queries: int, keys: int) -> Tensor:
    """Return the penalties, (1, heads, queries, keys)."""
    distance = (torch.arange(keys) - torch.arange(queries)[:, None]).abs()
    return -(2.0 ** -torch.arange(1, HEADS + 1))[None, :, None, None] * distance

"""Models as people write them themselves, in the style of well-known small repositories; taught to Segue where needed.

Each is written for this matrix. Attention that Segue cannot read by its names is registered as the documentation shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from segue.students import AttentionCall, AttentionSpec, ByName
from tests.matrix.entries import TOKENS, VOCABULARY, Batch, Entry, features, images, token_ids

WIDTH, HEADS = 32, 4
SIZE = WIDTH // HEADS


def ids() -> Batch:
    return Batch((token_ids(),), tokens=0)


def hidden() -> Batch:
    return Batch((features(WIDTH),), tokens=0)


class Stack(nn.Module):
    """Blocks with residual connections, between an embedding and a head."""

    def __init__(self, embed: nn.Module, blocks: list[nn.Module], positions: bool = True) -> None:
        super().__init__()
        self.embed = embed
        self.positions = nn.Parameter(torch.zeros(64, WIDTH)) if positions else None
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.positions is not None:
            x = x + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    """Pre-norm, attention and MLP, with whatever the attention takes besides its input."""

    def __init__(self, attn: nn.Module, mlp: nn.Module, *given: Tensor) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(WIDTH), attn, nn.LayerNorm(WIDTH), mlp
        for i, tensor in enumerate(given):
            self.register_buffer(f"given{i}", tensor, persistent=False)
        self.count = len(given)

    def forward(self, x: Tensor) -> Tensor:
        given = [getattr(self, f"given{i}") for i in range(self.count)]
        x = x + self.attn(self.ln_1(x), *given)
        return x + self.mlp(self.ln_2(x))


class GptMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(i, o, bias=False) for i, o in ((WIDTH, 48), (48, WIDTH), (WIDTH, 48)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, SIZE)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class FusedCausal(nn.Module):
    """In the style of nanoGPT: one projection, torch's own causal attention, dropout after the output."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.resid_dropout = nn.Dropout(0.1)
        self.n_head, self.n_embd = HEADS, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(part) for part in self.c_attn(x).split(self.n_embd, dim=2))
        return self.resid_dropout(self.c_proj(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))))


class MaskedCausal(nn.Module):
    """In the style of minGPT: three projections, a triangle in a buffer, softmax written out."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("bias", torch.ones(64, 64).tril()[None, None])
        self.n_head = HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads_of(self.query(x)), heads_of(self.key(x)), heads_of(self.value(x))
        tokens = x.shape[1]
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(SIZE)
        scores = scores.masked_fill(self.bias[:, :, :tokens, :tokens] == 0, float("-inf"))
        return self.proj(joined(scores.softmax(-1) @ v))


class InnerNorm(nn.Module):
    """In the style of vit-pytorch: the norm is inside, the output is a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))
        self.heads, self.scale = HEADS, SIZE**-0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(part) for part in self.to_qkv(self.norm(x)).chunk(3, dim=-1))
        return self.to_out(joined((q @ k.transpose(-1, -2) * self.scale).softmax(-1) @ v))


class Projected(nn.Module):
    """In the style of x-transformers: three projections without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.heads = HEADS

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = heads_of(self.to_q(x)), heads_of(self.to_k(x)), heads_of(self.to_v(x))
        return self.to_out(joined(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))


class Penalised(Projected):
    """The same, always given what is added to its logits."""


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate neighbouring features, as complex numbers."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2)


def turns_of(tokens: int) -> Tensor:
    speed = 100.0 ** -(torch.arange(SIZE // 2) / (SIZE // 2))
    return torch.polar(torch.ones(tokens, SIZE // 2), torch.arange(tokens)[:, None] * speed)


class ComplexRotary(nn.Module):
    """In the style of torchtitan's Llama: wq to wo, grouped queries, neighbouring features rotated by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.n_heads, self.n_kv_heads, self.head_dim = HEADS, HEADS // 2, SIZE

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        q, k = (turned(heads_of(part), freqs_cis) for part in (self.wq(x), self.wk(x)))
        v = heads_of(self.wv(x))
        return self.wo(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))


class Turning(nn.Module):
    """Rotate (batch, heads, tokens, head size) by positions that it counts itself."""

    def forward(self, x: Tensor) -> Tensor:
        return turned(x, turns_of(x.shape[2]))


class RotaryInside(nn.Module):
    """In the style of torchtune: q_proj to output_proj, grouped queries, and a module that rotates, inside."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.output_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.num_heads, self.num_kv_heads, self.head_dim, self.is_causal = HEADS, HEADS // 2, SIZE, True
        self.pos_embeddings = Turning()

    def forward(self, x: Tensor) -> Tensor:
        q, k = (self.pos_embeddings(heads_of(part)) for part in (self.q_proj(x), self.k_proj(x)))
        v = heads_of(self.v_proj(x))
        return self.output_proj(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2).transpose(1, 2)


def slopes() -> Tensor:
    """ALiBi: a penalty for the distance, another one for each head; the future is hidden."""
    place = torch.arange(TOKENS)
    distance = (place[None] - place[:, None]).float()
    penalty = distance * (2.0 ** -torch.arange(1.0, HEADS + 1))[:, None, None]
    return penalty.masked_fill(distance > 0, float("-inf"))[None]


def teach_alibi() -> None:
    """Say that what the module is given besides its input is added to the logits."""

    class Interface(ByName):
        def parse(self, module: nn.Module) -> AttentionSpec:
            return replace(super().parse(module), biased=True)

        def unpack(self, x: Tensor, bias: Tensor | None = None) -> AttentionCall:
            return AttentionCall(x, bias=bias)

    segue.students.register_attention(Penalised, Interface)


def teach_torchtune() -> None:
    """Say that queries and keys are rotated inside, and by what."""

    class Interface(ByName):
        def __init__(self, module: nn.Module, **reading: Any) -> None:
            super().__init__(module, **reading)
            self.turn = module.pos_embeddings

        def unpack(self, x: Tensor) -> AttentionCall:
            return AttentionCall(x, rotary=self.turn)

        def rotate(self, q: Tensor, k: Tensor, rotary: nn.Module) -> tuple[Tensor, Tensor]:
            return rotary(q), rotary(k)

    segue.students.register_attention(RotaryInside, Interface)


def embedding() -> nn.Module:
    return nn.Embedding(VOCABULARY, WIDTH)


def stack(
    embed: Callable[[], nn.Module],
    attn: Callable[[], nn.Module],
    mlp: Callable[[], nn.Module],
    given: Callable[[], Tensor] | None = None,
) -> Callable[[int], nn.Module]:
    """Return what builds a model of some layers; what its attention is given says the positions."""

    def build(layers: int) -> nn.Module:
        others = [] if given is None else [given()]
        return Stack(embed(), [Block(attn(), mlp(), *others) for _ in range(layers)], positions=not others)

    return build


PLACES = {"attention": "blocks.*.attn", "mlp": "blocks.*.mlp", "layers": "blocks"}
ENTRIES = [
    Entry("plain nanoGPT", stack(embedding, FusedCausal, GptMlp), ids, causal=True, **PLACES),
    Entry("plain minGPT", stack(embedding, MaskedCausal, GptMlp), ids, causal=True, **PLACES),
    Entry("plain vit-pytorch", stack(Patches, InnerNorm, GptMlp), images, **PLACES),
    Entry("plain x-transformers", stack(nn.Identity, Projected, GptMlp), hidden, **PLACES),
    Entry(
        "plain x-transformers, ALiBi",
        stack(nn.Identity, Penalised, GptMlp, slopes),
        hidden,
        teach=teach_alibi,
        causal=True,
        **PLACES,
    ),
    Entry(
        "plain torchtitan Llama",
        stack(embedding, ComplexRotary, GatedMlp, lambda: turns_of(TOKENS)),
        ids,
        causal=True,
        **PLACES,
    ),
    Entry("plain torchtune", stack(embedding, RotaryInside, GatedMlp), ids, teach=teach_torchtune, causal=True, **PLACES),
]

"""torch's own attention, called in the ways that people call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.matrix.entries import TOKENS, Batch, Entry, features, real_tokens

WIDTH = 32


class Layer(nn.Module):
    """A pre-norm layer around nn.MultiheadAttention, which `style` calls."""

    def __init__(self, style: Callable[..., Tensor], **settings: Any) -> None:
        super().__init__()
        self.style = style
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 4, **{"batch_first": True, **settings})
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        x = x + self.style(self.attn, self.norm1, x, **given)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Learned positions and layers."""

    def __init__(self, layers: int, style: Callable[..., Tensor], **settings: Any) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.layers = nn.ModuleList(Layer(style, **settings) for _ in range(layers))

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        x = x + self.positions
        for layer in self.layers:
            x = layer(x, **given)
        return x


def same(attn: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    h = norm(x)
    return attn(h, h, h, need_weights=False)[0]


def three_norms(attn: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    return attn(norm(x), norm(x), norm(x), need_weights=False)[0]


def with_weights(attn: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    h = norm(x)
    y, weights = attn(h, h, h)
    return y + weights.amax(-1, keepdim=True)


def causal_mask(attn: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    h = norm(x)
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return attn(h, h, h, attn_mask=future, need_weights=False)[0]


def causal_flag(attn: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    h = norm(x)
    future = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    return attn(h, h, h, attn_mask=future, is_causal=True, need_weights=False)[0]


def padded(attn: nn.Module, norm: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    h = norm(x)
    return attn(h, h, h, key_padding_mask=padding, need_weights=False)[0]


def float_padded(attn: nn.Module, norm: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    h = norm(x)
    hidden = torch.zeros(padding.shape).masked_fill(padding, float("-inf"))
    return attn(h, h, h, key_padding_mask=hidden, need_weights=False)[0]


def biased(attn: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    h = norm(x)
    place = torch.arange(x.shape[1]).float()
    return attn(h, h, h, attn_mask=-0.5 * (place[:, None] - place).abs(), need_weights=False)[0]


def detr(attn: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    h = norm(x)
    q = h + torch.linspace(-1, 1, h.shape[1])[:, None]
    return attn(q, q, h, need_weights=False)[0]


def tokens_first(attn: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    h = norm(x).transpose(0, 1)
    return attn(h, h, h, need_weights=False)[0].transpose(0, 1)


def one_sequence(attn: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([attn(h, h, h, need_weights=False)[0] for h in norm(x)])


def cross(attn: nn.Module, norm: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
    return attn(norm(x), memory, memory, need_weights=False)[0]


def plain_batch() -> Batch:
    return Batch((features(WIDTH),), tokens=0)


def padded_batch() -> Batch:
    mask = real_tokens()
    return Batch((features(WIDTH),), {"padding": ~mask}, tokens=0, real=mask)


def memory_batch() -> Batch:
    return Batch((features(WIDTH),), {"memory": features(WIDTH, 6).flip(1)})


def attention(
    name: str,
    style: Callable[..., Tensor],
    batch: Callable[[], Batch] = plain_batch,
    causal: bool = False,
    part: bool = False,
    **settings: Any,
) -> Entry:
    return Entry(
        f"torch MultiheadAttention, {name}",
        lambda n: Model(n, style, **settings),
        batch,
        "layers.*.attn",
        "layers.*.mlp",
        "layers",
        causal=causal,
        part=part,
    )


def torch_encoder(**settings: Any) -> Callable[[int], nn.Module]:
    def build(layers: int) -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True, **settings)
        return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    return build


def torch_decoder(layers: int) -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 4, 64, batch_first=True), layers)


def torch_transformer(layers: int) -> nn.Module:
    return nn.Transformer(WIDTH, 4, layers, layers, 64, batch_first=True)


def source() -> Batch:
    mask = real_tokens()
    return Batch((features(WIDTH),), {"src_key_padding_mask": ~mask}, tokens=0, real=mask)


def target() -> Batch:
    future = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return Batch((features(WIDTH), features(WIDTH, 6)), {"tgt_mask": future}, tokens=0)


def both() -> Batch:
    future = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return Batch((features(WIDTH, 6), features(WIDTH)), {"tgt_mask": future}, tokens=1)


ENTRIES = [
    attention("x, x, x", same),
    attention("norm(x) three times", three_norms),
    attention("weights used", with_weights, part=True),
    attention("causal mask alone", causal_mask, causal=True, part=True),
    attention("causal flag and mask", causal_flag, causal=True, part=True),
    attention("padding", padded, padded_batch),
    attention("padding as floats", float_padded, padded_batch, part=True),
    attention("bias as a mask", biased, part=True),
    attention("DETR's q = k = x + position", detr, part=True),
    attention("tokens first", tokens_first, batch_first=False, part=True),
    attention("one sequence at a time", one_sequence, part=True),
    attention("cross-attention", cross, memory_batch, part=True),
    attention("bias_k and bias_v", same, add_bias_kv=True, part=True),
    attention(
        "keys of another width",
        cross,
        lambda: Batch((features(WIDTH),), {"memory": features(24, 6)}),
        part=True,
        kdim=24,
        vdim=24,
    ),
    Entry("torch TransformerEncoder", torch_encoder(), source, "layers.*.self_attn", None, "layers"),
    Entry("torch TransformerEncoder, norm first", torch_encoder(norm_first=True), source, "layers.*.self_attn", None, "layers"),
    Entry("torch TransformerDecoder", torch_decoder, target, "layers.*.self_attn", None, "layers", causal=True),
    Entry("torch TransformerDecoder, cross-attention", torch_decoder, target, "layers.*.multihead_attn", part=True),
    Entry(
        "torch Transformer, decoder", torch_transformer, both, "decoder.layers.*.self_attn", None, "decoder.layers", causal=True
    ),
]

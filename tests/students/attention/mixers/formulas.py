"""What naive references are built of: every formula by its full (tokens, tokens) matrix of weights, in float64.

Nothing of the library's arithmetic is used here. A reference, `naive` in the test of each operator, reads the settings from the
operator and the spec, and only learned or random tensors from the mixer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from segue.students import AttentionSpec

LEAST_SUM = 1e-6  # linear attention divides by no smaller sum of weights


def prepared(q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return keys and values for every query head with zeros at padding, the token mask, and which pairs are visible."""
    batch, heads, tokens, _ = q.shape
    if token_mask is None:
        token_mask = torch.ones(batch, tokens, dtype=torch.bool)
    zeros = torch.zeros(())
    k, v = (torch.where(token_mask[:, None, :, None], one_per_query_head(x, heads), zeros) for x in (k, v))  # NaN * 0 is NaN
    return k, v, token_mask, visible(token_mask, causal)


def zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def one_per_query_head(x: Tensor, heads: int) -> Tensor:
    """Let query head h use key head h // (queries per key head)."""
    group = heads // x.shape[1]
    return x[:, [h // group for h in range(heads)]]


def distance(tokens: int) -> Tensor:
    """Return how far key s is ahead of query t, as (queries, keys)."""
    position = torch.arange(tokens)
    return position[None, :] - position[:, None]


def visible(token_mask: Tensor, causal: bool) -> Tensor:
    """Mark which keys a query may see, (batch, 1, queries, keys)."""
    tokens = token_mask.shape[1]
    allowed = distance(tokens) <= 0 if causal else torch.ones(tokens, tokens, dtype=torch.bool)
    return (token_mask[:, None, :] & allowed)[:, None]


def logits(spec: AttentionSpec, q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhtd,bhsd->bhts", q, k) * scale_of(spec)


def scale_of(spec: AttentionSpec) -> float:
    return 1 / math.sqrt(spec.head_size) if spec.scale is None else spec.scale


def softmax_weights(logarithms: Tensor, seen: Tensor) -> Tensor:
    """Return exp(logarithm - logsumexp of the row) over what is visible, zeros in a row that sees nothing."""
    sees_any = seen.any(-1, keepdim=True)
    hidden = logarithms.masked_fill(~seen & sees_any, -math.inf)
    total = torch.logsumexp(hidden, dim=-1, keepdim=True)
    return (hidden - total).exp() * sees_any


def normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp_min(LEAST_SUM)


def features(kind: str | Callable[[Tensor], Tensor], map_: nn.Module, x: Tensor) -> Tensor:
    """Apply a feature map to (batch, heads, tokens, head size)."""
    if kind == "elu":
        return torch.where(x > 0, 1 + x, x.clamp_max(0).exp())
    if kind == "relu":
        return x.clamp_min(0)
    if kind == "hedgehog":
        return torch.stack([hedgehog(x[:, h], weight) for h, weight in enumerate(map_.weight)], dim=1)
    return kind(x)


def hedgehog(x: Tensor, weight: Tensor) -> Tensor:
    """Return softmax(x W) and softmax(-x W) for one head."""
    y = torch.einsum("btd,de->bte", x, weight)
    halves = [(z - torch.logsumexp(z, dim=-1, keepdim=True)).exp() for z in (y, -y)]
    return torch.cat(halves, dim=-1)


def feature_products(kind: str | Callable[[Tensor], Tensor], mixer: nn.Module, q: Tensor, k: Tensor) -> Tensor:
    """Return f(q_t) . f(k_s); keys arrive once per query head, but their map has one weight per key head."""
    of_queries = features(kind, mixer.of_queries, q)
    if kind == "hedgehog":
        key_heads = mixer.of_keys.weight.shape[0]
        group = q.shape[1] // key_heads
        of_keys = torch.stack([hedgehog(k[:, h], mixer.of_keys.weight[h // group]) for h in range(q.shape[1])], dim=1)
    else:
        of_keys = features(kind, mixer.of_keys, k)
    return torch.einsum("bhtf,bhsf->bhts", of_queries, of_keys)

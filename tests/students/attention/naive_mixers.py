"""What the mixers are compared with: every formula by its full (tokens, tokens) matrix of weights, in float64.

Nothing of the library's arithmetic is used here. A reference reads the settings from the operator and the geometry, and only
learned or drawn tensors from the mixer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from segue.students import (
    Fourier,
    Geometry,
    LinearAttention,
    Linformer,
    Nystrom,
    Performer,
    SlidingWindow,
    Softmax,
    WindowedLinear,
)
from segue.students.attention.module import Operator

LEAST_SUM = 1e-6  # linear attention divides by no smaller sum of weights


def mixed(
    operator: Operator, geometry: Geometry, mixer: nn.Module, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool
) -> Tensor:
    """Return what the operator's formula says."""
    batch, heads, tokens, _ = q.shape
    k, v = one_per_query_head(k, heads), one_per_query_head(v, heads)
    if keep is None:
        keep = torch.ones(batch, tokens, dtype=torch.bool)
    k, v = (torch.where(keep[:, None, :, None], x, torch.zeros(())) for x in (k, v))  # NaN * 0 would be NaN
    seen = visible(keep, causal)  # (batch, 1, queries, keys)
    if isinstance(operator, Softmax):
        return softmax_weights(logits(geometry, q, k), seen) @ v
    if isinstance(operator, LinearAttention):
        return normalised(feature_products(operator.feature_map, mixer, q, k).where(seen, zero())) @ v
    if isinstance(operator, Performer):
        return softmax_weights(performer_logits(geometry, mixer.directions, q, k), seen) @ v
    if isinstance(operator, Linformer):
        return linformer(geometry, mixer, q, k, v)
    if isinstance(operator, SlidingWindow):
        first = keep & (keep.cumsum(1) <= operator.global_tokens)  # padding before a sequence is no token of it
        near = (distance(tokens).abs() < operator.window) | first[:, None, :] | first[:, :, None]
        return softmax_weights(logits(geometry, q, k), seen & near[:, None]) @ v
    if isinstance(operator, WindowedLinear):
        return normalised(windowed_weights(operator, geometry, mixer, q, k, seen)) @ v
    if isinstance(operator, Nystrom):
        return nystrom(operator, geometry, q, k, v, keep)
    assert isinstance(operator, Fourier)
    return fourier(v)


def zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def one_per_query_head(x: Tensor, heads: int) -> Tensor:
    """Let query head h use key head h // (queries per key head)."""
    group = heads // x.shape[1]
    return x[:, [h // group for h in range(heads)]]


def distance(tokens: int) -> Tensor:
    """Return how far key s lies ahead of query t, as (queries, keys)."""
    place = torch.arange(tokens)
    return place[None, :] - place[:, None]


def visible(keep: Tensor, causal: bool) -> Tensor:
    """Mark which keys a query may see, (batch, 1, queries, keys)."""
    tokens = keep.shape[1]
    allowed = distance(tokens) <= 0 if causal else torch.ones(tokens, tokens, dtype=torch.bool)
    return (keep[:, None, :] & allowed)[:, None]


def logits(geometry: Geometry, q: Tensor, k: Tensor) -> Tensor:
    scale = 1 / math.sqrt(geometry.head_size) if geometry.scale is None else geometry.scale
    return torch.einsum("bhtd,bhsd->bhts", q, k) * scale


def softmax_weights(logarithms: Tensor, seen: Tensor) -> Tensor:
    """Return exp(logarithm - logsumexp of the row) over what is seen, zeros in a row that sees nothing."""
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
    """Return softmax(x W) beside softmax(-x W) for one head."""
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


def performer_logits(geometry: Geometry, directions: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return log mean over j of exp(w_j . q' - |q'|^2 / 2) exp(w_j . k' - |k'|^2 / 2), with q' k' = scale q k."""
    scale = 1 / math.sqrt(geometry.head_size) if geometry.scale is None else geometry.scale
    rows = []
    for head in range(q.shape[1]):
        of_q, of_k = (
            torch.einsum("btd,jd->btj", x, directions) * math.sqrt(scale) - scale * x.square().sum(-1, keepdim=True) / 2
            for x in (q[:, head], k[:, head])
        )
        pairs = of_q[:, :, None, :] + of_k[:, None, :, :]  # (batch, queries, keys, features)
        rows.append(torch.logsumexp(pairs, dim=-1) - math.log(directions.shape[0]))
    return torch.stack(rows, dim=1)


def linformer(geometry: Geometry, mixer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to the rows E k, and collect the rows F v; every position has its own column."""
    tokens = k.shape[2]
    short_k = torch.einsum("rs,bhsd->bhrd", mixer.of_keys[:, :tokens], k)
    short_v = torch.einsum("rs,bhsd->bhrd", mixer.of_values[:, :tokens], v)
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    return softmax_weights(logits(geometry, q, short_k), everything) @ short_v


def windowed_weights(
    operator: WindowedLinear, geometry: Geometry, mixer: nn.Module, q: Tensor, k: Tensor, seen: Tensor
) -> Tensor:
    """Return g exp(logit - largest in the window) near and f(q_t) . f(k_s) far."""
    near = seen & (distance(q.shape[2]).abs() < operator.window)
    far = seen & ~near
    sharp = logits(geometry, q, k).masked_fill(~near & near.any(-1, keepdim=True), -math.inf)
    sharp = (sharp - sharp.amax(-1, keepdim=True)).exp() / (1 + (-mixer.near_share).exp())
    soft = feature_products(operator.feature_map, mixer, q, k)
    return sharp.where(near, zero()) + soft.where(far, zero())


def nystrom(operator: Nystrom, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Rebuild softmax attention from landmarks: means of the kept tokens of each segment, segments without any left out."""
    if q.shape[2] <= operator.landmarks:
        return softmax_weights(logits(geometry, q, k), keep[:, None, None, :]) @ v
    rows = [_nystrom_row(operator, geometry, q[b], k[b], v[b], keep[b]) for b in range(q.shape[0])]
    return torch.stack(rows)


def _nystrom_row(operator: Nystrom, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    tokens, kept = q.shape[1], keep.nonzero().flatten().tolist()
    if not kept:
        return torch.zeros_like(q)
    segments = [[t for t in kept if t * operator.landmarks // tokens == i] for i in range(operator.landmarks)]
    segments = [members for members in segments if members]
    marks_q, marks_k = (torch.stack([x[:, members].mean(1) for members in segments], dim=1) for x in (q, k))
    everything = torch.ones(1, 1, 1, dtype=torch.bool)

    def attention(a: Tensor, b: Tensor) -> Tensor:
        return softmax_weights(logits(geometry, a[None], b[None]), everything)[0]

    to_marks = attention(q, marks_k)  # (heads, tokens, landmarks)
    inverse = torch.stack([iterated_inverse(a, operator.iterations) for a in attention(marks_q, marks_k)])
    from_marks = attention(marks_q, k[:, kept])
    result = to_marks @ inverse @ from_marks @ v[:, kept]
    return result.where(keep[:, None], zero())


def iterated_inverse(a: Tensor, iterations: int) -> Tensor:
    """Run Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4 from A^T / (|A|_1 |A|_inf), as Nystromformer does."""
    one = torch.eye(a.shape[0], dtype=a.dtype)
    z = a.T / (torch.linalg.matrix_norm(a, 1) * torch.linalg.matrix_norm(a, math.inf))
    for _ in range(iterations):
        z = z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z))) / 4
    return z


def fourier(v: Tensor) -> Tensor:
    """Return the real part of D_tokens v D_size, with D the unitary matrices of the discrete Fourier transform."""
    over_tokens, over_size = (dft_matrix(n) for n in v.shape[2:])
    return torch.einsum("ut,bhtd,de->bhue", over_tokens, v.to(torch.complex128), over_size).real


def dft_matrix(n: int) -> Tensor:
    place = torch.arange(n, dtype=torch.float64)
    turns = torch.outer(place, place).remainder(n) / n
    return torch.polar(torch.full_like(turns, n**-0.5), -2 * math.pi * turns)

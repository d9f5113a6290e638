"""Mixers: how tokens exchange information, apart from how a model calls its attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from segue.errors import StudentError

EPSILON = 1e-6  # the least sum of positive weights that is divided by


class Mixer(nn.Module):
    """Map queries, keys and values, each (batch, heads, tokens, head size), to one output of the queries' shape.

    Keys and values may have fewer heads. `keep` (batch, tokens) is False at padding, which then influences nothing; `causal`
    lets a token see itself and what comes before. Half precision is computed in float32 and cast back.
    """

    uses: tuple[str, ...] = ("query", "key", "value")
    can_be_causal = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, causal: bool = False) -> Tensor:
        if causal and not self.can_be_causal:
            raise refuse_causal(type(self).__name__.removesuffix("Mixer"))
        given = v.dtype
        with torch.autocast("cpu" if v.is_meta else v.device.type, enabled=False):
            if given in (torch.float16, torch.bfloat16):
                q, k, v = q.float(), k.float(), v.float()
            if keep is not None:
                hidden = ~keep[:, None, :, None]  # (batch, 1, tokens, 1)
                k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
            y = self.mix(q, k, v, keep, causal)
        return y.to(given)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool) -> Tensor:
        raise NotImplementedError


def refuse_causal(operator: str) -> StudentError:
    """Say that an operator sees the whole sequence at once."""
    return StudentError(
        f"{operator} was asked to mix tokens causally.",
        "It sees the whole sequence at once, so the future would leak into the past.",
        "use LinearAttention, Performer, SlidingWindow or WindowedLinear in causal models. Nothing was changed.",
    )


def every_head(x: Tensor, heads: int) -> Tensor:
    """Give each query head its keys or values where several heads share them."""
    groups = heads // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def softmax_where(scores: Tensor, seen: Tensor | None) -> Tensor:
    """Softmax over what is seen; a row that sees nothing gets zeros."""
    if seen is None:
        return scores.softmax(-1)
    return (scores + hiding(seen, scores.dtype)).softmax(-1) * seen.any(-1, keepdim=True)


def hiding(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores: 0 where seen, elsewhere the lowest number. Adding is many times faster than filling."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def divided(sums: Tensor, least: float = EPSILON) -> Tensor:
    """Divide weighted sums of values by the sum of their weights, which is the last column."""
    return sums[..., :-1] / sums[..., -1:].clamp_min(least)


def with_ones(v: Tensor) -> Tensor:
    """Append a column of ones to values, so that one product sums both the values and their weights."""
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)

"""Mixers: how tokens exchange information, apart from how a model calls its attention."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from segue.errors import StudentError

State: TypeAlias = dict[str, Tensor]  # what a causal mixer remembers of the past; every tensor has the batch first

PIECE = 128  # tokens that follow a state are mixed so many at a time
EPSILON = 1e-6  # the least sum of positive weights that is divided by


class Mixer(nn.Module):
    """Map queries, keys and values, each (batch, heads, tokens, head size), to one output of the queries' shape.

    Keys and values may have fewer heads. `keep` (batch, tokens) is False at padding, which then influences nothing; `causal`
    lets a token see itself and what comes before. Half precision is computed in float32 and cast back.
    """

    uses: tuple[str, ...] = ("query", "key", "value")
    can_be_causal = False
    recurrent = False  # causal tokens can follow a state: `recall` and `remember` exist

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, causal: bool = False) -> Tensor:
        if causal and not self.can_be_causal:
            raise refuse_causal(type(self).__name__.removesuffix("Mixer"))
        with _full_precision(v):
            y = self.mix(q.to(_wide(q.dtype)), *_prepared(k, v, keep), keep, causal)
        return y.to(v.dtype)

    def follow(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, state: State) -> Tensor:
        """Mix tokens that come after those a state remembers."""
        given = v.dtype
        with _full_precision(v):
            q, (k, v) = q.to(_wide(q.dtype)), _prepared(k, v, keep)
            outputs = []
            for begin in range(0, q.shape[2], PIECE):
                piece = slice(begin, begin + PIECE)
                kept = None if keep is None else keep[:, piece]
                outputs.append(self.recall(q[:, :, piece], k[:, :, piece], v[:, :, piece], kept, state))
                if begin + PIECE < q.shape[2]:
                    state = self.remember(k[:, :, piece], v[:, :, piece], kept, state)
        return torch.cat(outputs, dim=2).to(given)

    def next(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, state: State) -> tuple[Tensor, State]:
        """Mix one token that comes after a state, and return what is remembered then."""
        with _full_precision(v):
            y, state = self.step(q.to(_wide(q.dtype)), *_prepared(k, v, keep), keep, state)
        return y.to(v.dtype), state

    def after(self, k: Tensor, v: Tensor, keep: Tensor | None, state: State | None) -> State:
        """Return what is remembered after these tokens too."""
        with _full_precision(v):
            return self.remember(*_prepared(k, v, keep), keep, state)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool) -> Tensor:
        raise NotImplementedError

    def recall(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, state: State) -> Tensor:
        """Mix a few causal tokens with each other and with a state."""
        raise NotImplementedError

    def remember(self, k: Tensor, v: Tensor, keep: Tensor | None, state: State | None) -> State:
        """Add tokens to a state, or begin one."""
        raise NotImplementedError

    def step(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, state: State) -> tuple[Tensor, State]:
        """Do both for one token; a mixer that can share work overrides this."""
        return self.recall(q, k, v, keep, state), self.remember(k, v, keep, state)


def _full_precision(like: Tensor) -> torch.autocast:
    return torch.autocast("cpu" if like.is_meta else like.device.type, enabled=False)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _prepared(k: Tensor, v: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return keys and values in at least float32, with zeros at padding."""
    k, v = k.to(_wide(k.dtype)), v.to(_wide(v.dtype))
    if keep is None:
        return k, v
    hidden = ~keep[:, None, :, None]  # (batch, 1, tokens, 1)
    return k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)


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


def by_key_head(x: Tensor, key_heads: int) -> Tensor:
    """Put the query heads that share keys side by side: (batch, heads, 1, n) -> (batch, key heads, heads of each, n)."""
    return x.reshape(x.shape[0], key_heads, -1, x.shape[3])


def all_kept(like: Tensor) -> Tensor:
    """Mark every token of (batch, heads, tokens, head size) as one that counts."""
    return torch.ones(like.shape[0], like.shape[2], dtype=torch.bool, device=like.device)


def from_place(x: Tensor, cut: int, dim: int = 2) -> Tensor:
    """Take the tokens from a place on, without holding on to the memory of many before it."""
    rest = x.narrow(dim, cut, x.shape[dim] - cut)
    return rest.clone() if cut > 1 else rest


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

"""Linear attention: softmax's exp(q . k) replaced by a product of features, so that all queries share one sum over keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.border import checked
from segue.errors import StudentError
from segue.students.attention.mixer import (
    Mixer,
    State,
    add_outer,
    append_ones,
    join_heads,
    normalise,
    of_each_head,
    parameter_of,
    read_state,
    repeat_heads,
)
from segue.students.attention.mixers.blocks import causal_sums
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec

__all__ = ["LinearAttention"]

FeatureMap: TypeAlias = Literal["elu", "relu", "hedgehog"] | Callable[[Tensor], Tensor]


class Hedgehog(nn.Module):
    """A learned map per head, softmax(x W) and softmax(-x W): twice the head size, each half summing to 1."""

    def __init__(self, heads: int, head_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, head_size, head_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with the identity, as the authors do."""
        self.weight.copy_(torch.eye(self.weight.shape[-1], device=self.weight.device).expand_as(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.features(self.project(x))

    def project(self, x: Tensor) -> Tensor:
        weight = parameter_of(self, "weight", x)
        return x @ weight if x.shape[2] != 1 else of_each_head(x, weight)

    @staticmethod
    def features(y: Tensor) -> Tensor:
        return torch.stack([y, -y], dim=-2).softmax(-1).flatten(-2)

    @staticmethod
    def both(of_queries: Hedgehog, of_keys: Hedgehog, q: Tensor, k: Tensor) -> Tensor:
        """Map the queries and keys of one token, (batch, heads + key heads, 1, n)."""
        if q.shape[0] != 1:
            return Hedgehog.features(torch.cat([of_queries.project(q), of_keys.project(k)], dim=1))
        of_q, of_k = parameter_of(of_queries, "weight", q), parameter_of(of_keys, "weight", k)
        y = torch.cat([torch.bmm(q[0], of_q), torch.bmm(k[0], of_k)])  # (heads + key heads, 1, n)
        return torch.cat([y, -y], 1).softmax(-1).view(1, y.shape[0], 1, -1)


class FixedMap(nn.Module):
    """A feature map without weights."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def elu_plus_one(x: Tensor) -> Tensor:
    """Map to exp(x) below 0 and to 1 + x above."""
    if torch.is_grad_enabled() and torch.compiler.is_compiling():
        # PyTorch 2.13 tells the compiler that elu's gradient is laid out like its input; its kernel lays it out like the
        # gradient that it gets. Backends that run the kernel (aot_eager) then fail at a view in the projection's backward pass.
        return torch.where(x > 0, x, x.clamp_max(0).expm1()) + 1
    return F.elu(x) + 1


BY_NUMBER = (elu_plus_one, F.relu)  # maps that look at nothing else


def feature_map(kind: FeatureMap, heads: int, head_size: int) -> nn.Module:
    """Build the map from queries or keys to non-negative features.

    >>> feature_map("elu", 2, 4)(torch.zeros(1, 2, 3, 4)).unique().item()
    1.0
    """
    if kind == "elu":
        return FixedMap(elu_plus_one)
    if kind == "relu":
        return FixedMap(F.relu)
    if kind == "hedgehog":
        return Hedgehog(heads, head_size)
    if callable(kind) and not isinstance(kind, type | nn.Module):
        return FixedMap(_tried(kind, heads, head_size))
    raise StudentError(
        f"feature_map={kind!r} is not a feature map.",
        "The choices are 'elu', 'relu', 'hedgehog', or a function from a tensor to non-negative features.",
        "wrap a module or a class in a function.",
    )


def map_both(of_queries: nn.Module, of_keys: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Map the queries and keys of one token, in fewer operations than one after the other."""
    heads = [q.shape[1], k.shape[1]]
    if isinstance(of_queries, Hedgehog) and isinstance(of_keys, Hedgehog):
        both = Hedgehog.both(of_queries, of_keys, q, k)
    elif isinstance(of_queries, FixedMap) and of_queries.function in BY_NUMBER:
        both = of_queries(join_heads(q, k))
    else:
        return of_queries(q), of_keys(k)
    q, k = both.split_with_sizes(heads, 1)
    return q, k


def _tried(function: Callable[[Tensor], Tensor], heads: int, head_size: int) -> Callable[[Tensor], Tensor]:
    """Refuse a function that does not return a vector of features for each token and head."""
    found = function(torch.zeros(1, heads, 1, head_size))
    if not (isinstance(found, Tensor) and found.dim() == 4 and found.shape[:3] == (1, heads, 1)):
        shape = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"{found!r:.60}"
        raise StudentError(
            "the feature map must return features for each token and head.",
            f"It gets a tensor of shape {(1, heads, 1, head_size)} and returns {shape}.",
            "return (batch, heads, tokens, features).",
        )
    return function


class LinearMixer(Mixer):
    """sum over s of (f(q_t) . f(k_s)) v_s, divided by the sum of the weights."""

    supports_causal = True
    supports_cross = True
    recurrent = True

    def __init__(self, kind: FeatureMap, heads: int, key_heads: int, head_size: int) -> None:
        super().__init__()
        self.of_queries = feature_map(kind, heads, head_size)
        self.of_keys = feature_map(kind, key_heads, head_size)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool) -> Tensor:
        if causal:
            return normalise(self._causal(self.of_queries(q), k, v, token_mask))
        return normalise(self.of_queries(q) @ repeat_heads(self._sums(k, v, token_mask), q.shape[1]))

    def mix_chunk(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> Tensor:
        q = self.of_queries(q)
        return normalise(self._causal(q, k, v, token_mask) + q @ repeat_heads(state["sums"], q.shape[1]))

    def accumulate(self, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State | None) -> State:
        sums = self._sums(k, v, token_mask)
        return {"sums": sums if state is None else state["sums"] + sums}

    def step(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        q, k = map_both(self.of_queries, self.of_keys, q, k)
        sums = add_outer(state["sums"], _without_padding(k, token_mask), append_ones(v))
        return normalise(read_state(q, sums)), {"sums": sums}

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None) -> Tensor:
        heads = q.shape[1]
        return causal_sums(q, repeat_heads(self._features(k, token_mask), heads), append_ones(repeat_heads(v, heads)))

    def _sums(self, k: Tensor, v: Tensor, token_mask: Tensor | None) -> Tensor:
        """Sum f(k_s) (v_s, 1) over the tokens, (batch, key heads, features, head size + 1)."""
        return self._features(k, token_mask).transpose(-1, -2) @ append_ones(v)

    def _features(self, k: Tensor, token_mask: Tensor | None) -> Tensor:
        """Return (batch, key heads, tokens, features)."""
        return _without_padding(self.of_keys(k), token_mask)


def _without_padding(features: Tensor, token_mask: Tensor | None) -> Tensor:
    return features if token_mask is None else features.masked_fill(~token_mask[:, None, :, None], 0.0)


@checked
@dataclass(frozen=True, kw_only=True)
class LinearAttention(Operator):
    """Linear attention with the feature map 'elu' (Katharopoulos et al.), 'relu', 'hedgehog' (learned), or your own function.

    >>> LinearAttention(feature_map="hedgehog")
    LinearAttention(init=CopyMatching(), ignore=(), feature_map='hedgehog')

    Args:
        init: How the student gets its first weights.
        ignore: What the student leaves out of its teacher: bias, softcap, sinks, window.
        feature_map: What makes queries and keys non-negative.
    """

    cost = "n d²"
    paper = "https://arxiv.org/abs/2006.16236"
    mixer_class = LinearMixer

    feature_map: FeatureMap = "elu"

    def mixer(self, spec: AttentionSpec) -> Mixer:
        return LinearMixer(self.feature_map, spec.heads, spec.key_heads, spec.head_size)

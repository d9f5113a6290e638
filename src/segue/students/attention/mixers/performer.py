"""Performer: softmax's kernel estimated by positive random features of orthogonal directions (FAVOR+)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from segue.border import PositiveInt, checked
from segue.students.attention.mixer import (
    Mixer,
    State,
    add_outer,
    append_ones,
    join_heads,
    normalise,
    parameter_of,
    read_state,
    repeat_heads,
)
from segue.students.attention.mixers.blocks import causal_sums_in_logs
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec

__all__ = ["Performer"]

LEAST = 1e-30  # features are scaled by their largest, so correct products can be this small


class PerformerMixer(Mixer):
    """Linear attention with f(x)_j = exp(w_j . x - |x|^2 / 2), whose products average to exp(scale q . k)."""

    supports_causal = True
    supports_cross = True
    recurrent = True
    directions: Tensor  # (features, head size)

    def __init__(self, features: int, head_size: int, scale: float) -> None:
        super().__init__()
        self.root_scale = abs(scale) ** 0.5
        self.register_buffer("directions", torch.empty(features, head_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the directions from torch's global generator."""
        self.directions.copy_(orthogonal_directions(*self.directions.shape))

    def redraw_(self, seed: int) -> None:
        """Draw other directions, the same in every process."""
        count, size = self.directions.shape
        self.directions.copy_(orthogonal_directions(count, size, torch.Generator().manual_seed(seed)))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool) -> Tensor:
        q, (k, logs) = self._query_features(q), self._key_features(k, token_mask)
        heads, v = q.shape[1], append_ones(v)
        if causal:
            parts = (repeat_heads(x, heads) for x in (k, v, logs))
            return normalise(causal_sums_in_logs(q, *parts), LEAST)
        largest = _finite(logs.amax(2, keepdim=True))
        v = v * (logs - largest).exp()  # v has fewer numbers than the features
        return normalise(q @ repeat_heads(k.transpose(-1, -2) @ v, heads), LEAST)

    def mix_chunk(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> Tensor:
        q, (k, logs) = self._query_features(q), self._key_features(k, token_mask)
        heads = q.shape[1]
        here = causal_sums_in_logs(q, *(repeat_heads(x, heads) for x in (k, append_ones(v), logs)))
        before = q @ repeat_heads(state["sums"].mT, heads)
        largest, past = repeat_heads(_finite(logs.cummax(2).values), heads), repeat_heads(state["largest"], heads)
        joint = torch.maximum(largest, past)
        return normalise(here * (largest - joint).exp() + before * (past - joint).exp(), LEAST)

    def step(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        heads, sums, largest = q.shape[1], state["sums"], state["largest"]
        both = self._log_features(join_heads(q, k))  # (batch, heads + key heads, 1, features)
        logs = (both.detach() if torch.is_grad_enabled() else both).amax(-1, keepdim=True)
        of_keys = logs[:, heads:]
        if token_mask is not None:
            both[:, heads:].masked_fill_(~token_mask[:, None, :, None], -torch.inf)
            of_keys.masked_fill_(~token_mask[:, None, :, None], -torch.inf)
        new = torch.maximum(of_keys, largest)
        if not _same(new, largest):
            sums, largest = sums * (largest - new).exp(), new
        of_keys.copy_(largest)
        both = both.sub_(logs).exp_()  # divided by their largest, by that of all keys so far
        q, k = both.split_with_sizes([heads, k.shape[1]], 1)
        sums = add_outer(sums, append_ones(v), k)  # (batch, key heads, head size + 1, features): more features, longer rows
        return normalise(read_state(q, sums.mT), LEAST), {"sums": sums, "largest": largest}

    def accumulate(self, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State | None) -> State:
        k, logs = self._key_features(k, token_mask)
        largest = _finite(logs.amax(2, keepdim=True))  # (batch, key heads, 1, 1)
        if state is not None:
            largest = torch.maximum(largest, state["largest"])
        sums = (append_ones(v) * (logs - largest).exp()).transpose(-1, -2) @ k
        if state is not None:
            sums = sums + state["sums"] * (state["largest"] - largest).exp()
        return {"sums": sums, "largest": largest}

    def _log_features(self, x: Tensor) -> Tensor:
        """Return the logarithms of the features of one token, in few operations; also of queries, where the norm cancels."""
        rows, scale = x.flatten(0, 2), self.root_scale
        norms = rows.square().sum(-1, keepdim=True)
        logs = torch.addmm(norms, rows, parameter_of(self, "directions", x).T, beta=-(scale**2) / 2, alpha=scale)
        return logs.view(*x.shape[:3], -1)

    def _query_features(self, q: Tensor) -> Tensor:
        """Return features divided by the largest: factors that all features share cancel."""
        q = q @ (self.directions.to(q.dtype).T * self.root_scale)
        features: Tensor = q.sub_(q.detach().amax(-1, keepdim=True)).exp_()
        return features

    def _key_features(self, k: Tensor, token_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return features divided by their largest, and its logarithm, (batch, key heads, tokens, 1), -inf at padding."""
        k = k * self.root_scale
        k = (k @ self.directions.to(k.dtype).T).sub_(k.square().sum(-1, keepdim=True) / 2)
        logs = k.detach().amax(-1, keepdim=True)
        k = k.sub_(logs).exp_()
        return k, logs if token_mask is None else logs.masked_fill(~token_mask[:, None, :, None], -torch.inf)


def _same(logs: Tensor, largest: Tensor) -> bool:
    """Return whether the largest stay what they were, where that can be asked without waiting for a device."""
    return not torch.compiler.is_compiling() and logs.device.type == "cpu" and torch.equal(logs, largest)


def _finite(logs: Tensor) -> Tensor:
    """Return logarithms whose differences are finite, also before the first token that counts."""
    return logs.clamp_min(torch.finfo(logs.dtype).min / 4)


@checked
@dataclass(frozen=True, kw_only=True)
class Performer(Operator):
    """Softmax attention estimated by random features; `student.mixer.redraw_(seed)` redraws them."""

    cost = "n d features"
    paper = "https://arxiv.org/abs/2009.14794"
    mixer_class = PerformerMixer

    features: PositiveInt = 256

    def mixer(self, spec: AttentionSpec) -> Mixer:
        return PerformerMixer(self.features, spec.head_size, spec.logit_scale)


def orthogonal_directions(count: int, size: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw Gaussian vectors that are orthogonal to each other in groups of `size`.

    >>> w = orthogonal_directions(3, 3)
    >>> (w @ w.T - (w @ w.T).diag().diag()).abs().max().item() < 1e-5
    True
    """
    groups = []
    for _ in range(-(-count // size)):
        q, r = torch.linalg.qr(torch.randn(size, size, generator=generator))
        groups.append(q * r.diagonal().sign())  # uniform over rotations
    lengths = torch.randn(count, size, generator=generator).norm(dim=-1, keepdim=True)
    directions: Tensor = torch.cat([q.T for q in groups])[:count] * lengths
    return directions

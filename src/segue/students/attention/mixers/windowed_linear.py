"""Windowed linear attention: softmax near, linear far, under one normalisation (the operator of LoLCATs)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.border import Count, Fraction, PositiveFloat, PositiveInt, Unit, checked
from segue.gates import Noise
from segue.students.attention.mixer import (
    Mixer,
    State,
    add_outer,
    append_ones,
    group_heads,
    masked_softmax,
    normalise,
    of_each_head,
    parameter_of,
    read_state,
    repeat_heads,
)
from segue.students.attention.mixers.blocks import join, split, sums_after, sums_before
from segue.students.attention.mixers.linear import FeatureMap, feature_map, map_both
from segue.students.attention.mixers.near import NearKeys, WindowMixer
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec

__all__ = ["WindowedLinear"]

LARGEST_LOG = 10.0  # of a far factor
LOG_FACTORS = tuple(step / 4 for step in range(-48, 9))  # what a fit of the far factor tries: e^-12 is as good as nothing


class WindowedLinearMixer(WindowMixer):
    """Weights p_ts near and c_t f(q_t) . f(k_s) far, divided by their common sum; p is the softmax over near tokens alone.

    Near are the tokens less than `window` away and the sinks. c_t = exp(a + b . q_t), a and b learned per head, at most e^10.
    With `far=None`, as in version 0.1.0, c_t = max_s p_ts / g, g in (0, 1) learned per head.
    """

    branches = ("sinks", "window", "far")
    ring_of_ones = True
    kept: Tensor | None  # (heads,), False where this step leaves the window out

    def __init__(self, settings: WindowedLinear, heads: int, key_heads: int, head_size: int, scale: float) -> None:
        super().__init__(settings.window, settings.sinks)
        self.scale, self.far = scale, settings.far
        near_weight, product = 1 / settings.window, _mean_product(settings.feature_map, head_size)
        self.start = None if self.far is None else self.far * near_weight / product
        self.dropout, self.dropout_until = settings.window_dropout, settings.window_dropout_until
        self.of_queries = feature_map(settings.feature_map, heads, head_size)
        self.of_keys = feature_map(settings.feature_map, key_heads, head_size)
        if self.far is None:
            self.near_share = nn.Parameter(torch.empty(heads, 1, 1))
        else:
            self.log_far = nn.Parameter(torch.empty(heads))  # of one dimension, so that weight decay leaves it alone
            self.far_of_queries = nn.Parameter(torch.empty(heads, head_size, 1))
        self.register_buffer("kept", torch.ones(heads, dtype=torch.bool) if self.dropout else None, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Let an average far token weigh `far` times as much as a near one; in the way of version 0.1.0 start with g = 1/2."""
        if self.start is None:
            self.near_share.zero_()
        else:
            self.log_far.fill_(math.log(self.start))
            self.far_of_queries.zero_()

    @torch.no_grad()
    def begin_step(self, progress: float, noise: Noise) -> None:
        """Draw the heads that do without their window in this step of the training."""
        if self.kept is not None:
            probability = self.dropout * max(0.0, 1.0 - progress / self.dropout_until)
            self.kept.copy_(torch.tensor([noise.uniform(head) >= probability for head in range(len(self.kept))]))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool) -> Tensor:
        heads, tokens = q.shape[1], q.shape[2]
        near = NearKeys(tokens, token_mask, q.device, self.window, self.sink_tokens, causal)
        q_features, k_features = split(self._of_queries(q), near.size), repeat_heads(self.of_keys(k), heads)
        k, v = repeat_heads(k, heads), append_ones(repeat_heads(v, heads))
        scores = split(q * self.scale, near.size) @ near.of(k).transpose(-1, -2)  # (batch, heads, blocks, size, keys)
        weights = near.softmax(scores)
        if self.far is None:
            q_features = q_features * self._first_factor(weights)
        if self.ablated is not None:
            weights = self._ablate(weights, torch.arange(scores.shape[-1], device=q.device) >= scores.shape[-1] - near.sinks)
        if self.training and self.kept is not None:
            stays = F.pad(near.distance == 0, (0, near.sinks), value=True)  # a token always sees itself and the sinks
            weights = weights * (self.kept.view(-1, 1, 1, 1) | stays).to(weights.dtype)
        sums = weights @ near.of(v)
        if self.ablated != "far":
            sums = sums + self._far_sums(q_features, k_features, v, near, causal)
        return join(normalise(sums), tokens)

    def _far_sums(self, q_features: Tensor, k_features: Tensor, v: Tensor, near: NearKeys, causal: bool) -> Tensor:
        """Sum over the tokens outside of the window, but for the sinks."""
        if near.sinks or near.padded:
            v = v * near.local[:, None, :, None].to(v.dtype)  # the ones too: padding and sinks then add to no sum
        far = ~near.in_window & (near.distance <= 0) if causal else ~near.in_window
        soft = (q_features @ near.neighbours(k_features).transpose(-1, -2)).mul_(far.to(v.dtype))
        sums = soft @ near.neighbours(v)
        states = split(k_features, near.size).transpose(-1, -2) @ split(
            v, near.size
        )  # (batch, heads, blocks, features, size + 1)
        if states.shape[2] > 2:
            others = sums_before(states, 2) if causal else sums_before(states, 2) + sums_after(states, 2)
            sums = sums + q_features @ others
        return sums

    def mix_chunk(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> Tensor:
        slots, heads = self._join(k, v, token_mask, state), q.shape[1]
        distance, sink = slots.distance(), slots.sink[:, None, None]  # (new, tokens), (batch or 1, 1, 1, tokens)
        seen = distance <= 0 if slots.mask is None else (distance <= 0) & slots.mask[:, None, None]
        near = seen & (sink | (distance > -self.window))
        weights = masked_softmax(q * self.scale @ repeat_heads(slots.k, heads).transpose(-1, -2), near)
        q_features, k_features = self._of_queries(q), repeat_heads(self.of_keys(slots.k), heads)
        if self.far is None:
            q_features = q_features * self._first_factor(weights)
        far = (q_features @ k_features.transpose(-1, -2)) * (seen & ~near).to(q.dtype)
        if self.ablated is not None:
            weights, far = self._ablate(weights, sink), far * (self.ablated != "far")
        sums = (weights + far) @ append_ones(repeat_heads(slots.v, heads))
        if self.ablated != "far":
            sums = sums + q_features @ repeat_heads(state["sums"], heads)
        return normalise(sums)

    def step(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        if token_mask is not None or "mask" in state or self.ablated is not None or self.far is None:
            return super().step(q, k, v, token_mask, state)
        if (ring := self._ring(state)) is not None:
            return self._step_in_ring(q, k, v, ring)
        sums = state["sums"]
        state, left_k, left_v = self._slide(k, v, state)  # all of it is near but for what is in the sums
        if left_k is None or left_v is None:
            features = self.of_queries(q)
        else:
            features, of_left = map_both(self.of_queries, self.of_keys, q, left_k)
            sums = add_outer(sums, of_left, append_ones(left_v))
        near = F.scaled_dot_product_attention(group_heads(q, k.shape[1]), state["k"], state["v"], scale=self.scale)
        far = read_state(features * self._factor(q), sums)
        values, mass = far.split_with_sizes([v.shape[3], 1], -1)
        return (near.reshape(values.shape) + values) / (mass + 1), {**state, "sums": sums}

    def _step_in_ring(self, q: Tensor, k: Tensor, v: Tensor, ring: State) -> tuple[Tensor, State]:
        """Do the same in place, in few operations."""
        batch, key_heads, _, size = v.shape
        oldest_k, oldest_v = self._oldest(ring)
        features, of_oldest = map_both(self.of_queries, self.of_keys, q, oldest_k)
        sums = ring["sums"].addcmul_(of_oldest.mT, oldest_v)
        oldest_k.copy_(k)
        oldest_v.narrow(3, 0, size).copy_(v)
        log_far = parameter_of(self, "log_far", q).view(-1, 1, 1)
        factor = of_each_head(q, parameter_of(self, "far_of_queries", q), log_far).clamp_max_(LARGEST_LOG).exp_()
        grouped = batch * key_heads, q.shape[1] // key_heads, -1
        scores = torch.bmm((q * self.scale).view(grouped), ring["k"].flatten(0, 1).mT)
        y = torch.bmm((features * factor).view(grouped), sums.flatten(0, 1))
        y = y.baddbmm_(scores.softmax(-1), ring["v"].flatten(0, 1)).view(batch, q.shape[1], 1, -1)
        values, mass = y.split_with_sizes([size, 1], 3)  # that of the near ones is 1
        return values / mass, self._turned(ring)

    def _evict(self, k: Tensor, v: Tensor, mask: Tensor | None, state: State | None) -> State:
        """Add the tokens that leave the window to the sums."""
        if state and not k.shape[2]:
            return {"sums": state["sums"]}
        v = append_ones(v) if mask is None else append_ones(v) * mask[:, None, :, None].to(v.dtype)
        sums = self.of_keys(k).transpose(-1, -2) @ v  # (batch, key heads, features, size + 1)
        return {"sums": state["sums"] + sums if state else sums}

    def _of_queries(self, q: Tensor) -> Tensor:
        """Return the features of queries, multiplied by their factor."""
        features: Tensor = self.of_queries(q)
        return features if self.far is None else features * self._factor(q)

    def _factor(self, q: Tensor) -> Tensor:
        """Return what the far weights of each query are multiplied by."""
        logs = q @ self.far_of_queries.to(q.dtype) + self.log_far.to(q.dtype).view(-1, 1, 1)
        return logs.clamp_max(LARGEST_LOG).exp()

    def _first_factor(self, weights: Tensor) -> Tensor:
        """Return the factor of version 0.1.0, for each query."""
        share = self.near_share.to(weights.dtype).sigmoid().view(-1, *(1,) * (weights.dim() - 2))
        return weights.amax(-1, keepdim=True) / share

    def _ablate(self, weights: Tensor, sink: Tensor) -> Tensor:
        left = self._part(sink)
        return weights if left is None else weights * left.to(weights.dtype)


@checked
@dataclass(frozen=True, kw_only=True)
class WindowedLinear(Operator):
    """Softmax attention to the tokens less than `window` away and to the first `sinks`, linear attention to the rest.

    Both are normalised together. Each head learns what its linear part is multiplied by; `far` is what a far token weighs at
    the start, relative to a near one.

    >>> WindowedLinear(window=32).sinks
    1

    Args:
        init: How the student gets its first weights.
        ignore: What the student leaves out of its teacher: bias, softcap, sinks, window.
        window: Tokens less than so far away are near.
        feature_map: Of the linear part: 'hedgehog' (learned), 'elu', 'relu', or your own function.
        sinks: So many first tokens of a sequence are always near.
        far: As above; None: a share of the near part is learned instead, as in version 0.1.0.
        window_dropout: The probability that a head does without its window in a step, at the start of the training.
        window_dropout_until: Part of the run: the probability falls to 0 by then.
    """

    cost = "n (window + d) d"
    paper = "https://arxiv.org/abs/2410.10254"
    mixer_class = WindowedLinearMixer

    window: PositiveInt = 64
    feature_map: FeatureMap = "hedgehog"
    sinks: Count = 1
    far: PositiveFloat | None = 0.05
    window_dropout: Unit = 0.0
    window_dropout_until: Fraction = 0.5

    def mixer(self, spec: AttentionSpec) -> Mixer:
        return WindowedLinearMixer(self, spec.heads, spec.key_heads, spec.head_size, spec.logit_scale)


def _mean_product(kind: FeatureMap, head_size: int) -> float:
    """Return the mean of f(q) . f(k) over random queries and keys."""
    if kind == "hedgehog":
        return 2 / head_size  # two halves, each of which sums to 1
    drawn = torch.randn(1, 1, 1024, head_size, generator=torch.Generator().manual_seed(0), device="cpu")
    features: Tensor = feature_map(kind, 1, head_size)(drawn)
    return max(float(features.mean(2).square().sum()), 1e-6)


@torch.no_grad()
def far_errors(mixer: WindowedLinearMixer, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool) -> Tensor:
    """Return how far each head is from softmax with each of `LOG_FACTORS`, as a sum of squares, (factors, heads).

    The first of them is almost 0, so that the best is at least as near as without the far part.
    """
    errors = []
    for row in range(len(q)):  # all pairs of tokens of a sequence at a time
        real = slice(None) if token_mask is None else token_mask[row]
        one_q, one_k, one_v = (x[row : row + 1, :, real].float() for x in (q, k, v))
        tokens, heads = one_q.shape[2], q.shape[1]
        ahead = torch.arange(tokens, device=q.device) - torch.arange(tokens, device=q.device)[:, None]
        seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
        near = seen & ((ahead.abs() < mixer.window) | (torch.arange(tokens, device=q.device) < mixer.sink_tokens))
        scores = one_q * mixer.scale @ repeat_heads(one_k, heads).transpose(-1, -2)
        features = mixer._of_queries(one_q) * (-mixer.log_far.float()).exp().view(-1, 1, 1)
        far = features @ repeat_heads(mixer.of_keys(one_k), heads).transpose(-1, -2) * (seen & ~near)
        values = repeat_heads(one_v, heads)
        right, by_near = masked_softmax(scores, seen) @ values, masked_softmax(scores, near) @ values
        by_far, mass = far @ values, far.sum(-1, keepdim=True)
        mixed = ((by_near + math.exp(c) * by_far) / (1 + math.exp(c) * mass) for c in LOG_FACTORS)
        errors.append(torch.stack([(y - right).square().sum((0, 2, 3)) for y in mixed]))
    return torch.stack(errors).sum(0)

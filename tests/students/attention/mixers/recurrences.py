"""What the naive references of gated recurrences share: gates and features by their formulas, one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.students.attention.mixers.formulas import features, hedgehog, one_per_query_head, prepared


def gates(mixer: nn.Module, v: Tensor, heads: int, decay: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return how much stays, is written and is put out, each (batch, heads, tokens); v is (batch, key heads, tokens, n)."""
    key_heads = v.shape[1]
    seen = torch.cat([v[:, head] for head in range(key_heads)], dim=-1)
    z = torch.einsum("btc,rc->brt", seen, mixer.gates.weight) + mixer.gates.bias[:, None]
    shares = 1 / (1 + (-z).exp())
    stays = shares[:, :key_heads] if decay else torch.ones_like(shares[:, :key_heads])
    write, output = shares[:, -heads - key_heads : -heads], shares[:, -heads:]
    return one_per_query_head(stays, heads), one_per_query_head(write, heads), 2 * output


def of_keys(kind, mixer: nn.Module, k: Tensor) -> Tensor:
    """Map keys, which come once per query head, by the map of their key head."""
    if kind != "hedgehog":
        return features(kind, mixer.of_keys, k)
    group = k.shape[1] // mixer.of_keys.weight.shape[0]
    return torch.stack([hedgehog(k[:, h], mixer.of_keys.weight[h // group]) for h in range(k.shape[1])], dim=1)


def recurrence(operator, mixer, q, k, v, token_mask, causal, decay, step, last) -> Tensor:
    """Run `step(state, k, v, stays, write)` over the tokens that count, and read each state by `last(q, state)`."""
    heads, tokens = q.shape[1:3]
    zeros = torch.zeros((), dtype=v.dtype)
    real_v = v if token_mask is None else torch.where(token_mask[:, None, :, None], v, zeros)
    stays, write, output = gates(mixer, real_v, heads, decay)
    k, v, token_mask, _ = prepared(q, k, v, token_mask, causal)
    f_q, f_k = features(operator.feature_map, mixer.of_queries, q), of_keys(operator.feature_map, mixer, k)
    outputs = []
    for order in [range(tokens)] if causal else [range(tokens), reversed(range(tokens))]:
        state, found = None, {}
        for t in order:
            new = step(state, f_k[:, :, t], v[:, :, t], stays[:, :, t, None, None], write[:, :, t, None, None])
            old = torch.zeros_like(new) if state is None else state
            state = torch.where(token_mask[:, t, None, None, None], new, old)
            found[t] = last(f_q[:, :, t], state)
        outputs.append(torch.stack([found[t] for t in range(tokens)], dim=2))
    return sum(outputs) / len(outputs) * mixer.value_scale * output[..., None]

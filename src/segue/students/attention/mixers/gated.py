"""Gated recurrences: a state of constant size per head, which fades, is written to and is read as each token says.

The state after token t is S_t = a_t S_(t-1) + k_t u_t', and q_t S_t is read from it. Linear attention with decay writes its
values, the delta rule what the state does not know yet. Both run in chunks of matrix products. Decays are summed as logarithms
inside a chunk, and only differences that are at most 0 are exponentiated: no decay is too strong.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.students.attention.mixer import Mixer, State, may_write, parameter_of, read_state, repeat_heads
from segue.students.attention.mixers.blocks import join, split
from segue.students.attention.mixers.linear import FeatureMap, feature_map, map_both
from segue.students.attention.spec import AttentionSpec

SIZE = 64  # tokens in a chunk
HALF_LIFE = 8.0  # tokens after which a new head has forgotten half


class Gates(nn.Module):
    """Three gates from the values of a token in all heads: what stays, what is written (key heads), what is put out (heads).

    Values are what a mixer knows of its input that is neither rotated nor missing when a cache continues.
    """

    def __init__(self, heads: int, key_heads: int, value_size: int, decay: bool) -> None:
        super().__init__()
        self.heads, self.key_heads, self.decay = heads, key_heads, decay
        self.parts = (key_heads * decay, key_heads, heads)
        self.weight = nn.Parameter(torch.empty(sum(self.parts), key_heads * value_size))
        self.bias = nn.Parameter(torch.empty(sum(self.parts)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start without a look at the values: a half-life of `HALF_LIFE`, half a write, everything put out."""
        self.weight.zero_()
        equal = torch.ones(self.key_heads, device=self.bias.device)
        self.bias.copy_(self.biases(HALF_LIFE * equal, 0.5 * equal))

    def biases(self, half_life: Tensor, write: Tensor) -> Tensor:
        """Return the biases that give key heads a half-life in tokens and a share that is written, with open output gates."""
        stays = -torch.expm1(math.log(2) / half_life).log()  # the logit of 1 / 2 ** (1 / half-life)
        return torch.cat([stays[: self.parts[0]], write.logit(), write.new_zeros(self.heads)])

    def forward(self, v: Tensor, token_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return log a_t and the write gate, (batch, key heads, tokens, 1), and the output gate, (batch, heads, tokens, 1)."""
        stays, write, output = self._linear(v).split_with_sizes(self.parts, 1)
        logs = F.logsigmoid(stays.contiguous()) if self.decay else torch.zeros_like(write)
        write = write.sigmoid()
        if token_mask is not None:
            padding = ~token_mask[:, None, :, None]
            logs, write = logs.masked_fill(padding, 0.0), write.masked_fill(padding, 0.0)
        return logs, write, 2 * output.sigmoid()

    def of_one(self, v: Tensor, token_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same for one token, in fewer operations: with a_t itself."""
        x = F.linear(v.flatten(1), parameter_of(self, "weight", v), parameter_of(self, "bias", v)).sigmoid_()
        stays, write, output = x.view(x.shape[0], -1, 1, 1).split_with_sizes(self.parts, 1)
        if not self.decay:
            stays = torch.ones_like(write)
        if token_mask is not None:
            padding = ~token_mask[:, None, :, None]
            stays, write = stays.masked_fill(padding, 1.0), write.masked_fill(padding, 0.0)
        return stays, write, output + output

    def _linear(self, v: Tensor) -> Tensor:
        """Return what the sigmoids are taken of, (batch, rows, tokens, 1)."""
        x = F.linear(v.transpose(1, 2).flatten(2), self.weight.to(v.dtype), self.bias.to(v.dtype))
        return x.transpose(1, 2)[..., None]


class GatedMixer(Mixer):
    """What gated recurrences share: features, gates, chunks and states. Each says what it writes, and how it ends.

    Without `causal` the sequence is read in both directions, and the two outputs are averaged.
    """

    supports_causal = True
    recurrent = True

    def __init__(self, kind: FeatureMap, spec: AttentionSpec, decay: bool) -> None:
        super().__init__()
        heads, key_heads, self.scale = spec.heads, spec.key_heads, spec.logit_scale  # the scale of the teacher's logits
        self.of_queries = feature_map(kind, heads, spec.head_size)
        self.of_keys = feature_map(kind, key_heads, spec.head_size)
        self.gates = Gates(heads, key_heads, spec.value_size or spec.head_size, decay)
        self.value_scale = nn.Parameter(torch.empty(heads, 1, 1))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with values as they are."""
        self.value_scale.fill_(1.0)

    def features(self, of: nn.Module, x: Tensor) -> Tensor:
        """Map queries or keys to features."""
        return self.scaled(of(x))

    def scaled(self, features: Tensor) -> Tensor:
        """Give features the length that the recurrence needs."""
        return features

    def both(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Do the same for the queries and keys of one token."""
        return map_both(self.of_queries, self.of_keys, q, k)

    def written(self, k: Tensor, v: Tensor, write: Tensor, logs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what is written at each key, and what reads from the state before the chunk how much of it is known there.

        All come in chunks, (batch, key heads, chunks, size, n); `logs` are the decays since the chunk began.
        """
        raise NotImplementedError

    def write_one(self, k: Tensor, v: Tensor, write: Tensor, faded: Tensor) -> Tensor:
        """Return what one token writes, after the state has faded."""
        raise NotImplementedError

    def finish(self, y: Tensor, factor: Tensor) -> Tensor:
        """Turn what was read from states into values, multiplied by a factor for each."""
        return y * factor

    def mix(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool) -> Tensor:
        if causal:
            return self._recur(q, k, v, token_mask, None)
        q, k, v = (torch.cat([x, x.flip(2)]) for x in (q, k, v))
        token_mask = None if token_mask is None else torch.cat([token_mask, token_mask.flip(1)])
        ahead, back = self._recur(q, k, v, token_mask, None).chunk(2)
        return (ahead + back.flip(2)) / 2

    def mix_chunk(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> Tensor:
        return self._recur(q, k, v, token_mask, state)

    def accumulate(self, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State | None) -> State:
        logs, write, _ = self.gates(v, token_mask)
        return {"memory": self._chunks(k, v, logs, write, state)[-1]}

    def step(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        stays, write, output = self.gates.of_one(v, token_mask)
        q, k = self.both(q, k)
        memory = state["memory"]
        if may_write(memory):
            memory = memory.mul_(stays)
            memory.addcmul_(k.mT, self.write_one(k, v, write, memory))
        else:
            memory = memory * stays
            memory = torch.addcmul(memory, k.mT, self.write_one(k, v, write, memory))
        return self.finish(read_state(q, memory), parameter_of(self, "value_scale", q) * output), {"memory": memory}

    def _recur(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State | None) -> Tensor:
        heads, tokens = q.shape[1], q.shape[2]
        logs, write, output = self.gates(v, token_mask)
        *parts, _ = self._chunks(k, v, logs, write, state)
        k, u, logs, states = (repeat_heads(part, heads) for part in parts)
        q = split(self.features(self.of_queries, q), k.shape[3])
        y = ((q @ k.transpose(-1, -2)) * fading(logs)) @ u + (q * logs.exp()) @ states
        return join(self.finish(y, split(self.value_scale.to(q.dtype) * output, k.shape[3])), tokens)

    def _chunks(self, k: Tensor, v: Tensor, logs: Tensor, write: Tensor, state: State | None) -> tuple[Tensor, ...]:
        """Return by chunks the features of keys, what is written there, decays and the state before; last, the final state."""
        size = min(SIZE, k.shape[2])
        k, v, logs, write = (split(x, size) for x in (self.features(self.of_keys, k), v, logs, write))
        logs = logs.cumsum(3)
        u, known = self.written(k, v, write, logs)
        end = logs[..., -1:, :]
        keys, fades = (k * (end - logs).exp()).transpose(-1, -2), end.exp()
        memory = k.new_zeros(*k.shape[:2], k.shape[4], u.shape[4]) if state is None else state["memory"]
        states, new = [], []
        parts = (u, keys, fades) if known is None else (u, keys, fades, known)
        for here, key, fade, *read in zip(*(x.unbind(2) for x in parts), strict=True):  # x[:, :, i] has a slow backward
            states.append(memory)
            new.append(here - read[0] @ memory if read else here)
            memory = torch.addcmul(key @ new[-1], memory, fade)
        return k, u if known is None else torch.stack(new, 2), logs, torch.stack(states, 2), memory


def fading(logs: Tensor) -> Tensor:
    """Return what is left at t of what was written at s, exp(logs_t - logs_s), and 0 before it was."""
    between: Tensor = (logs - logs.transpose(-1, -2)).tril()  # the first cut keeps the exponential finite
    return between.exp().tril()

"""Near tokens: the window around each query and the sinks, in blocks for a complete sequence and in slots for a cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from segue.students.attention.mixer import Mixer, State, additive_mask, append_ones, full_mask, may_write, tail
from segue.students.attention.mixers.blocks import distances, neighbours, reach, split, within

SMALLEST_BLOCK = 64  # so that products of narrow windows are worth their overhead


class FirstTokens(NamedTuple):
    """The first tokens of each sequence that are not padding."""

    positions: Tensor  # (batch or 1, count)
    mask: Tensor  # the same shape, False where a sequence has fewer

    def of(self, x: Tensor) -> Tensor:
        """Take them out of (batch, heads, tokens, n)."""
        if self.positions.shape[0] == 1 < x.shape[0]:  # without padding they are the first
            return x[:, :, : self.positions.shape[1]]
        return x.gather(2, self.positions[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def first_tokens(mask: Tensor, count: int) -> FirstTokens:
    """Find the first `count` tokens of a mask (batch or 1, tokens)."""
    positions = (~mask).byte().argsort(dim=1, stable=True)[:, :count]
    return FirstTokens(positions, mask.gather(1, positions))


class NearKeys:
    """The keys that the blocks of a complete sequence see by softmax: their neighbours, then the sinks, in the last columns."""

    def __init__(self, tokens: int, mask: Tensor | None, device: torch.device, window: int, sinks: int, causal: bool) -> None:
        self.padded = mask is not None
        mask = torch.ones(1, tokens, dtype=torch.bool, device=device) if mask is None else mask
        self.size = size = min(max(window, SMALLEST_BLOCK), tokens)
        self.sides = reach(tokens, size, causal)
        self.first = first_tokens(mask, sinks)
        self.sinks = self.first.positions.shape[1]
        self.local = mask & (mask.cumsum(1) > sinks) if sinks else mask  # tokens with columns among the neighbours
        self.distance = distances(size, self.sides, device)  # (size, keys of the neighbours)
        self.in_window = within(window, self.distance, causal)
        seen = self.neighbours(self.local[:, None, :, None]).transpose(-1, -2) & self.in_window
        if self.sinks:
            blocks = -(-tokens // size)
            to_first = self.first.mask[:, None, None, None]
            if causal:
                position = torch.arange(blocks * size, device=device).view(blocks, size, 1)
                to_first = to_first & (self.first.positions[:, None, None, None] <= position)
            seen = torch.cat([seen, to_first.expand(-1, -1, blocks, size, -1)], -1)
        self.visible = seen  # (batch or 1, 1, blocks, size, keys)

    def softmax(self, scores: Tensor) -> Tensor:
        """Softmax over the visible keys, in the place of the scores; a query that sees none is padding, and gets zeros."""
        weights = scores.add_(additive_mask(self.visible, scores.dtype)).softmax(-1)
        return weights * self.visible.any(-1, keepdim=True) if self.padded else weights

    def neighbours(self, x: Tensor) -> Tensor:
        """Cut (batch, heads, tokens, n) into blocks, each with its neighbours: (batch, heads, blocks, keys, n)."""
        return neighbours(split(x, self.size), self.sides)

    def of(self, x: Tensor) -> Tensor:
        """Do the same, and add the sinks."""
        near = self.neighbours(x)
        if not self.sinks:
            return near
        first = self.first.of(x)[:, :, None].expand(-1, -1, near.shape[2], -1, -1)
        return torch.cat([near, first], dim=-2)


class Slots(NamedTuple):
    """The tokens that new queries can see: those of a state, then the new ones."""

    k: Tensor
    v: Tensor
    mask: Tensor | None  # (batch, tokens), False at padding and in empty slots
    sink: Tensor  # (batch or 1, tokens), True for sinks
    new: int

    def distance(self) -> Tensor:
        """Return how far each of them is ahead of a new query, (new, tokens); that of an old sink means nothing."""
        tokens = self.k.shape[2]
        return (
            torch.arange(tokens, device=self.k.device) - torch.arange(tokens - self.new, tokens, device=self.k.device)[:, None]
        )


class WindowMixer(Mixer):
    """What mixers with a window share: softmax over the tokens less than `window` away and the first `sink_tokens`.

    The state has `k` and `v` of the sinks, then of the last `window` others. Where there is padding it also has `mask`, and as
    many slots as there can be sinks, though some may be empty. Where steps write each token in the place of the oldest, the
    window is a ring, and `turn` says how many tokens of it are before the oldest.
    """

    supports_causal = True
    recurrent = True
    ring_of_ones = False  # values in a ring have a column of ones more

    def __init__(self, window: int, sink_tokens: int) -> None:
        super().__init__()
        self.window, self.sink_tokens = window, sink_tokens

    def accumulate(self, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State | None) -> State:
        return self._next_state(self._join(k, v, token_mask, state), state)

    def _slide(self, k: Tensor, v: Tensor, state: State) -> tuple[State, Tensor | None, Tensor | None]:
        """Do the same for one token without padding, in few operations; return the token that leaves the window beside it."""
        state, sinks = self._in_order(state), self.sink_tokens
        old_k, old_v = state["k"], state["v"]
        if old_k.shape[2] < sinks + self.window:
            return {"k": torch.cat([old_k, k], 2), "v": torch.cat([old_v, v], 2)}, None, None
        sizes = [sinks, 1, old_k.shape[2] - sinks - 1]
        (first_k, last_k, rest_k), (first_v, last_v, rest_v) = (
            old_k.split_with_sizes(sizes, 2),
            old_v.split_with_sizes(sizes, 2),
        )
        return {"k": torch.cat([first_k, rest_k, k], 2), "v": torch.cat([first_v, rest_v, v], 2)}, last_k, last_v

    def _ring(self, state: State) -> State | None:
        """Return a state with a full window as one whose oldest token may be written over; None where none may."""
        k, v = state["k"], state["v"]
        if k.shape[2] < self.sink_tokens + self.window or "mask" in state or not may_write(k):
            return None
        if "turn" in state:
            return state
        v = append_ones(v) if self.ring_of_ones else v.clone(memory_format=torch.contiguous_format)  # others may have the old
        return {**state, "k": k.clone(memory_format=torch.contiguous_format), "v": v, "turn": 0}

    def _oldest(self, ring: State) -> tuple[Tensor, Tensor]:
        """Return the key and value that the next token takes the place of."""
        place = self.sink_tokens + ring["turn"]
        return ring["k"].narrow(2, place, 1), ring["v"].narrow(2, place, 1)

    def _turned(self, ring: State) -> State:
        """Return a ring after one token was written to it."""
        return {**ring, "turn": (ring["turn"] + 1) % self.window}

    def _in_order(self, state: State) -> State:
        """Return a state whose tokens are in the order of the text."""
        if (turn := state.get("turn")) is None:
            return state
        sizes = [self.sink_tokens, turn, self.window - turn]
        k, v = (
            torch.cat([sinks, old, new], 2)
            for sinks, new, old in (state[name].split_with_sizes(sizes, 2) for name in ("k", "v"))
        )
        kept = {name: x for name, x in state.items() if name != "turn"}
        return {**kept, "k": k, "v": v[..., :-1] if self.ring_of_ones else v}

    def _join(self, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State | None) -> Slots:
        """Join the tokens of a state with new ones."""
        new, mask = k.shape[2], token_mask
        state = None if state is None else self._in_order(state)
        if mask is not None or (state is not None and "mask" in state):
            mask = full_mask(k) if mask is None else mask
            past = {"k": k[:, :, :0], "v": v[:, :, :0]} if state is None else state
            state = past if "mask" in past else self._with_mask(past)
            mask = torch.cat([state["mask"], mask], dim=1)
        if state is not None:
            k, v = torch.cat([state["k"], k], dim=2), torch.cat([state["v"], v], dim=2)
        count = torch.arange(1, k.shape[2] + 1, device=k.device)[None] if mask is None else mask.cumsum(1)
        sink = count <= self.sink_tokens
        return Slots(k, v, mask, sink if mask is None else sink & mask, new)

    def _with_mask(self, state: State) -> State:
        """Give a state without padding all slots for sinks, and a mask."""
        empty = max(0, self.sink_tokens - state["k"].shape[2])
        k, v = (F.pad(state[name], (0, 0, 0, empty)) for name in "kv")
        return {**state, "k": k, "v": v, "mask": F.pad(full_mask(state["k"]), (0, empty))}

    def _next_state(self, slots: Slots, state: State | None) -> State:
        """Return what later tokens need; the tokens that leave the window go to `_evict`."""
        k, v, mask, sink, _ = slots
        sinks, tokens = min(self.sink_tokens, k.shape[2]), k.shape[2]
        cut = max(tokens - self.window, sinks)
        others = None if mask is None else mask & ~sink
        more = self._evict(k[:, :, sinks:cut], v[:, :, sinks:cut], None if others is None else others[:, sinks:cut], state)
        if mask is None or others is None:
            if cut == sinks:
                return {"k": k, "v": v, **more}
            return {"k": _without(k, sinks, cut), "v": _without(v, sinks, cut), **more}
        first = first_tokens(sink, sinks)
        k, v = (torch.cat([first.of(x), x[:, :, cut:]], dim=2) for x in (k, v))
        mask = torch.cat([first.mask, others[:, cut:]], dim=1)
        free = slots.new > 1 or mask.device.type == "cpu"  # to look: on other devices that waits for the result
        if free and not torch.compiler.is_compiling() and bool(mask.all()):
            return {"k": k, "v": v, **more}  # later tokens are faster without a mask
        return {"k": k, "v": v, "mask": mask, **more}

    def _evict(self, k: Tensor, v: Tensor, mask: Tensor | None, state: State | None) -> State:
        """Return what a state keeps of the tokens that leave the window; by default nothing."""
        return {}

    def _part(self, sink: Tensor) -> Tensor | None:
        """Return which near keys are left when a branch is ablated, from which are sinks."""
        return ~sink if self.ablated == "sinks" else sink if self.ablated == "window" else None


def _without(x: Tensor, start: int, end: int) -> Tensor:
    """Return (batch, heads, tokens, n) without the tokens from `start` to `end`."""
    return torch.cat([x[:, :, :start], x[:, :, end:]], dim=2) if start else tail(x, end)

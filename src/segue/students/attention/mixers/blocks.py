"""Sequences in blocks: prefix sums for causal linear attention, and neighbouring blocks for windows. All cost O(tokens)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128  # tokens in a block of causal linear attention


def split(x: Tensor, size: int) -> Tensor:
    """Cut (batch, heads, tokens, n) into (batch, heads, blocks, size, n), the last block filled with zeros."""
    blocks = -(-x.shape[2] // size)
    padded = F.pad(x, (0, 0, 0, blocks * size - x.shape[2]))
    return padded.reshape(*x.shape[:2], blocks, size, x.shape[3])


def join(x: Tensor, tokens: int) -> Tensor:
    """Undo `split`."""
    return x.flatten(2, 3)[:, :, :tokens]


def reach(tokens: int, size: int, causal: bool) -> tuple[int, int]:
    """Return how many blocks before and after its own a block looks at."""
    return (0, 0) if tokens <= size else (1, 0) if causal else (1, 1)


def neighbours(blocks: Tensor, sides: tuple[int, int]) -> Tensor:
    """Concatenate each block with the blocks before and after it, along the tokens."""
    before, after = sides
    padded, count = F.pad(blocks, (0, 0, 0, 0, before, after)), blocks.shape[2]
    shifted = [padded[:, :, i : i + count] for i in range(before + after + 1)]
    return torch.cat(shifted, dim=-2)


def band(pairs: Tensor, size: int, sides: tuple[int, int]) -> Tensor:
    """Cut (batch, heads, tokens, tokens) into what each block says of its `neighbours`, (batch, heads, blocks, size, keys)."""
    (before, after), tokens = sides, pairs.shape[2]
    blocks = -(-tokens // size)
    right = (blocks + after) * size - tokens
    padded = F.pad(pairs, (before * size, right, 0, blocks * size - tokens))
    strips = padded.unfold(-1, (1 + before + after) * size, size)  # (batch, heads, tokens, blocks, keys)
    strips = strips.reshape(*pairs.shape[:2], blocks, size, blocks, strips.shape[-1])
    return strips.diagonal(dim1=2, dim2=4).movedim(-1, 2)


def distances(size: int, sides: tuple[int, int], device: torch.device) -> Tensor:
    """Return how far each key of `neighbours` is ahead of a block's query, (size, keys)."""
    before, after = sides
    query = torch.arange(size, device=device)
    key = torch.arange(-before * size, (1 + after) * size, device=device)
    return key - query[:, None]


def within(window: int, distance: Tensor, causal: bool) -> Tensor:
    """Mark the keys less than `window` away, and not ahead if causal."""
    return (distance > -window) & ((distance <= 0) if causal else (distance < window))


def sums_before(states: Tensor, gap: int) -> Tensor:
    """Sum the states of all blocks at least `gap` blocks before each."""
    if states.shape[2] <= gap:
        return torch.zeros_like(states)
    return F.pad(states.cumsum(2)[:, :, :-gap], (0, 0, 0, 0, gap, 0))


def sums_after(states: Tensor, gap: int) -> Tensor:
    """Sum the states of all blocks at least `gap` blocks after each."""
    return sums_before(states.flip(2), gap).flip(2)


def causal_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return sum over s <= t of (q_t . k_s) v_s for every t, from non-negative features."""
    tokens = q.shape[2]
    size = min(BLOCK, tokens)
    q, k, v = split(q, size), split(k, size), split(v, size)
    inside = (q @ k.transpose(-1, -2)).tril() @ v  # (batch, heads, blocks, size, n)
    if tokens <= size:
        return join(inside, tokens)
    return join(inside + q @ sums_before(k.transpose(-1, -2) @ v, 1), tokens)


def causal_sums_in_logs(q: Tensor, k: Tensor, v: Tensor, logs: Tensor) -> Tensor:
    """Do the same for keys of very different size: k_s stands for exp(logs_s) k_s; each row is divided by exp(its largest).

    `logs` is (batch, heads, tokens, 1), -inf at padding, without a gradient.
    """
    tokens = q.shape[2]
    size = min(BLOCK, tokens)
    lowest = torch.finfo(logs.dtype).min / 4
    logs = F.pad(logs, (0, 0, 0, -tokens % size), value=-torch.inf)
    largest = logs.cummax(2).values.clamp_min(lowest)  # of all keys so far
    logs, largest = split(logs, size), split(largest, size)
    q, k, v = split(q, size), split(k, size), split(v, size)
    weights = (logs.transpose(-1, -2) - largest).tril_().exp_().tril_()  # the first cut keeps the exponential finite
    result = ((q @ k.transpose(-1, -2)) * weights) @ v
    if tokens <= size:
        return join(result, tokens)
    at_end = largest[..., -1:, :]  # (batch, heads, blocks, 1, 1)
    states = k.transpose(-1, -2) @ (v * (logs - at_end).exp())
    first, *others, _ = states.unbind(2)  # states[:, :, i] would fill all blocks with zeros in each of its backwards
    fading = (at_end[:, :, :-2] - at_end[:, :, 1:-1]).exp().unbind(2)
    carried = [torch.zeros_like(first), first]
    for state, fades in zip(others, fading, strict=True):
        carried.append(torch.addcmul(state, carried[-1], fades))
    before = F.pad(at_end, (0, 0, 0, 0, 1, 0), value=lowest)[:, :, :-1]
    return join(result + (q @ torch.stack(carried, 2)) * (before - largest).exp(), tokens)

"""Sequences in blocks, against loops over single tokens."""

import math

import pytest
import torch
from torch import Tensor

from segue.students.attention.mixers.blocks import (
    BLOCK,
    causal_sums,
    causal_sums_in_logs,
    distances,
    join,
    neighbours,
    reach,
    split,
    sums_after,
    sums_before,
    within,
)

CPU = torch.device("cpu")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("tokens", "size", "blocks"), [(1, 1, 1), (6, 3, 2), (7, 3, 3), (5, 8, 1)])
def test_split_fills_the_last_block_with_zeros_and_join_undoes_it(tokens, size, blocks):
    x = draw(2, 3, tokens, 4)
    cut = split(x, size)
    assert cut.shape == (2, 3, blocks, size, 4)
    assert torch.equal(join(cut, tokens), x)
    for i in range(blocks):
        whole = x[:, :, i * size : (i + 1) * size]
        assert torch.equal(cut[:, :, i, : whole.shape[2]], whole)
        assert cut[:, :, i, whole.shape[2] :].count_nonzero() == 0


def test_split_cuts_masks_too():
    assert split(torch.ones(1, 1, 3, 1, dtype=torch.bool), 2).flatten().tolist() == [True, True, True, False]


def test_a_block_looks_at_its_neighbours_only_where_there_are_any():
    assert reach(8, 8, causal=True) == reach(8, 8, causal=False) == (0, 0)
    assert reach(9, 8, causal=True) == (1, 0)
    assert reach(9, 8, causal=False) == (1, 1)


@pytest.mark.parametrize("sides", [(0, 0), (1, 0), (1, 1)])
def test_neighbours_and_distances_name_the_same_keys(sides):
    size, tokens = 3, 8
    places = torch.arange(1, tokens + 1)[None, None, :, None]  # 0 is outside
    beside, far = neighbours(split(places, size), sides), distances(size, sides, CPU)
    assert beside.shape == (1, 1, 3, size * (1 + sum(sides)), 1)
    assert far.shape == (size, size * (1 + sum(sides)))
    for block in range(3):
        for query in range(size):
            place = block * size + query + 1
            expected = [p if 1 <= p <= tokens else 0 for p in (place + far[query]).tolist()]
            assert beside[0, 0, block, :, 0].tolist() == expected


@pytest.mark.parametrize("window", [1, 2, 3])
def test_within_is_less_than_a_window_away(window):
    distance = torch.tensor([-3, -2, -1, 0, 1, 2, 3])
    assert within(window, distance, causal=False).tolist() == [abs(d) < window for d in range(-3, 4)]
    assert within(window, distance, causal=True).tolist() == [0 <= -d < window for d in range(-3, 4)]


@pytest.mark.parametrize("gap", [1, 2])
@pytest.mark.parametrize("blocks", [1, 2, 3, 6])
def test_sums_reach_over_all_blocks_beyond_the_gap(blocks, gap):
    states = draw(2, 1, blocks, 3, 2)
    before, after = sums_before(states, gap), sums_after(states, gap)
    assert before.shape == after.shape == states.shape
    for i in range(blocks):
        torch.testing.assert_close(before[:, :, i], states[:, :, : max(i - gap + 1, 0)].sum(2))
        torch.testing.assert_close(after[:, :, i], states[:, :, i + gap :].sum(2))


def token_by_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Carry the sum of k_s v_s^T along the sequence."""
    state, rows = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3], dtype=k.dtype), []
    for t in range(q.shape[2]):
        state = state + k[:, :, t, :, None] * v[:, :, t, None, :]
        rows.append((q[:, :, t, :, None] * state).sum(2))
    return torch.stack(rows, dim=2)


LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]


@pytest.mark.parametrize("tokens", LENGTHS)
def test_causal_sums_are_those_of_a_recurrence(tokens):
    q, k, v = (draw(1, 2, tokens, n, seed=i).abs().requires_grad_() for i, n in enumerate((3, 3, 4)))
    found, expected = causal_sums(q, k, v), token_by_token(q, k, v)
    torch.testing.assert_close(found, expected)
    g = draw(*found.shape, seed=9)
    for a, b in zip(torch.autograd.grad(found, (q, k, v), g), torch.autograd.grad(expected, (q, k, v), g), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_causal_sums_in_logs_divide_by_the_largest_so_far(tokens):
    q, k, v = draw(1, 2, tokens, 3).abs(), draw(1, 2, tokens, 3, seed=1).abs(), draw(1, 2, tokens, 4, seed=2)
    logs = draw(1, 2, tokens, 1, seed=3) + torch.arange(tokens)[:, None] / 100  # the largest grows from block to block
    largest = torch.stack([logs[:, :, : t + 1].amax(2) for t in range(tokens)], dim=2)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    found, expected = causal_sums_in_logs(q, k, v, logs), token_by_token(q, k * logs.exp(), v) / largest.exp()
    torch.testing.assert_close(found, expected)
    g = draw(*found.shape, seed=9)
    for a, b in zip(torch.autograd.grad(found, (q, k, v), g), torch.autograd.grad(expected, (q, k, v), g), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("sign", [-1, 1])
def test_causal_sums_in_logs_hold_numbers_whose_exponentials_do_not_exist(sign):
    tokens = 3 * BLOCK
    logs = sign * torch.linspace(-5000, 5000, tokens)[None, None, :, None]  # float32 ends at e**88
    ones = torch.ones(1, 1, tokens, 1)
    found = causal_sums_in_logs(ones, ones, ones, logs).flatten()
    step = 10000 / (tokens - 1)
    expected = torch.ones(tokens)  # falling: the first key is all there is; rising: the last key is all there is
    torch.testing.assert_close(found, expected, rtol=0, atol=2 * math.exp(-step))


def test_causal_sums_in_logs_leave_padding_out():
    tokens = 3 * BLOCK + 5
    q, k, v, logs = (draw(1, 1, tokens, n, seed=i) for i, n in enumerate((3, 3, 2, 1)))
    kept = torch.rand(tokens, generator=torch.Generator().manual_seed(0)) < 0.5
    kept[: BLOCK + 3] = False  # nothing is seen for longer than a block
    found = causal_sums_in_logs(q, k, v, logs.masked_fill(~kept[:, None], -math.inf))
    assert found[:, :, : BLOCK + 3].count_nonzero() == 0
    short = causal_sums_in_logs(*(x[:, :, kept] for x in (q, k, v, logs)))
    torch.testing.assert_close(found[:, :, kept], short)

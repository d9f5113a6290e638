"""Sliding window: its settings, its formula, and where it is softmax."""

import pytest
import torch

from segue.errors import PlanError
from segue.students import SlidingWindow, Softmax, WindowedLinear
from segue.students.attention.mixer import places_in
from tests.students.attention.mixers.checks import (
    assert_naive_for_large_logits,
    assert_softmax,
    attention_spec,
    inputs,
    mixer_of,
)
from tests.students.attention.mixers.formulas import distance, logits, prepared, softmax_weights

SETTINGS = {
    "window, global": SlidingWindow(window=9, sinks=3),
    "window": SlidingWindow(window=5, sinks=0),
    "wide window": SlidingWindow(window=70, sinks=1),  # wider than the smallest block
}
IN_MODELS = {"SlidingWindow": SlidingWindow(window=3)}


def naive(operator, spec, mixer, q, k, v, token_mask, causal):
    k, v, token_mask, seen = prepared(q, k, v, token_mask, causal)
    first = token_mask & (token_mask.cumsum(1) <= operator.sinks)  # padding before a sequence is no token of it
    near = (distance(q.shape[2]).abs() < operator.window) | first[:, None, :] | first[:, :, None]
    return softmax_weights(logits(spec, q, k), seen & near[:, None]) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_large_logits_are_the_references(name, causal):
    assert_naive_for_large_logits(naive, SETTINGS[name], causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("operator", [SlidingWindow(window=90), WindowedLinear(window=90)])
@pytest.mark.parametrize("tokens", [3, 89, 90])
def test_a_window_over_everything_is_softmax(operator, tokens, causal):
    assert_softmax(operator, tokens, causal)


@pytest.mark.parametrize("operator", [SlidingWindow(window=89, sinks=0), WindowedLinear(window=89, sinks=0)])
def test_a_window_that_misses_one_token_is_not(operator):
    spec = attention_spec()
    q, k, v, _ = inputs(1, spec, 90)
    y, softmax = (mixer_of(x, spec)(q, k, v, None, True) for x in (operator, Softmax()))
    torch.testing.assert_close(y[:, :, :-1], softmax[:, :, :-1])
    assert (y - softmax)[:, :, -1].abs().max() > 1e-4


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"window": 0}, "window=.* got 0"), ({"sinks": -1}, "sinks=.* got -1")],
)
def test_a_count_must_be_positive(settings, says):
    with pytest.raises(PlanError, match=says):
        SlidingWindow(**settings)


@pytest.mark.parametrize("sinks", [0, 1])
@pytest.mark.parametrize("size", [(4, 6), (5, 6), (4, 3)])
def test_fewer_keys_of_an_image_are_seen_around_the_place_of_each_query(size, sinks):
    """The keys are an image of half the height and half the width."""
    spec = attention_spec()
    height, width = size
    rows, columns = -(-height // 2), -(-width // 2)
    places = places_in(size, rows * columns, torch.device("cpu"))
    expected = [(r * rows // height) * columns + c * columns // width for r in range(height) for c in range(width)]
    assert places.tolist() == expected
    q, _, _, _ = inputs(1, spec, height * width)
    _, k, v, _ = inputs(2, spec, rows * columns)
    y = mixer_of(SlidingWindow(window=2, sinks=sinks), spec)(q, k, v, None, cross=True, places=places)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    for i, place in enumerate(expected):
        first = set(range(rows * columns)) if place < sinks else set(range(sinks))
        seen = sorted(first | {j for j in range(rows * columns) if abs(j - place) < 2})
        weights = (q[:, :, [i]] @ k[:, :, seen].transpose(-1, -2) * spec.logit_scale).softmax(-1)
        torch.testing.assert_close(y[:, :, [i]], weights @ v[:, :, seen])

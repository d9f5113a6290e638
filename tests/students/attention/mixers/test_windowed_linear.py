"""Windowed linear attention: its settings and its formula; where it is softmax is in test_sliding_window.py."""

import math

import pytest

from segue.errors import PlanError
from segue.students import WindowedLinear
from tests.students.attention.mixers.checks import assert_naive_for_large_logits, attention_spec
from tests.students.attention.mixers.formulas import (
    distance,
    feature_products,
    logits,
    normalised,
    prepared,
    softmax_weights,
    zero,
)

SETTINGS = {
    "windowed": WindowedLinear(window=5),
    "windowed, no sink": WindowedLinear(window=5, sinks=0),
    "windowed, one": WindowedLinear(window=1, sinks=3),
    "windowed, wide": WindowedLinear(window=70, feature_map="elu", sinks=2, far=0.5),
    "windowed, 0.1.0": WindowedLinear(window=5, sinks=0, far=None),
}
IN_MODELS = {"WindowedLinear": WindowedLinear(window=3)}
MAPS = {"of_queries.weight": (6, 7, 7), "of_keys.weight": (2, 7, 7)}
STATE_DICT = dict.fromkeys(SETTINGS, MAPS | {"log_far": (6, 1, 1)}) | {
    "windowed, wide": {"log_far": (6, 1, 1)},
    "windowed, 0.1.0": MAPS | {"near_share": (6, 1, 1)},
}


def naive(operator, spec, mixer, q, k, v, token_mask, causal):
    """Weigh by the softmax over window and sinks, and by c f(q_t) . f(k_s) far."""
    if operator.far is None:
        return naive_of_0_1_0(operator, spec, mixer, q, k, v, token_mask, causal)
    k, v, token_mask, seen = prepared(q, k, v, token_mask, causal)
    sink = token_mask & (token_mask.cumsum(1) <= operator.sinks)
    near = seen & ((distance(q.shape[2]).abs() < operator.window) | sink[:, None, None, :])
    far = mixer.log_far.exp() * feature_products(operator.feature_map, mixer, q, k)
    return normalised(softmax_weights(logits(spec, q, k), near) + far.where(seen & ~near, zero())) @ v


def naive_of_0_1_0(operator, spec, mixer, q, k, v, token_mask, causal):
    """Weigh by g exp(logit - largest in the window) near and f(q_t) . f(k_s) far."""
    k, v, _, seen = prepared(q, k, v, token_mask, causal)
    near = seen & (distance(q.shape[2]).abs() < operator.window)
    sharp = logits(spec, q, k).masked_fill(~near & near.any(-1, keepdim=True), -math.inf)
    sharp = (sharp - sharp.amax(-1, keepdim=True)).exp() / (1 + (-mixer.near_share).exp())
    soft = feature_products(operator.feature_map, mixer, q, k)
    return normalised(sharp.where(near, zero()) + soft.where(seen & ~near, zero())) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_large_logits_are_the_references(name, causal):
    assert_naive_for_large_logits(naive, SETTINGS[name], causal)


def test_far_weights_start_small():
    assert WindowedLinear(far=0.25).mixer(attention_spec()).log_far.exp().unique().tolist() == [0.25]
    assert WindowedLinear(far=None).mixer(attention_spec()).near_share.sigmoid().unique().tolist() == [0.5]


def test_a_count_must_be_positive():
    with pytest.raises(PlanError, match=r"^WindowedLinear\(window=...\) must be a positive integer, got 2.5"):
        WindowedLinear(window=2.5)

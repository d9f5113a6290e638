"""Windowed linear attention: its settings and its formula; where it is softmax is in test_sliding_window.py."""

import math

import pytest

from segue.errors import PlanError
from segue.students import WindowedLinear
from tests.students.attention.mixers.checks import assert_naive_for_large_logits, attention_spec
from tests.students.attention.mixers.formulas import distance, feature_products, logits, normalised, prepared, zero

SETTINGS = {
    "windowed": WindowedLinear(window=5),
    "windowed, one": WindowedLinear(window=1),
    "windowed, wide": WindowedLinear(window=70, feature_map="elu"),
}
IN_MODELS = {"WindowedLinear": WindowedLinear(window=3)}
LEARNED = {"of_queries.weight": (6, 7, 7), "of_keys.weight": (2, 7, 7), "near_share": (6, 1, 1)}
STATE_DICT = {"windowed": LEARNED, "windowed, one": LEARNED, "windowed, wide": {"near_share": (6, 1, 1)}}


def naive(operator, spec, mixer, q, k, v, token_mask, causal):
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


def test_it_starts_with_equal_halves():
    assert WindowedLinear().mixer(attention_spec()).near_share.sigmoid().unique().tolist() == [0.5]


def test_a_count_must_be_positive():
    with pytest.raises(PlanError, match=r"^WindowedLinear\(window=...\) must be a positive integer, got 2.5"):
        WindowedLinear(window=2.5)

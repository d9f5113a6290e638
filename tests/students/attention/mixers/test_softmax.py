"""Softmax: its settings and its formula; the contracts of all mixers are in test_mixer.py."""

import pytest

from segue.students import Softmax
from tests.students.attention.mixers.checks import assert_naive_for_large_logits
from tests.students.attention.mixers.formulas import logits, prepared, softmax_weights

SETTINGS = {"softmax": Softmax()}


def naive(operator, spec, mixer, q, k, v, token_mask, causal):
    k, v, _, seen = prepared(q, k, v, token_mask, causal)
    return softmax_weights(logits(spec, q, k), seen) @ v


@pytest.mark.parametrize("causal", [False, True])
def test_large_logits_are_the_references(causal):
    assert_naive_for_large_logits(naive, Softmax(), causal)

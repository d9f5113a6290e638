"""The gated delta rule: its settings, its formula token by token, and what it remembers."""

import pytest
import torch

from segue.students import GatedDeltaNet
from tests.students.attention.mixers.checks import TOLERANCE, assert_naive, assert_near, attention_spec, inputs, mixer_of, run
from tests.students.attention.mixers.recurrences import recurrence
from tests.students.attention.mixers.test_gated_linear import with_decay

SETTINGS = {
    "gated delta": GatedDeltaNet(),
    "gated delta, hedgehog": GatedDeltaNet(feature_map="hedgehog"),
    "delta": GatedDeltaNet(decay=False),
}
NEW = {"value_scale": (6, 1, 1), "gates.weight": (10, 14), "gates.bias": (10,)}
MAPS = {"of_queries.weight": (6, 7, 7), "of_keys.weight": (2, 7, 7)}
STATE_DICT = {
    "gated delta": NEW,
    "gated delta, hedgehog": {**NEW, **MAPS},
    "delta": {**NEW, "gates.weight": (8, 14), "gates.bias": (8,)},
}


def unit(x):
    return x / x.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-6)


def naive(operator, spec, mixer, q, k, v, token_mask, causal):
    """S_t = a_t (I - b_t k_t k_t') S_(t-1) + b_t k_t v_t', read by q_t; k_t and q_t are features of length 1."""

    def step(state, k, v, stays, write):
        k = unit(k)
        added = write * torch.einsum("bhf,bhd->bhfd", k, v)
        if state is None:
            return added
        kept = torch.eye(k.shape[-1], dtype=k.dtype) - write * torch.einsum("bhf,bhe->bhfe", k, k)
        return stays * torch.einsum("bhfe,bhed->bhfd", kept, state) + added

    def last(q, state):
        return torch.einsum("bhf,bhfd->bhd", unit(q), state)

    return recurrence(operator, mixer, q, k, v, token_mask, causal, operator.decay, step, last)


@pytest.mark.parametrize("name", ["gated delta", "delta"])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 100, 1000])
def test_chunks_are_the_recurrence(name, tokens):
    spec = attention_spec(heads=2, key_heads=1)
    q, k, v, g = inputs(1, spec, tokens)
    assert_naive(naive, SETTINGS[name], spec, q, k, v, None, True, g, [torch.float64])


@pytest.mark.parametrize("bias", [-200.0, -20.0, 0.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_decay_is_too_strong_or_too_weak(bias, dtype):
    spec, operator = attention_spec(heads=2, key_heads=1), SETTINGS["gated delta"]
    mixer, (q, k, v, g) = with_decay(mixer_of(operator, spec), bias).double(), inputs(1, spec, 150)
    right = run(lambda *x: naive(operator, spec, mixer, *x), mixer, q, k, v, None, True, g, torch.float64)
    ours = mixer.to(dtype)
    assert_near(run(ours, ours, q, k, v, None, True, g, dtype), right, TOLERANCE[dtype])


def test_a_value_that_is_written_again_replaces_the_old_one():
    spec = attention_spec(heads=1, key_heads=1, size=4)
    mixer = GatedDeltaNet(feature_map=lambda x: x, decay=False).mixer(spec).double()
    mixer.gates.bias.data[0] = 50.0  # all of it is written
    keys = torch.eye(4, dtype=torch.float64)[[0, 1, 0, 2]][None, None]
    v = torch.arange(16, dtype=torch.float64).view(1, 1, 4, 4)
    found = mixer(keys[:, :, [0, 1, 0, 1]], keys, v, None, True)
    torch.testing.assert_close(found, v[:, :, [0, 1, 2, 1]])  # at the end it still knows what it got at the second key

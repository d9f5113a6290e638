"""Gated linear attention: its settings, its formula token by token, its gates, and where it is linear attention."""

import pytest
import torch

from segue.students import GatedLinear, LinearAttention
from tests.students.attention.mixers.checks import TOLERANCE, assert_naive, assert_near, attention_spec, inputs, mixer_of, run
from tests.students.attention.mixers.formulas import LEAST_SUM
from tests.students.attention.mixers.recurrences import recurrence

SETTINGS = {"gated linear": GatedLinear(), "gated linear, elu": GatedLinear(feature_map="elu")}
NEW = {"value_scale": (6, 1, 1), "gates.weight": (10, 14), "gates.bias": (10,)}
STATE_DICT = {
    "gated linear": {**NEW, "of_queries.weight": (6, 7, 7), "of_keys.weight": (2, 7, 7)},
    "gated linear, elu": NEW,
}


def naive(operator, spec, mixer, q, k, v, token_mask, causal):
    """S_t = a_t S_(t-1) + w_t f(k_t) (v_t, 1)', read by f(q_t) and divided by its last column."""

    def step(state, k, v, stays, write):
        added = torch.einsum("bhf,bhd->bhfd", k, torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)) * write
        return added if state is None else stays * state + added

    def last(q, state):
        sums = torch.einsum("bhf,bhfd->bhd", q, state)
        return sums[..., :-1] / sums[..., -1:].clamp_min(LEAST_SUM)

    return recurrence(operator, mixer, q, k, v, token_mask, causal, True, step, last)


def with_decay(mixer, bias: float):
    """Return the mixer with other decays: a_t is about sigmoid(bias)."""
    mixer.gates.bias.data[: mixer.gates.key_heads] = bias
    return mixer


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 100, 1000])
def test_chunks_are_the_recurrence(tokens):
    spec = attention_spec(heads=2, key_heads=1)
    q, k, v, g = inputs(1, spec, tokens)
    assert_naive(naive, SETTINGS["gated linear"], spec, q, k, v, None, True, g, [torch.float64])


@pytest.mark.parametrize("bias", [-200.0, -20.0, 0.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_decay_is_too_strong_or_too_weak(bias, dtype):
    spec, operator = attention_spec(heads=2, key_heads=1), SETTINGS["gated linear"]
    mixer, (q, k, v, g) = with_decay(mixer_of(operator, spec), bias).double(), inputs(1, spec, 150)
    right = run(lambda *x: naive(operator, spec, mixer, *x), mixer, q, k, v, None, True, g, torch.float64)
    ours = mixer.to(dtype)
    assert_near(run(ours, ours, q, k, v, None, True, g, dtype), right, TOLERANCE[dtype])


def test_without_decay_it_is_linear_attention():
    spec = attention_spec()
    mixer, linear = GatedLinear(feature_map="elu").mixer(spec).double(), LinearAttention().mixer(spec)
    q, k, v, _ = (x.double() for x in inputs(2, spec, 130))
    torch.testing.assert_close(with_decay(mixer, 60.0)(q, k, v, None, True), linear(q, k, v, None, True))


def test_it_starts_with_a_half_life_of_8_tokens_and_open_gates():
    mixer = GatedLinear().mixer(attention_spec())
    logs, write, output = mixer.gates(torch.randn(1, 2, 8, 7), None)
    torch.testing.assert_close(logs.sum(2).exp(), torch.full((1, 2, 1), 0.5))
    assert write.unique().tolist() == [0.5]
    assert output.unique().tolist() == [1.0]


def test_every_token_decides_for_itself():
    spec = attention_spec()
    mixer = mixer_of(GatedLinear(), spec)
    logs, write, output = mixer.gates(inputs(1, spec, 9)[2], None)
    assert logs.shape == write.shape == (1, 2, 9, 1)
    assert output.shape == (1, 6, 9, 1)
    assert all(gate.unique().numel() == gate.numel() for gate in (logs, write, output))

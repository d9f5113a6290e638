"""What both windows share: branches that can be left out, and the slots of a cache."""

import pytest
import torch

from segue.students import SlidingWindow, WindowedLinear
from tests.students.attention.mixers.checks import attention_spec, inputs, mixer_of, padding
from tests.students.attention.mixers.formulas import distance, feature_products, logits, prepared, softmax_weights
from tests.students.attention.mixers.test_windowed_linear import factor

OPERATORS = [SlidingWindow(window=9, sinks=2), WindowedLinear(window=9, sinks=2), WindowedLinear(window=70, sinks=1)]
EVERY_BRANCH = [(operator, branch) for operator in OPERATORS for branch in operator.mixer_class.branches]
every_branch = pytest.mark.parametrize(("operator", "branch"), EVERY_BRANCH, ids=str)


def without(operator, spec, mixer, q, k, v, token_mask, causal, branch):
    """Compute all weights, set those of a branch to zero, and divide by what is left."""
    k, v, token_mask, seen = prepared(q, k, v, token_mask, causal)
    sink = (token_mask & (token_mask.cumsum(1) <= operator.sinks))[:, None, None]
    window = seen & (distance(q.shape[2]).abs() < operator.window) & ~sink
    weights = softmax_weights(logits(spec, q, k), window | (seen & sink))
    far = torch.zeros(())
    if isinstance(operator, WindowedLinear):
        far = factor(mixer, q) * feature_products(operator.feature_map, mixer, q, k)
    weights = weights + far * (seen & ~sink & ~window)
    parts = {"sinks": seen & sink, "window": window, "far": seen & ~sink & ~window}
    weights = weights.masked_fill(parts[branch], 0.0)
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-12) @ v


@pytest.mark.parametrize("tokens", [1, 63, 100, 200])
@every_branch
def test_an_ablated_branch_contributes_nothing(operator, branch, tokens):
    spec, token_mask = attention_spec(), padding(tokens)
    mixer, (q, k, v, _) = mixer_of(operator, spec).double(), (x.double() for x in inputs(4, spec, tokens))
    complete = mixer(q, k, v, token_mask, True)
    mixer.ablated = branch
    found, right = mixer(q, k, v, token_mask, True), without(operator, spec, mixer, q, k, v, token_mask, True, branch)
    real = token_mask[:, None, :, None]
    torch.testing.assert_close(found * real, right * real, atol=1e-9, rtol=1e-9)
    assert tokens < 100 or not torch.allclose(found * real, complete * real)


@every_branch
def test_an_ablated_branch_contributes_nothing_to_generated_text_either(operator, branch):
    spec, token_mask = attention_spec(), padding(100)[[0, 3]]
    token_mask[1] = True
    mixer, (q, k, v, _) = mixer_of(operator, spec).double(), (x.double() for x in inputs(2, spec, 100))
    mixer.ablated = branch
    outputs, state = [], None
    for begin, end in ((0, 50), (50, 51), (51, 80), *((i, i + 1) for i in range(80, 100))):
        chunk = (q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end], token_mask[:, begin:end])
        if state and end - begin == 1:
            y, state = mixer.decode_step(*chunk, state)
        else:
            y, state = mixer.prefill(*chunk, state), mixer.update_state(*chunk[1:], state)
        outputs.append(y)
    right, real = mixer(q, k, v, token_mask, True), token_mask[:, None, :, None]
    torch.testing.assert_close(torch.cat(outputs, 2) * real, right * real, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_a_state_has_no_mask_once_padding_has_left_it(operator):
    spec, tokens = attention_spec(), 200
    mixer, (_, k, v, _) = mixer_of(operator, spec), inputs(2, spec, tokens)
    token_mask = torch.ones(2, tokens, dtype=torch.bool)
    token_mask[0, :40] = False
    state = mixer.update_state(k, v, token_mask, None)
    assert sorted(state) == (["k", "v"] if isinstance(operator, SlidingWindow) else ["k", "sums", "v"])
    assert state["k"].shape[2] == operator.sinks + operator.window
    assert torch.equal(state["k"][0, :, : operator.sinks], k[0, :, 40 : 40 + operator.sinks])
    short = mixer.update_state(k[:, :, :45], v[:, :, :45], token_mask[:, :45], None)
    assert short["mask"].sum(1).tolist() == [5, min(45, operator.sinks + operator.window)]

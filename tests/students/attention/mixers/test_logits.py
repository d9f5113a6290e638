"""What a teacher adds to its logits: a bias, a cap, sinks. Softmax and SlidingWindow compute them as a dense reference does."""

import copy
import pickle
from functools import partial

import pytest
import torch

from segue.students import SlidingWindow, Softmax
from tests.students.attention.mixers.checks import HEADS, TOLERANCE, assert_near, attention_spec, inputs, mixer_of, padding, run
from tests.students.attention.mixers.formulas import distance, logits, prepared

OPERATORS = {
    "softmax": Softmax(),
    "window": SlidingWindow(window=5, sinks=0),
    "window, global": SlidingWindow(window=9, sinks=3),
    "wide window": SlidingWindow(window=70, sinks=1),
}
FEATURES = {
    "bias": {},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 2, HEADS)},
    "all": {"softcap": 2.5, "sinks": torch.linspace(2, -1, HEADS)},
}
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
every_feature = pytest.mark.parametrize("feature", FEATURES)


def bias_of(feature, tokens, shape=(4, HEADS)):
    """Draw a bias that bf16 can hold, for the features that have one."""
    if feature not in ("bias", "all"):
        return None
    return (2 * torch.randn(*shape, tokens, tokens, generator=torch.Generator().manual_seed(5))).bfloat16().float()


def naive(operator, spec, sinks, bias, q, k, v, token_mask, causal):
    k, v, token_mask, seen = prepared(q, k, v, token_mask, causal)
    if isinstance(operator, SlidingWindow):
        first = token_mask & (token_mask.cumsum(1) <= operator.sinks)
        near = (distance(q.shape[2]).abs() < operator.window) | first[:, None, :] | first[:, :, None]
        seen = seen & near[:, None]
    scores = logits(spec, q, k)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if bias is not None:
        scores = scores + bias
    weights = scores.exp() * seen
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp().view(-1, 1, 1)
    return torch.where(seen.any(-1, keepdim=True), weights / total.clamp_min(1e-300), 0.0) @ v


@every_operator
@every_feature
@pytest.mark.parametrize(("tokens", "causal"), [(7, True), (150, True), (150, False)])
def test_outputs_and_gradients_are_the_references(operator, feature, tokens, causal):
    """With grouped queries, with and without padding."""
    spec = attention_spec(**FEATURES[feature])
    q, k, v, g = inputs(4, spec, tokens)
    bias = bias_of(feature, tokens)
    mixer = mixer_of(operator, spec).double()
    sinks = None if mixer.sinks is None else mixer.sinks.weight
    dense = partial(naive, operator, spec, sinks, None if bias is None else bias.double())
    with_bias = partial(mixer, bias=None if bias is None else bias.double())
    for token_mask in (None, padding(tokens)):
        expected = run(dense, mixer, q, k, v, token_mask, causal, g, torch.float64)
        assert_near(run(with_bias, mixer, q, k, v, token_mask, causal, g, torch.float64), expected, TOLERANCE[torch.float64])


@pytest.mark.parametrize("shape", [(1, 1), (1, HEADS), (4, 1)])
@every_operator
def test_a_bias_may_be_shared(operator, shape):
    spec, bias = attention_spec(), bias_of("bias", 80, shape)
    q, k, v, _ = inputs(4, spec, 80)
    mixer = mixer_of(operator, spec)
    for causal in (True, False):
        apart = mixer(q, k, v, padding(80), causal, bias.expand(4, HEADS, 80, 80))
        torch.testing.assert_close(mixer(q, k, v, padding(80), causal, bias), apart)


@pytest.mark.parametrize("name", ["window", "window, global", "wide window"])
@pytest.mark.parametrize("feature", ["softcap", "sinks"])
def test_pieces_and_steps_are_the_whole(name, feature):
    spec = attention_spec(**FEATURES[feature])
    q, k, v, _ = inputs(4, spec, 90)
    mixer, token_mask = mixer_of(OPERATORS[name], spec).double(), padding(90)
    q, k, v = q.double(), k.double(), v.double()
    whole, state, found = mixer(q, k, v, token_mask, True), None, []
    for begin, end in ((0, 40), (40, 47), (47, 88)):
        part = slice(begin, end)
        found.append(mixer.prefill(q[:, :, part], k[:, :, part], v[:, :, part], token_mask[:, part], state))
        state = mixer.update_state(k[:, :, part], v[:, :, part], token_mask[:, part], state)
    for t in (88, 89):
        now = slice(t, t + 1)
        y, state = mixer.decode_step(q[:, :, now], k[:, :, now], v[:, :, now], token_mask[:, now], state)
        found.append(y)
    real = token_mask[:, None, :, None]
    torch.testing.assert_close(torch.cat(found, 2) * real, whole * real)


@every_operator
def test_sinks_are_copied_pickled_and_loaded(operator):
    spec = attention_spec(**FEATURES["all"])
    q, k, v, _ = inputs(2, spec, 12)
    mixer = mixer_of(operator, spec)
    fresh = operator.mixer(attention_spec(softcap=2.5, sinks=torch.zeros(HEADS)))
    fresh.load_state_dict(mixer.state_dict())
    for other in (copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer)), fresh):
        assert torch.equal(other(q, k, v, None, True), mixer(q, k, v, None, True))

"""What every mixer must do: outputs and gradients as its naive reference; padding, the future, states, cost, precision.

Operators are found in their folder; see tests/students/attention/mixers/found.py.
"""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from segue.errors import StudentError
from segue.students.attention.mixer import append_ones, group_heads, masked_softmax, normalise, repeat_heads
from segue.students.attention.module import Operator
from tests.students.attention.mixers.checks import (
    TOLERANCE,
    assert_naive,
    assert_near,
    attention_spec,
    inputs,
    mixer_of,
    padding,
    run,
)
from tests.students.attention.mixers.found import CAUSAL, ONE_OF_EACH, RECURRENT, SETTINGS, declared

WAYS = [(name, False) for name in SETTINGS] + [(name, True) for name in CAUSAL]
every_operator = pytest.mark.parametrize("name", SETTINGS)
every_way = pytest.mark.parametrize(("name", "causal"), WAYS, ids=[f"{name}{', causal' * causal}" for name, causal in WAYS])


def assert_as_the_reference(name: str, spec, q, k, v, token_mask, causal, g, dtypes=tuple(TOLERANCE)) -> None:
    operator = SETTINGS[name]
    naive, slack = declared(operator, "naive"), declared(operator, "SLACK", 1)
    assert_naive(naive, operator, spec, q, k, v, token_mask, causal, g, dtypes, slack)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("tokens", [1, 2, 63, 197])
@every_way
def test_outputs_and_gradients_are_the_references(name, causal, tokens, masked):
    spec = attention_spec()
    q, k, v, g = inputs(4 if masked else 1, spec, tokens)
    assert_as_the_reference(name, spec, q, k, v, padding(tokens) if masked else None, causal, g)


@pytest.mark.slow
@every_operator
def test_outputs_and_gradients_are_the_references_for_1000_tokens(name):
    spec = attention_spec(heads=2, key_heads=1)
    q, k, v, g = inputs(1, spec, 1000)
    assert_as_the_reference(name, spec, q, k, v, padding(1000)[2:3], name in CAUSAL, g, [torch.float32])


@every_operator
def test_a_scale_of_the_model_itself_is_used(name):
    spec = attention_spec(heads=2, key_heads=2, scale=0.7)
    q, k, v, g = inputs(1, spec, 20)
    assert_as_the_reference(name, spec, q, k, v, None, False, g, [torch.float64])


@every_way
def test_what_padding_holds_changes_nothing(name, causal):
    spec, token_mask = attention_spec(), padding(197)
    mixer, (q, k, v, g) = mixer_of(SETTINGS[name], spec), inputs(4, spec, 197)
    before = run(mixer, mixer, q, k, v, token_mask, causal, g)
    hidden = ~token_mask[:, None, :, None]
    for others in (3.0, math.inf, math.nan):
        other_q, other_k, other_v = q.masked_fill(hidden, -2.0), k.masked_fill(hidden, others), v.masked_fill(hidden, others)
        changed = run(mixer, mixer, other_q, other_k, other_v, token_mask, causal, g)
        assert all(torch.equal(changed[part], value) for part, value in before.items())
    assert all(before[part].masked_select(hidden).count_nonzero() == 0 for part in "qkv")


@every_way
def test_even_queries_of_padding_that_are_not_numbers_stay_among_themselves(name, causal):
    spec, token_mask = attention_spec(), padding(197)
    mixer, (q, k, v, _) = mixer_of(SETTINGS[name], spec), inputs(4, spec, 197)
    hidden = ~token_mask[:, None, :, None]
    broken = mixer(q.masked_fill(hidden, math.nan), k, v, token_mask, causal)
    assert torch.equal(broken.masked_fill(hidden, 0.0), mixer(q, k, v, token_mask, causal).masked_fill(hidden, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_way
def test_a_sequence_of_padding_alone_gives_zeros_and_finite_gradients(name, causal, dtype):
    spec, token_mask = attention_spec(), torch.zeros(2, 70, dtype=torch.bool)
    token_mask[1] = True
    mixer = mixer_of(SETTINGS[name], spec).to(dtype)
    q, k, v, g = (x.to(dtype).requires_grad_() for x in inputs(2, spec, 70))
    y = mixer(q, k, v, token_mask, causal)
    assert y[0].count_nonzero() == 0
    assert y[1].count_nonzero() > 0
    for gradient in torch.autograd.grad(y, [q, k, v, *mixer.parameters()], g, allow_unused=True, materialize_grads=True):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_changes_nothing(name):
    spec, now = attention_spec(), 150  # in the middle of a block
    mixer = mixer_of(SETTINGS[name], spec)
    q, k, v, g = inputs(1, spec, 300)
    ahead = (torch.arange(300) > now)[:, None]
    others = inputs(1, spec, 300, seed=1)
    y = mixer(q, k, v, None, True)
    changed = mixer(*(torch.where(ahead, 5 * other, x) for x, other in zip((q, k, v), others, strict=False)), None, True)
    assert torch.equal(changed[:, :, : now + 1], y[:, :, : now + 1])
    assert not torch.equal(changed[:, :, now + 1 :], y[:, :, now + 1 :])

    gradients = run(mixer, mixer, q, k, v, None, True, g.masked_fill(ahead, 0.0))
    for part in (name[0] for name in mixer.uses):
        assert gradients[part][:, :, now + 1 :].count_nonzero() == 0
        assert gradients[part][:, :, : now + 1].count_nonzero() > 0


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_sequence_begins_as_its_beginning_alone(name):
    spec = attention_spec()
    mixer = mixer_of(SETTINGS[name], spec)
    q, k, v, _ = inputs(1, spec, 300)
    complete, beginning = mixer(q, k, v, None, True), mixer(*(x[:, :, :90] for x in (q, k, v)), None, True)
    assert_near({"output": beginning}, {"output": complete[:, :, :90].double()}, TOLERANCE[torch.float32])  # other block sizes


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in CAUSAL])
def test_who_sees_the_complete_sequence_refuses_to_be_causal(name):
    spec = attention_spec()
    q, k, v, _ = inputs(1, spec, 3)
    with pytest.raises(StudentError) as error:
        mixer_of(SETTINGS[name], spec)(q, k, v, causal=True)
    assert str(error.value) == (
        f"{type(SETTINGS[name]).__name__} cannot be causal.\n"
        "  It sees the complete sequence at once, so the future would leak into the past.\n"
        "  Hint: use a causal operator, such as LinearAttention or WindowedLinear. Nothing was changed."
    )


@pytest.mark.parametrize(("of_q", "of_k"), [(100, 1), (1, 100), (10, 10)])
@every_way
def test_logits_a_hundred_times_as_large_stay_finite(name, causal, of_q, of_k):
    spec, token_mask = attention_spec(heads=2, key_heads=1), padding(197)[:3]
    mixer, (q, k, v, g) = mixer_of(SETTINGS[name], spec), inputs(3, spec, 197)
    found = run(mixer, mixer, of_q * q, of_k * k, v, token_mask, causal, g)
    assert all(x.isfinite().all() for x in found.values())
    assert found["output"].abs().max() <= 20 * v.abs().max()  # averages, of landmarks and of Fourier terms too


# States


PADDINGS = {
    "none": [],
    "left": [(1, slice(0, 40))],
    "between": [(0, slice(34, 191)), (1, slice(190, 195))],  # the state began without any
}


@pytest.mark.parametrize("padded", PADDINGS)
@pytest.mark.parametrize("name", RECURRENT)
def test_prefill_decode_step_and_update_state_are_the_formula(name, padded):
    """Compare with the full matrix of weights in float64, where nothing can hide in rounding."""
    spec = attention_spec(heads=4, key_heads=2, size=8, causal=True)
    torch.manual_seed(0)
    mixer = SETTINGS[name].mixer(spec).double()
    for parameter in mixer.parameters():
        nn.init.normal_(parameter)
    q, k, v = (2 * torch.randn(2, heads, 200, 8, dtype=torch.float64) for heads in (4, 2, 2))
    token_mask = torch.ones(2, 200, dtype=torch.bool)
    for row, hidden in PADDINGS[padded]:
        token_mask[row, hidden] = False
    state, found = None, []
    for begin, end in ((0, 30), (30, 31), (31, 33), (33, 192), (192, 193), (193, 195), (195, 196), (196, 200)):
        mask = token_mask[:, begin:end]
        chunk = (q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end], None if mask.all() else mask)
        if state and end - begin == 1:
            y, state = mixer.decode_step(*chunk, state)
        else:
            y, state = mixer.prefill(*chunk, state), mixer.update_state(*chunk[1:], state)
        found.append(y)
    expected = declared(SETTINGS[name], "naive")(SETTINGS[name], spec, mixer, q, k, v, token_mask, causal=True)
    real = token_mask[:, None, :, None]
    torch.testing.assert_close(torch.cat(found, dim=2) * real, expected * real, atol=1e-9, rtol=1e-9)


# Cost


class Saved:
    """Count the bytes that are kept for the backward pass, each storage once."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())

    def pack(self, x: Tensor) -> Tensor:
        self.storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x


def cost(operator: Operator, tokens: int, causal: bool) -> tuple[int, int]:
    """Return the operations of a forward and a backward pass, and the bytes kept in between."""
    spec, saved = attention_spec(heads=1, key_heads=1, size=8, tokens=tokens), Saved()
    mixer, (q, k, v, g) = operator.mixer(spec), inputs(1, spec, tokens)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x):
            y = mixer(q, k, v, None, causal)
        y.backward(g)
    return counter.get_total_flops(), saved.bytes


@every_way
def test_cost_grows_as_claimed(name, causal):
    squared = SETTINGS[name].cost.startswith("n²")
    few, many = (512, 2048) if squared else (1024, 8192)
    at_few, at_many = (cost(SETTINGS[name], tokens, causal) for tokens in (few, many))
    # torch counts no operations of sums and of Fourier transforms, and some operators keep nothing for the backward pass
    exponents = [math.log(after / before, many / few) for before, after in zip(at_few, at_many, strict=True) if before]
    if squared:
        assert exponents == pytest.approx([2, 2], abs=0.05)
    else:
        assert max(exponents, default=0) <= 1.1


# Compilers, precisions, files


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", [*ONE_OF_EACH, "hedgehog"])
def test_compiled_as_one_graph_it_is_the_same(name):
    spec, token_mask, causal = attention_spec(heads=2, key_heads=1), padding(140), name in CAUSAL
    mixer, (q, k, v, g) = mixer_of(SETTINGS[name], spec), inputs(4, spec, 140)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    eager = run(mixer, mixer, q, k, v, token_mask, causal, g)
    for part, value in run(compiled, mixer, q, k, v, token_mask, causal, g).items():
        torch.testing.assert_close(value, eager[part])


@every_way
def test_autocast_leaves_the_arithmetic_in_float32(name, causal):
    spec = attention_spec()
    mixer, (q, k, v, g) = mixer_of(SETTINGS[name], spec), inputs(2, spec, 70)
    plain = run(mixer, mixer, q, k, v, None, causal, g)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    full = run(autocast(mixer.forward), mixer, q, k, v, None, causal, g)
    half = autocast(mixer.forward)(q.bfloat16(), k.bfloat16(), v.bfloat16(), None, causal)
    rotated = autocast(mixer.forward)(q, k, v.bfloat16(), None, causal)  # norms and rotations give float32 queries and keys
    assert all(torch.equal(full[part], plain[part]) for part in plain)
    for y in (half, rotated):
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, plain["output"].bfloat16())


@every_operator
def test_a_state_dict_makes_another_mixer_the_same(name):
    spec = attention_spec()
    first, (q, k, v, _) = mixer_of(SETTINGS[name], spec), inputs(1, spec, 100)
    torch.manual_seed(1)
    second = SETTINGS[name].mixer(spec)
    if first.state_dict():
        assert not torch.equal(second(q, k, v), first(q, k, v))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(q, k, v), first(q, k, v))


@every_operator
def test_weights_and_random_numbers_are_in_the_state_dict(name):
    mixer = SETTINGS[name].mixer(attention_spec())
    expected = declared(SETTINGS[name], "STATE_DICT", {}).get(name, {})
    assert {key: tuple(value.shape) for key, value in mixer.state_dict().items()} == expected


# Parts of mixers


def test_repeat_heads_repeats_shared_heads_in_place():
    x = torch.arange(2.0)[None, :, None, None]
    assert repeat_heads(x, 6).flatten().tolist() == [0, 0, 0, 1, 1, 1]
    assert repeat_heads(x, 2) is x
    assert group_heads(repeat_heads(x, 6), 2)[0, :, :, 0].tolist() == [[0, 0, 0], [1, 1, 1]]


def test_masked_softmax_sees_only_what_is_visible():
    scores = torch.tensor([[1.0, 2.0, 900.0], [1.0, 2.0, 3.0]], requires_grad=True)
    visible = torch.tensor([[True, True, False], [False, False, False]])
    weights = masked_softmax(scores, visible)
    torch.testing.assert_close(weights[0, :2], scores[0, :2].softmax(-1))
    assert weights[0, 2] == 0
    assert weights[1].tolist() == [0, 0, 0]
    assert torch.equal(masked_softmax(scores, None), scores.softmax(-1))
    weights.square().sum().backward()
    assert scores.grad.isfinite().all()
    assert scores.grad.masked_select(~visible).count_nonzero() == 0


def test_normalise_divides_by_the_last_column_and_never_by_less_than_the_least():
    sums = torch.tensor([[2.0, 4.0, 8.0], [0.0, 3e-7, 1e-7]])
    torch.testing.assert_close(normalise(sums), torch.tensor([[0.25, 0.5], [0.0, 0.3]]))
    torch.testing.assert_close(normalise(sums, 1e-30), torch.tensor([[0.25, 0.5], [0.0, 3.0]]))
    assert append_ones(torch.zeros(2, 3)).tolist() == [[0, 0, 0, 1], [0, 0, 0, 1]]

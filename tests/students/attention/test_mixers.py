"""The mixers: outputs and gradients against naive references, and what each promises about padding, the future and cost."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from segue.errors import PlanError, StudentError
from segue.students import (
    Fourier,
    Geometry,
    LinearAttention,
    Linformer,
    Nystrom,
    Performer,
    Projection,
    SlidingWindow,
    Softmax,
    WindowedLinear,
)
from segue.students.attention.mixer import Mixer, divided, every_head, softmax_where, with_ones
from segue.students.attention.mixers.nystrom import pseudo_inverse
from segue.students.attention.mixers.performer import orthogonal_directions
from segue.students.attention.module import Operator
from tests.students.attention import naive_mixers


def squared(x: Tensor) -> Tensor:
    return x.square() + 0.1


OPERATORS: dict[str, Operator] = {
    "softmax": Softmax(),
    "elu": LinearAttention(),
    "relu": LinearAttention(feature_map="relu"),
    "hedgehog": LinearAttention(feature_map="hedgehog"),
    "own map": LinearAttention(feature_map=squared),
    "performer": Performer(features=10),
    "linformer": Linformer(rank=5),
    "window": SlidingWindow(window=5, global_tokens=0),
    "window, global": SlidingWindow(window=9, global_tokens=3),
    "wide window": SlidingWindow(window=70, global_tokens=1),  # wider than the smallest block
    "windowed": WindowedLinear(window=5),
    "windowed, wide": WindowedLinear(window=70, feature_map="elu"),
    "nystrom": Nystrom(landmarks=6, iterations=4),
    "fourier": Fourier(),
}
CAUSAL = [name for name in OPERATORS if name not in ("linformer", "nystrom", "fourier")]
WAYS = [(name, False) for name in OPERATORS] + [(name, True) for name in CAUSAL]
every_operator = pytest.mark.parametrize("name", OPERATORS)
every_way = pytest.mark.parametrize(("name", "causal"), WAYS, ids=[f"{name}{', causal' * causal}" for name, causal in WAYS])

HEADS, KEY_HEADS, SIZE = 6, 2, 7

# The largest difference as a share of the largest value; inputs are numbers that bf16 can hold, so all precisions see the same.
TOLERANCE = {
    torch.float64: 1e-11,  # sums in another order
    torch.float32: 5e-5,  # the same, with a unit of 1e-7 and a few hundred terms that may cancel
    torch.bfloat16: 1.05 * 2**-8,  # computed in float32 and rounded once, by half a unit of 2**-7
}
NYSTROM = 10  # times as much: its iteration lets errors grow where the landmarks are nearly alike


def tolerance(name: str, dtype: torch.dtype) -> float:
    return NYSTROM * TOLERANCE[dtype] if (name, dtype) == ("nystrom", torch.float32) else TOLERANCE[dtype]


def geometry(heads: int = HEADS, key_heads: int = KEY_HEADS, size: int = SIZE, tokens: int = 1000, **others) -> Geometry:
    projections = {part: Projection(torch.zeros(n * size, 1)) for part, n in (("query", heads), ("key", key_heads))}
    return Geometry(heads=heads, head_size=size, value=projections["key"], tokens=tokens, **projections, **others)


def mixer_of(operator: Operator, shape: Geometry) -> Mixer:
    """Make the operator's mixer, with weights that differ between heads and that bf16 can hold."""
    torch.manual_seed(0)
    mixer = operator.mixer(shape)
    for parameter in mixer.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    return mixer.bfloat16().float()


def inputs(batch: int, shape: Geometry, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw queries, keys, values and an output gradient that bf16 can hold; shifted, so that few products of relus vanish."""
    generator = torch.Generator().manual_seed(seed)
    heads = (shape.heads, shape.key_heads, shape.key_heads, shape.heads)
    draws = (torch.randn(batch, h, tokens, shape.head_size, generator=generator) for h in heads)
    q, k, v, g = ((x + 1).bfloat16().float() for x in draws)
    return q, k, v, g


def padding(tokens: int) -> Tensor:
    """Mask four sequences: on the left, on the right, scattered, and altogether."""
    place, third = torch.arange(tokens), tokens // 3
    scattered = torch.rand(tokens, generator=torch.Generator().manual_seed(1)) < 0.6
    scattered[tokens // 2] = True
    return torch.stack([place >= third, place < tokens - third, scattered, place < 0])


def run(
    call, mixer: nn.Module, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool, g: Tensor, dtype: torch.dtype
):
    """Return the output and the gradients by q, k, v and the mixer's parameters, by name; padding asks for nothing."""
    if keep is not None:
        g = g.masked_fill(~keep[:, None, :, None], 0.0)
    leaves = {n: x.detach().to(dtype).requires_grad_() for n, x in (("q", q), ("k", k), ("v", v))}
    y = call(leaves["q"], leaves["k"], leaves["v"], keep, causal)
    assert y.dtype == dtype
    assert y.shape == q.shape
    leaves |= dict(mixer.named_parameters())
    found = torch.autograd.grad(y, list(leaves.values()), g.to(dtype), allow_unused=True, materialize_grads=True)
    shown = y.detach() if keep is None else y.detach().masked_fill(~keep[:, None, :, None], 0.0)
    return {"output": shown} | dict(zip(leaves, found, strict=True))


def expected(operator: Operator, shape: Geometry, mixer: nn.Module, q, k, v, keep, causal, g):
    double = copy.deepcopy(mixer).double()
    return run(partial(naive_mixers.mixed, operator, shape, double), double, q, k, v, keep, causal, g, torch.float64)


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], share: float) -> None:
    assert found.keys() == expected.keys()
    for part, value in expected.items():
        largest = max(value.abs().max().item(), 0.5)  # what cancels to nothing leaves the noise of its terms
        difference = (found[part].double() - value).abs().max().item() / largest
        assert difference <= share, f"{part} differs by {difference:.2g} of its largest value"


def assert_as_the_reference(
    name: str, shape: Geometry, q, k, v, keep, causal, g, dtypes=tuple(TOLERANCE), slack: int = 1
) -> None:
    operator = OPERATORS[name]
    mixer = mixer_of(operator, shape)
    right = expected(operator, shape, mixer, q, k, v, keep, causal, g)
    for dtype in dtypes:
        ours = copy.deepcopy(mixer).to(dtype)
        assert_near(run(ours, ours, q, k, v, keep, causal, g, dtype), right, slack * tolerance(name, dtype))


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("tokens", [1, 2, 63, 197])
@every_way
def test_outputs_and_gradients_are_the_references(name, causal, tokens, masked):
    shape = geometry()
    q, k, v, g = inputs(4 if masked else 1, shape, tokens)
    assert_as_the_reference(name, shape, q, k, v, padding(tokens) if masked else None, causal, g)


@every_operator
def test_outputs_and_gradients_are_the_references_for_1000_tokens(name):
    shape = geometry(heads=2, key_heads=1)
    q, k, v, g = inputs(1, shape, 1000)
    assert_as_the_reference(name, shape, q, k, v, padding(1000)[2:3], name in CAUSAL, g, [torch.float32])


@every_operator
def test_a_scale_of_the_model_itself_is_used(name):
    shape = geometry(heads=2, key_heads=2, scale=0.7)
    q, k, v, g = inputs(1, shape, 20)
    assert_as_the_reference(name, shape, q, k, v, None, False, g, [torch.float64])


@every_way
def test_what_padding_holds_changes_nothing(name, causal):
    shape, keep = geometry(), padding(197)
    mixer, (q, k, v, g) = mixer_of(OPERATORS[name], shape), inputs(4, shape, 197)
    before = run(mixer, mixer, q, k, v, keep, causal, g, torch.float32)
    hidden = ~keep[:, None, :, None]
    for others in (3.0, math.inf, math.nan):
        other_q, other_k, other_v = q.masked_fill(hidden, -2.0), k.masked_fill(hidden, others), v.masked_fill(hidden, others)
        changed = run(mixer, mixer, other_q, other_k, other_v, keep, causal, g, torch.float32)
        assert all(torch.equal(changed[part], value) for part, value in before.items())
    assert all(before[part].masked_select(hidden).count_nonzero() == 0 for part in "qkv")


@every_way
def test_even_queries_of_padding_that_are_not_numbers_stay_among_themselves(name, causal):
    shape, keep = geometry(), padding(197)
    mixer, (q, k, v, _) = mixer_of(OPERATORS[name], shape), inputs(4, shape, 197)
    hidden = ~keep[:, None, :, None]
    broken = mixer(q.masked_fill(hidden, math.nan), k, v, keep, causal)
    assert torch.equal(broken.masked_fill(hidden, 0.0), mixer(q, k, v, keep, causal).masked_fill(hidden, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_way
def test_a_sequence_of_padding_alone_gives_zeros_and_finite_gradients(name, causal, dtype):
    shape, keep = geometry(), torch.zeros(2, 70, dtype=torch.bool)
    keep[1] = True
    mixer = mixer_of(OPERATORS[name], shape).to(dtype)
    q, k, v, g = (x.to(dtype).requires_grad_() for x in inputs(2, shape, 70))
    y = mixer(q, k, v, keep, causal)
    assert y[0].count_nonzero() == 0
    assert y[1].count_nonzero() > 0
    for gradient in torch.autograd.grad(y, [q, k, v, *mixer.parameters()], g, allow_unused=True, materialize_grads=True):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_changes_nothing(name):
    shape, now = geometry(), 150  # in the middle of a block
    mixer = mixer_of(OPERATORS[name], shape)
    q, k, v, g = inputs(1, shape, 300)
    ahead = (torch.arange(300) > now)[:, None]
    others = inputs(1, shape, 300, seed=1)
    y = mixer(q, k, v, None, True)
    changed = mixer(*(torch.where(ahead, 5 * other, x) for x, other in zip((q, k, v), others, strict=False)), None, True)
    assert torch.equal(changed[:, :, : now + 1], y[:, :, : now + 1])
    assert not torch.equal(changed[:, :, now + 1 :], y[:, :, now + 1 :])

    gradients = run(mixer, mixer, q, k, v, None, True, g.masked_fill(ahead, 0.0), torch.float32)
    for part in "qkv":
        assert gradients[part][:, :, now + 1 :].count_nonzero() == 0
        assert gradients[part][:, :, : now + 1].count_nonzero() > 0


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_sequence_begins_as_its_beginning_alone(name):
    shape = geometry()
    mixer = mixer_of(OPERATORS[name], shape)
    q, k, v, _ = inputs(1, shape, 300)
    whole, beginning = mixer(q, k, v, None, True), mixer(*(x[:, :, :90] for x in (q, k, v)), None, True)
    assert_near({"output": beginning}, {"output": whole[:, :, :90].double()}, TOLERANCE[torch.float32])  # other block sizes


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in CAUSAL])
def test_who_sees_the_whole_sequence_refuses_to_be_causal(name):
    shape = geometry()
    q, k, v, _ = inputs(1, shape, 3)
    with pytest.raises(StudentError) as error:
        mixer_of(OPERATORS[name], shape)(q, k, v, causal=True)
    assert str(error.value) == (
        f"{name.capitalize()} was asked to mix tokens causally.\n"
        "  It sees the whole sequence at once, so the future would leak into the past.\n"
        "  Hint: use LinearAttention, Performer, SlidingWindow or WindowedLinear in causal models. Nothing was changed."
    )


@pytest.mark.parametrize(("of_q", "of_k"), [(100, 1), (1, 100), (10, 10)])
@every_way
def test_logits_a_hundred_times_as_large_stay_finite(name, causal, of_q, of_k):
    shape, keep = geometry(heads=2, key_heads=1), padding(197)[:3]
    mixer, (q, k, v, g) = mixer_of(OPERATORS[name], shape), inputs(3, shape, 197)
    found = run(mixer, mixer, of_q * q, of_k * k, v, keep, causal, g, torch.float32)
    assert all(x.isfinite().all() for x in found.values())
    assert found["output"].abs().max() <= 20 * v.abs().max()  # averages, of landmarks and of Fourier terms too


@pytest.mark.parametrize(("name", "causal"), [way for way in WAYS if "window" in way[0] or way[0] in ("softmax", "linformer")])
def test_softmax_of_large_logits_is_the_references(name, causal):
    shape = geometry(heads=2, key_heads=1)
    q, k, v, g = inputs(1, shape, 100)
    slack = 100  # as much more do errors of k count
    assert_as_the_reference(name, shape, 100 * q, k, v, None, causal, g, [torch.float64], slack)


@pytest.mark.parametrize("causal", [False, True])
def test_performer_weighs_keys_of_very_different_length_rightly(causal):
    shape = geometry(heads=2, key_heads=1)
    q, k, v, g = inputs(1, shape, 300)
    lengths = torch.linspace(12, 0.1, 300)[:, None]  # the weights of the first keys are e**-200 of those of the last
    assert_as_the_reference("performer", shape, q, k * lengths, v, None, causal, g, [torch.float64, torch.float32])


def test_linear_attention_that_sees_no_weight_returns_zeros():
    shape = geometry(heads=1, key_heads=1)
    q, k, v, g = inputs(1, shape, 9)
    mixer = mixer_of(LinearAttention(feature_map="relu"), shape)
    for causal in (False, True):
        found = run(mixer, mixer, q, -k.abs(), v, None, causal, g, torch.float32)
        assert found["output"].count_nonzero() == 0
        assert all(x.isfinite().all() for x in found.values())


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
    shape, saved = geometry(heads=1, key_heads=1, size=8, tokens=tokens), Saved()
    mixer, (q, k, v, g) = operator.mixer(shape), inputs(1, shape, tokens)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x):
            y = mixer(q, k, v, None, causal)
        y.backward(g)
    return counter.get_total_flops(), saved.bytes


@every_way
def test_cost_grows_as_claimed(name, causal):
    few, many = (512, 2048) if name == "softmax" else (1024, 8192)
    (flops, held), (more_flops, more_held) = (cost(OPERATORS[name], tokens, causal) for tokens in (few, many))
    if name == "fourier":  # torch counts no operations of a Fourier transform, which keeps nothing
        assert more_held == held == 0
        return
    exponents = [math.log(after / before, many / few) for before, after in ((flops, more_flops), (held, more_held))]
    if name == "softmax":
        assert exponents == pytest.approx([2, 2], abs=0.05)
    else:
        assert max(exponents) <= 1.1


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "name", ["softmax", "hedgehog", "performer", "linformer", "window, global", "windowed", "nystrom", "fourier"]
)
def test_compiled_as_one_graph_it_is_the_same(name):
    shape, keep, causal = geometry(heads=2, key_heads=1), padding(140), name in CAUSAL
    mixer, (q, k, v, g) = mixer_of(OPERATORS[name], shape), inputs(4, shape, 140)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    eager = run(mixer, mixer, q, k, v, keep, causal, g, torch.float32)
    for part, value in run(compiled, mixer, q, k, v, keep, causal, g, torch.float32).items():
        torch.testing.assert_close(value, eager[part])


@pytest.mark.usefixtures("compiler")
def test_inductor_gives_what_eager_gives():
    shape, keep = geometry(heads=2, key_heads=1), padding(20)
    mixer, (q, k, v, g) = mixer_of(OPERATORS["performer"], shape), inputs(4, shape, 20)
    compiled = torch.compile(mixer, fullgraph=True)
    eager = run(mixer, mixer, q, k, v, keep, False, g, torch.float32)
    found = run(compiled, mixer, q, k, v, keep, False, g, torch.float32)
    assert_near(found, {part: value.double() for part, value in eager.items()}, TOLERANCE[torch.float32])


@every_way
def test_autocast_leaves_the_arithmetic_in_float32(name, causal):
    shape = geometry()
    mixer, (q, k, v, g) = mixer_of(OPERATORS[name], shape), inputs(2, shape, 70)
    plain = run(mixer, mixer, q, k, v, None, causal, g, torch.float32)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    whole = run(autocast(mixer.forward), mixer, q, k, v, None, causal, g, torch.float32)
    half = autocast(mixer.forward)(q.bfloat16(), k.bfloat16(), v.bfloat16(), None, causal)
    rotated = autocast(mixer.forward)(q, k, v.bfloat16(), None, causal)  # norms and rotations give float32 queries and keys
    assert all(torch.equal(whole[part], plain[part]) for part in plain)
    for y in (half, rotated):
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, plain["output"].bfloat16())


@every_operator
def test_a_state_dict_makes_another_mixer_the_same(name):
    shape = geometry()
    first, (q, k, v, _) = mixer_of(OPERATORS[name], shape), inputs(1, shape, 100)
    torch.manual_seed(1)
    second = OPERATORS[name].mixer(shape)
    if first.state_dict():
        assert not torch.equal(second(q, k, v), first(q, k, v))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(q, k, v), first(q, k, v))


@every_operator
def test_weights_and_drawn_numbers_are_in_the_state_dict(name):
    mixer = OPERATORS[name].mixer(geometry())
    held = {
        "hedgehog": {"of_queries.weight": (6, 7, 7), "of_keys.weight": (2, 7, 7)},
        "performer": {"directions": (10, 7)},
        "linformer": {"of_keys": (5, 1000), "of_values": (5, 1000)},
        "windowed": {"of_queries.weight": (6, 7, 7), "of_keys.weight": (2, 7, 7), "near_share": (6, 1, 1)},
        "windowed, wide": {"near_share": (6, 1, 1)},
    }.get(name, {})
    assert {key: tuple(value.shape) for key, value in mixer.state_dict().items()} == held


def assert_softmax(operator: Operator, tokens: int, causal: bool) -> None:
    shape, keep = geometry(), padding(tokens)
    q, k, v, g = inputs(4, shape, tokens)
    mixer, softmax = mixer_of(operator, shape).double(), Softmax().mixer(shape)
    right = run(softmax, softmax, q, k, v, keep, causal, g, torch.float64)
    found = run(mixer, mixer, q, k, v, keep, causal, g, torch.float64)
    assert_near({part: found[part] for part in right}, right, TOLERANCE[torch.float64])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("operator", [SlidingWindow(window=90), WindowedLinear(window=90)])
@pytest.mark.parametrize("tokens", [3, 89, 90])
def test_a_window_over_everything_is_softmax(operator, tokens, causal):
    assert_softmax(operator, tokens, causal)


@pytest.mark.parametrize("operator", [SlidingWindow(window=89, global_tokens=0), WindowedLinear(window=89)])
def test_a_window_that_misses_one_token_is_not(operator):
    shape = geometry()
    q, k, v, _ = inputs(1, shape, 90)
    y, softmax = (mixer_of(x, shape)(q, k, v, None, True) for x in (operator, Softmax()))
    torch.testing.assert_close(y[:, :, :-1], softmax[:, :, :-1])
    assert (y - softmax)[:, :, -1].abs().max() > 1e-4


@pytest.mark.parametrize("tokens", [1, 31, 32])
def test_nystrom_with_a_landmark_for_every_token_is_softmax(tokens):
    assert_softmax(Nystrom(landmarks=32), tokens, False)


def test_nystrom_approaches_softmax_as_landmarks_grow():
    shape = geometry(heads=2, key_heads=2)
    q, k, v, _ = inputs(1, shape, 256)
    steps = torch.arange(256)[:, None] / 40
    q, k = (0.1 * x + 3 * torch.cat([steps.sin(), steps.cos(), steps.new_zeros(256, 5)], -1) for x in (q, k))  # smooth in time
    q, k, v = q.double(), k.double(), v.double()
    right = Softmax().mixer(shape)(q, k, v)
    few, more, many = ((Nystrom(landmarks=n).mixer(shape)(q, k, v) - right).norm() / right.norm() for n in (2, 8, 16))
    assert few > 4 * more > 12 * many
    assert many < 0.01


def test_the_iteration_approaches_the_pseudo_inverse():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 2, 8, 8, generator=generator, dtype=torch.float64).softmax(-1)
    a = 0.5 * weights + 0.5 * torch.eye(8, dtype=torch.float64)
    right = torch.linalg.pinv(a)
    far, near = ((pseudo_inverse(a, n) - right).abs().max().item() for n in (2, 8))
    assert far > 1e-2
    assert near < 1e-12
    flat = a[..., :7, :7].new_zeros(3, 2, 8, 8)
    flat[..., :7, :7] = a[..., :7, :7]  # a landmark without tokens
    torch.testing.assert_close(pseudo_inverse(flat, 10), torch.linalg.pinv(flat))
    for one, inverse in zip(a.flatten(0, 1), pseudo_inverse(a, 3).flatten(0, 1), strict=True):
        torch.testing.assert_close(naive_mixers.iterated_inverse(one, 3), inverse)


def test_fourier_is_orthonormal():
    shape = geometry(heads=2, key_heads=2)
    mixer, (q, k, v, _) = Fourier().mixer(shape), inputs(2, shape, 30)
    v = v.double()
    real, imaginary = mixer(q, k, v), torch.fft.fft2(v, norm="ortho").imag
    assert (real.square().sum() + imaginary.square().sum()).item() == pytest.approx(v.square().sum().item())
    mirrored = v.flip(2, 3).roll((1, 1), (2, 3))
    torch.testing.assert_close(mixer(q, k, real), (v + mirrored) / 2)  # the transform of a transform is the mirror image


def test_fourier_needs_neither_queries_nor_keys():
    shape = geometry()
    mixer, (q, k, v, _) = Fourier().mixer(shape), inputs(1, shape, 5)
    assert mixer.uses == ("value",)
    assert torch.equal(mixer(q, k, v), mixer(torch.zeros_like(q), torch.zeros_like(k), v))


def test_performers_directions_are_orthogonal_in_groups():
    w = orthogonal_directions(17, 7, torch.Generator().manual_seed(0))
    assert w.shape == (17, 7)
    angles = torch.nn.functional.normalize(w, dim=-1) @ torch.nn.functional.normalize(w, dim=-1).T
    for group in (slice(0, 7), slice(7, 14), slice(14, 17)):
        torch.testing.assert_close(angles[group, group], torch.eye(angles[group, group].shape[0]), atol=1e-5, rtol=0)
    assert angles[:7, 7:14].abs().max() > 0.1


def test_performers_directions_are_as_long_as_gaussian_vectors_and_point_everywhere():
    w = orthogonal_directions(7000, 7, torch.Generator().manual_seed(0))
    squares = w.square().sum(-1)  # chi-square with 7 degrees of freedom: mean 7, variance 14
    assert squares.mean().item() == pytest.approx(7, rel=0.03)
    assert squares.var().item() == pytest.approx(14, rel=0.1)
    assert w.mean(0).abs().max() < 0.05
    torch.testing.assert_close(w.T @ w / 7000, torch.eye(7), atol=0.05, rtol=0)


def test_performer_approaches_softmax_as_features_grow():
    shape = geometry(heads=2, key_heads=1)
    q, k, v, _ = inputs(1, shape, 20)
    q, k = (q - 1) / 2, (k - 1) / 2
    right = Softmax().mixer(shape)(q, k, v)

    def error(features: int) -> float:
        mixer, found = Performer(features=features).mixer(shape), []
        for seed in range(12):
            mixer.redraw_(seed)
            found.append((mixer(q, k, v) - right).norm() / right.norm())
        return torch.stack(found).mean().item()

    few, more, many = (error(features) for features in (14, 224, 3584))  # 16 times as many: in the long run 4 times as near
    assert few > 2 * more > 6 * many
    assert many < 0.03


def test_performer_redraws_the_same_directions_from_the_same_seed():
    torch.manual_seed(0)
    mixer = Performer(features=20).mixer(geometry())
    drawn = [mixer.directions.clone()]
    state = torch.get_rng_state()
    for seed in (1, 2, 1):
        mixer.redraw_(seed)
        drawn.append(mixer.directions.clone())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[1], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    torch.manual_seed(0)
    mixer.reset_parameters()
    assert torch.equal(mixer.directions, drawn[0])
    half = copy.deepcopy(mixer).bfloat16()
    half.redraw_(1)
    assert torch.equal(half.directions, drawn[1].bfloat16())


def test_linformer_refuses_more_tokens_than_it_has_positions_for():
    shape = geometry(tokens=8)
    q, k, v, _ = inputs(1, shape, 9)
    mixer = Linformer().mixer(shape)
    assert mixer(*(x[:, :, :8] for x in (q, k, v))).isfinite().all()
    with pytest.raises(StudentError) as error:
        mixer(q, k, v)
    assert str(error.value) == (
        "Linformer was called with 9 tokens.\n  It has learned positions for 8.\n  Hint: make it longer: Linformer(tokens=9)."
    )
    assert Linformer(tokens=9).mixer(shape)(q, k, v).isfinite().all()


def test_linformer_must_know_the_longest_sequence():
    with pytest.raises(StudentError) as error:
        Linformer().mixer(geometry(tokens=None))
    assert str(error.value) == (
        "Linformer was asked for a student.\n"
        "  It learns one weight per position, and this model does not say how many positions it has.\n"
        "  Hint: say the longest sequence: Linformer(rank=64, tokens=197). Nothing was changed."
    )


def test_linformers_rows_keep_the_size_of_what_they_sum():
    torch.manual_seed(0)
    mixer = Linformer(rank=50).mixer(geometry(tokens=400))
    for weight in (mixer.of_keys, mixer.of_values):
        assert weight.std().item() == pytest.approx(0.05, rel=0.03)


def test_windowed_linear_begins_half_near():
    assert WindowedLinear().mixer(geometry()).near_share.sigmoid().unique().tolist() == [0.5]


@pytest.mark.parametrize(
    ("operator", "setting"),
    [
        (SlidingWindow(window=0), "window=0"),
        (SlidingWindow(global_tokens=-1), "global_tokens=-1"),
        (WindowedLinear(window=2.5), "window=2.5"),
        (Linformer(rank=-1), "rank=-1"),
        (Linformer(tokens=-4), "tokens=-4"),
        (Nystrom(landmarks=True), "landmarks=True"),
        (Nystrom(iterations=0), "iterations=0"),
        (Performer(features=0), "features=0"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_count_must_count(operator, setting):
    with pytest.raises(PlanError, match=f"^{setting} was asked for"):
        operator.mixer(geometry())


def test_every_head_repeats_shared_heads_in_place():
    x = torch.arange(2.0)[None, :, None, None]
    assert every_head(x, 6).flatten().tolist() == [0, 0, 0, 1, 1, 1]
    assert every_head(x, 2) is x


def test_softmax_where_sees_only_what_is_seen():
    scores = torch.tensor([[1.0, 2.0, 900.0], [1.0, 2.0, 3.0]], requires_grad=True)
    seen = torch.tensor([[True, True, False], [False, False, False]])
    weights = softmax_where(scores, seen)
    torch.testing.assert_close(weights[0, :2], scores[0, :2].softmax(-1))
    assert weights[0, 2] == 0
    assert weights[1].tolist() == [0, 0, 0]
    assert torch.equal(softmax_where(scores, None), scores.softmax(-1))
    weights.square().sum().backward()
    assert scores.grad.isfinite().all()
    assert scores.grad.masked_select(~seen).count_nonzero() == 0


def test_divided_divides_by_the_last_column_and_never_by_less_than_the_least():
    sums = torch.tensor([[2.0, 4.0, 8.0], [0.0, 3e-7, 1e-7]])
    torch.testing.assert_close(divided(sums), torch.tensor([[0.25, 0.5], [0.0, 0.3]]))
    torch.testing.assert_close(divided(sums, 1e-30), torch.tensor([[0.25, 0.5], [0.0, 3.0]]))
    assert with_ones(torch.zeros(2, 3)).tolist() == [[0, 0, 0, 1], [0, 0, 0, 1]]

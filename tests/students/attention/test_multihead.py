"""torch.nn.MultiheadAttention: every way to call it is read as torch means it, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import segue
from segue.errors import StudentError
from segue.sites import Site
from segue.students import LinearAttention, SlidingWindow, Softmax
from segue.students.attention.mixer import NoWeights
from tests.helpers import models

HERE = Site("here")


def teacher_of(**settings: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    teacher = nn.MultiheadAttention(32, 4, **settings).eval()
    models.scramble_(teacher)
    return teacher


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


FUTURE = torch.ones(6, 6, dtype=torch.bool).triu(1)
NUMBERS = torch.linspace(-3, 0, 12).view(2, 6)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": FUTURE},
        {"key_padding_mask": torch.tensor([False] * 4 + [True] * 2)},
        {"attn_mask": torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(1))},
    ],
    ids=["plain", "without weights", "weights of each head", "causal", "padding", "a bias of each head"],
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_one_sequence_without_a_batch(call: dict[str, Any], batch_first: bool) -> None:
    teacher, x = teacher_of(batch_first=batch_first), torch.randn(6, 32)
    student = Softmax()(teacher, HERE)
    for found, expected in zip(student(x, x, x, **call), teacher(x, x, x, **call), strict=True):
        assert (found is None and expected is None) or (found.shape == expected.shape and close(found, expected))
    if "attn_mask" not in call or call["attn_mask"].dim() == 2:
        y = LinearAttention()(teacher, HERE)(x, x, x, **call)[0]
        assert y.shape == x.shape
        assert y.isfinite().all()


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_softmax_returns_the_weights(average: bool, batch_first: bool) -> None:
    teacher, x = teacher_of(batch_first=batch_first), torch.randn(2, 6, 32)
    x = x if batch_first else x.transpose(0, 1)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    for call in ({}, {"key_padding_mask": padding}, {"attn_mask": FUTURE}, {"key_padding_mask": NUMBERS}):
        call = {**call, "average_attn_weights": average}
        y, weights = Softmax()(teacher, HERE)(x, x, x, **call)
        expected, of_teacher = teacher(x, x, x, **call)
        assert close(y, expected)
        assert close(weights, of_teacher)


class AsksForWeights(nn.Module):
    """A model that calls its attention as torch's documentation does."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attn = teacher_of(batch_first=True)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attn(x, x, x)
        return self.use(y, weights)


def test_weights_that_nobody_uses_are_asked_for_in_vain() -> None:
    model, x = AsksForWeights(lambda y, _: y), torch.randn(2, 6, 32)
    original = model(x)
    handover = segue.replace_(model, segue.Plan(sites="attn", student=LinearAttention()), total_steps=4)
    assert torch.equal(model(x), original)
    for _ in range(2):
        model.train()(x).square().mean().backward()
        handover.step()
    handover.finalize_(force=True)
    assert model(x).isfinite().all()


USES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an attribute": lambda y, w: w.mean(),
    "a sum": lambda y, w: w + 1,
    "a tensor and it": lambda y, w: y.sum() * w,
    "an entry": lambda y, w: w[0],
    "a function": lambda y, w: torch.sum(w),
    "a list of it": lambda y, w: torch.stack([w, w]),
    "its truth": lambda y, w: y if w else None,
    "its parts": lambda y, w: list(w),
    "its length": lambda y, w: len(w),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_weights_that_an_operator_lacks_refuse_to_be_used(use: Callable[[Tensor, Tensor], Any]) -> None:
    model, x = AsksForWeights(use), torch.randn(2, 6, 32)
    handover = segue.replace_(model, segue.Plan(sites="attn", student=LinearAttention()), total_steps=4)
    handover.step()
    with pytest.raises(StudentError) as caught:
        model.train()(x)
    assert str(caught.value) == (
        "LinearAttention has no attention weights.\n"
        "  The code around a site asks for them and uses them, and only softmax over all tokens has them.\n"
        "  Hint: call with need_weights=False, or use Softmax at this site, which returns them."
    )


def test_missing_weights_are_copied() -> None:
    assert isinstance(copy.deepcopy(NoWeights("Fourier")), NoWeights)


def test_weights_are_blended() -> None:
    model, x = AsksForWeights(lambda y, w: w), torch.randn(2, 6, 32)
    original = model(x)
    handover = segue.replace_(model, segue.Plan(sites="attn", student=Softmax()), total_steps=4)
    handover.step()
    assert close(model.train()(x), original)


def test_numbers_at_keys_are_added_and_hide_nothing() -> None:
    teacher, x = teacher_of(batch_first=True), torch.randn(2, 6, 32)
    call = {"key_padding_mask": NUMBERS, "need_weights": False}
    expected = teacher(x, x, x, **call)[0]
    for operator in (Softmax(), SlidingWindow(window=6, sinks=0)):
        assert close(operator(teacher, HERE)(x, x, x, **call)[0], expected)
    with pytest.raises(StudentError) as caught:
        LinearAttention()(teacher, HERE)(x, x, x, **call)
    assert str(caught.value) == (
        "LinearAttention cannot add a bias to its logits.\n"
        "  The call brings one (positions, or a mask of numbers), and its weights are not a softmax of logits.\n"
        "  Hint: leave it out of the call, use SlidingWindow or Softmax there, or LinearAttention(ignore=('bias',)) to do "
        "without it."
    )
    ignoring = LinearAttention(ignore=("bias",))(teacher, HERE)
    assert torch.equal(ignoring(x, x, x, **call)[0], ignoring(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"add_zero_attn": True}, "It has add_zero_attn=True, a key of zeros, for which operators have no counterpart."),
        ({"add_bias_kv": True}, "It has add_bias_kv=True, a learned key and value, for which operators have no counterpart."),
    ],
    ids=["zeros", "learned"],
)
def test_a_key_more_than_tokens_is_refused(settings: dict[str, bool], reason: str) -> None:
    with pytest.raises(StudentError) as caught:
        LinearAttention()(teacher_of(**settings), Site("encoder.attn"))
    assert reason in str(caught.value)
    assert "'encoder.attn'" in str(caught.value)


def test_keys_and_values_of_other_widths() -> None:
    teacher = teacher_of(kdim=8, vdim=12, batch_first=True)
    x, keys, values = torch.randn(2, 6, 32), torch.randn(2, 5, 8), torch.randn(2, 5, 12)
    for found, expected in zip(Softmax()(teacher, HERE)(x, keys, values), teacher(x, keys, values), strict=True):
        assert close(found, expected)
    assert LinearAttention()(teacher, HERE)(x, keys, values)[0].isfinite().all()


def test_masks_of_each_sequence_and_head() -> None:
    teacher, x = teacher_of(batch_first=True), torch.randn(2, 6, 32)
    mask = torch.rand(8, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.3
    mask &= ~torch.eye(6, dtype=torch.bool)
    assert close(Softmax()(teacher, HERE)(x, x, x, attn_mask=mask)[0], teacher(x, x, x, attn_mask=mask)[0])


@pytest.mark.parametrize("sites", ["layers.*.self_attn", "layers.*.multihead_attn"])
def test_a_decoder_of_torch(sites: str) -> None:
    torch.manual_seed(0)
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, 0.0, batch_first=True), 2).eval()
    models.scramble_(model)
    call = {"tgt": torch.randn(2, 6, 32), "memory": torch.randn(2, 5, 32), "tgt_mask": FUTURE}
    expected = model(**call)
    students = copy.deepcopy(model)
    segue.replace_(students, segue.Plan(sites=sites, student=Softmax()), total_steps=2).finalize_(force=True)
    assert close(students(**call), expected)
    handover = segue.replace_(model, segue.Plan(sites=sites, student=LinearAttention()), total_steps=2)
    handover.step()
    model.train()(**call).square().mean().backward()
    assert all(p.grad is not None for p in handover.parameters())
    handover.finalize_(force=True)
    changed = call["tgt"].clone()
    changed[:, -1] += 1
    before, after = model.eval()(**call), model(**{**call, "tgt": changed})
    assert close(before[:, :-1], after[:, :-1]), "the future is hidden"


def test_compiled_code_refuses_numbers_that_are_no_padding() -> None:
    student = LinearAttention()(nn.MultiheadAttention(32, 4, batch_first=True), Site("here")).eval()
    compiled, x = torch.compile(student, backend="eager"), torch.randn(2, 6, 32)
    hidden = torch.zeros(2, 6).masked_fill(torch.arange(6) > 3, -torch.inf)
    with torch.no_grad():
        compiled(x, x, x, key_padding_mask=hidden)
        with pytest.raises(RuntimeError, match="compiled code takes a key_padding_mask of booleans"):
            compiled(x, x, x, key_padding_mask=hidden + 0.5)


class Repeated(nn.Module):
    """Queries, keys and values are three tensors of the same numbers, or one; the mask alone says that it is causal."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.norm, self.attn, self.times = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True), times

    def forward(self, x: Tensor, future: Tensor | None) -> Tensor:
        q, k, v = (self.norm(x) for _ in range(3)) if self.times == 3 else (self.norm(x),) * 3
        y: Tensor = self.attn(q, k, v, attn_mask=future, need_weights=False)[0]
        return y


@pytest.mark.parametrize("operator", [SlidingWindow(window=2), LinearAttention()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_compiled_code_expects_what_a_call_before_it_showed(operator: Any, times: int, causal: bool) -> None:
    torch._dynamo.reset()
    model, x = Repeated(times), torch.randn(2, 6, 32)
    future = FUTURE if causal else None
    segue.replace_(model, segue.Plan(sites="attn", student=operator), total_steps=2).finalize_(force=True)
    with torch.no_grad():
        expected = model(x, future)
        torch.testing.assert_close(torch.compile(model, backend="eager")(x, future), expected)


def test_compiled_code_does_not_guess() -> None:
    """Without a call before it, a causal mask is refused where nothing says that it is one, and so are keys of a tensor of
    their own by operators that need those of the queries."""
    torch._dynamo.reset()
    x, future = torch.randn(2, 6, 32), FUTURE
    for times in (1, 3):
        model = Repeated(times)
        segue.replace_(model, segue.Plan(sites="attn", student=LinearAttention()), total_steps=2).finalize_(force=True)
        with torch.no_grad(), pytest.raises(RuntimeError, match="hides more than padding; if the future, run a batch before"):
            torch.compile(model, backend="eager")(x, future)
    model = Repeated(3)
    segue.replace_(model, segue.Plan(sites="attn", student=SlidingWindow()), total_steps=2).finalize_(force=True)
    with torch.no_grad(), pytest.raises(StudentError, match="run a batch before compiling, or give the same tensor"):
        torch.compile(model, backend="eager")(x, None)
    with torch.no_grad():
        model(x, None)
        compiled = torch.compile(model.attn, backend="eager")
        h = torch.randn(2, 6, 32)
        compiled(h, h.clone(), h)
        with pytest.raises(RuntimeError, match="compiled for keys of the queries' numbers, and got others"):
            compiled(h, h + 1, h)

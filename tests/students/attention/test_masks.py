"""Masks: which of them an operator may apply, found out in every call, in compiled code too."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from segue.errors import StudentError
from segue.sites import Site
from segue.students import AttentionCall, LinearAttention, Softmax, WindowedLinear, read_mask
from segue.students.attention import masks
from segue.students.attention.masks import Pattern, padding_in, pattern_of
from tests.helpers import models

HERE, TOKENS = Site("here"), 6
EYE = torch.eye(TOKENS, dtype=torch.bool)
FUTURE = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
KEPT = torch.arange(TOKENS) < torch.tensor([[6], [4]])
PADDED = KEPT[:, None, None, :].expand(2, 1, TOKENS, TOKENS)
PACKED = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).bool().expand(2, 1, TOKENS, TOKENS)
NEAR = (FUTURE & FUTURE.T.tril(2).T).expand(2, 1, TOKENS, TOKENS)


def numbers(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("form", [lambda mask: mask.clone(), numbers, lambda mask: numbers(mask).clamp_min(-1e4)])
@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (PADDED, Pattern(False, True, False)),
        (PADDED & FUTURE, Pattern(True, True, False)),
        (PADDED[:, :, -1:] & FUTURE[-1:], Pattern(None, True, False)),
        (NEAR, Pattern(True, True, True)),
        (NEAR & PADDED, Pattern(True, True, True)),
        (PACKED, Pattern(None, False, False)),
        (PACKED & FUTURE, Pattern(None, False, False)),
        (FUTURE.T.expand(2, 1, TOKENS, TOKENS), Pattern(None, False, False)),
    ],
    ids=["padding", "future", "one row", "window", "window and padding", "packed", "packed and future", "the past"],
)
def test_the_pattern_of_a_mask(mask: Tensor, expected: Pattern, form) -> None:
    given = form(mask)
    assert pattern_of(given, padding_in(given, 2), window=3) == expected


def test_without_a_window_a_windowed_mask_hides_too_much() -> None:
    assert not pattern_of(NEAR, padding_in(NEAR, 2)).within


def test_added_numbers_are_no_mask() -> None:
    assert not pattern_of(numbers(PADDED) + 0.5, KEPT).within


def test_a_mask_is_looked_into_again_when_it_changes_or_another_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    pattern = masks._pattern
    monkeypatch.setattr(masks, "_pattern", lambda *args: looks.append(1) or pattern(*args))
    mask = PADDED.clone()
    for _ in range(12):  # the layers of a model, each with a view of its own
        assert pattern_of(mask[..., :TOKENS], KEPT).within
    assert len(looks) == 1
    mask.copy_(PACKED)
    assert not pattern_of(mask, KEPT).within
    del mask
    gc.collect()
    for turn in range(20):  # the memory of the last one is used again
        fresh = (PACKED if turn % 2 else PADDED).clone()
        assert pattern_of(fresh, KEPT).within == (turn % 2 == 0)
        del fresh


def test_reading_a_mask() -> None:
    tokens = torch.ones(TOKENS, TOKENS, dtype=torch.long)
    assert read_mask(None, 2) == (None, None)
    assert read_mask(tokens, TOKENS)[0].dtype == torch.bool
    assert read_mask(tokens, TOKENS, of_pairs=True)[1].shape == (1, 1, TOKENS, TOKENS)
    assert read_mask(tokens.float(), TOKENS)[1].shape == (1, 1, TOKENS, TOKENS)
    assert read_mask(PADDED[:, 0], 2)[1].shape == PADDED.shape


class Wrapped(nn.Module):
    """A module that is called with a mask, as a compiled model calls its layers."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student = student

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.student(x, attn_mask=mask)
        return y


@pytest.mark.parametrize("operator", [LinearAttention(), WindowedLinear(window=2)], ids=["linear", "windowed"])
def test_compiled_code_refuses_a_mask_that_it_cannot_apply(operator) -> None:
    import timm

    module = Wrapped(operator(timm.layers.Attention(32, 4), HERE)).eval()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, TOKENS, 32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, PADDED.clone()), module(x, PADDED.clone()))
        with pytest.raises(RuntimeError, match="cannot apply this mask: it hides more than padding"):
            compiled(x, PACKED.clone())


def test_compiled_softmax_applies_any_mask() -> None:
    import timm

    teacher = timm.layers.Attention(32, 4)
    models.scramble_(teacher)
    compiled = torch.compile(Wrapped(Softmax()(teacher, HERE)), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, TOKENS, 32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, PACKED.clone()), teacher(x, attn_mask=PACKED), rtol=1e-4, atol=1e-5)


def test_a_token_mask_of_another_length_is_refused() -> None:
    from tests.helpers import tiny
    from tests.students.attention import tiny_attention  # noqa: F401  (registers the module)

    student = LinearAttention()(tiny.Attention(8), HERE)
    student.interface.unpack = lambda x: AttentionCall(x, token_mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(StudentError) as caught:
        student(torch.randn(2, 5, 8))
    assert str(caught.value) == (
        "the token mask of an attention student must have the shape (2, 5): one value for each key.\n"
        "  The interface's unpack() returned one of shape (2, 3).\n"
        "  Hint: with a key/value cache the mask is that of all tokens so far, not only of the new ones."
    )

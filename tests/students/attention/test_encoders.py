"""Encoders and encoder-decoders of Hugging Face: what is read is its teacher, with every operator that makes sense; the rest is
refused with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import segue
from segue.errors import StudentError
from segue.sites import Site
from segue.students import LinearAttention, SlidingWindow, Softmax
from segue.students.attention.module import Operator
from tests.students.attention.encoders import READ, REFUSED, Encoder, boxes, pairs, sentences

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* leaves the position bias:segue.errors.SegueWarning"),
    pytest.mark.filterwarnings("ignore:.* looks at all tokens:segue.errors.SegueWarning"),
]
HERE = Site("here")

PACKED = ("pixtral",)  # all images are one sequence, and a mask keeps them apart
IMPLEMENTATIONS = [(encoder, kind) for encoder in READ for kind in ("eager", "sdpa") if encoder.fused or kind == "eager"]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def replaced(encoder: Encoder, model: nn.Module, operator: Operator) -> segue.Handover:
    sites = [encoder.sites]
    if encoder.cross is not None and operator.mixer_class.supports_cross:
        sites.append(encoder.cross)
    plan = segue.Plan(sites="{" + ",".join(sites) + "}", student=operator, schedule=segue.schedules.Linear())
    return segue.replace_(model, plan, total_steps=2)


@pytest.mark.parametrize(("encoder", "implementation"), IMPLEMENTATIONS, ids=lambda x: str(x))
@torch.no_grad()
def test_a_softmax_student_is_its_teacher(encoder: Encoder, implementation: str) -> None:
    model = encoder.build(implementation)
    assert model.config._attn_implementation == implementation
    expected = encoder.output(model)
    handover = replaced(encoder, model, Softmax())
    with handover.as_student():
        close(encoder.output(model), expected)
    handover.finalize_(force=True)
    close(encoder.output(model), expected)


@pytest.mark.parametrize("encoder", [e for e in READ if e.kind not in PACKED], ids=str)
@pytest.mark.parametrize(
    "operator", [LinearAttention(ignore=("bias", "window")), SlidingWindow(window=1)], ids=lambda x: type(x).__name__
)
def test_operators_run_and_train(encoder: Encoder, operator: Operator) -> None:
    model = encoder.build()
    with torch.no_grad():
        expected = encoder.output(model)
    handover = replaced(encoder, model, operator)
    handover.step()
    assert {seam.state.weight for seam in handover.seams.values()} == {0.5}
    encoder.output(model.train()).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in handover.parameters())
    handover.finalize_(force=True)
    with torch.no_grad():
        assert (encoder.output(model.eval()) - expected).abs().max() > 1e-4


@pytest.mark.parametrize("encoder", [e for e in READ if e.kind in PACKED], ids=str)
def test_images_in_one_sequence_need_an_operator_that_takes_any_mask(encoder: Encoder) -> None:
    model = encoder.build()
    with torch.no_grad():
        expected = encoder.output(model)
        with replaced(encoder, model, SlidingWindow(window=200)).as_student():
            close(encoder.output(model), expected)
        handover = replaced(encoder, encoder.build(), LinearAttention())
        with handover.as_student(), pytest.raises(StudentError, match="(?s)cannot apply this mask.*hides more than padding"):
            encoder.output(handover.model)


@pytest.mark.parametrize(("encoder", "reason"), REFUSED, ids=lambda x: str(x)[:20])
def test_what_computes_something_else_is_refused(encoder: Encoder, reason: str) -> None:
    model = encoder.build()
    before = str(model)
    with pytest.raises(StudentError, match=reason) as caught:
        replaced(encoder, model, Softmax())
    assert "Segue cannot read the module at site" in str(caught.value)
    assert str(model) == before


NEIGHBOURS = ("mobilebert", "canine")  # their embeddings and convolutions look at neighbours, whatever the mask says
PADDED = [e for e in READ if e.call in (sentences, boxes, pairs) and e.kind not in NEIGHBOURS]


@pytest.mark.parametrize("encoder", PADDED, ids=str)
@torch.no_grad()
def test_what_stands_at_padding_does_not_matter(encoder: Encoder) -> None:
    model = encoder.build()
    replaced(encoder, model, LinearAttention(ignore=("bias", "window"))).finalize_(force=True)
    call = encoder.call()
    expected = encoder.output(model, call)
    other = {**call, "input_ids": torch.where(call["attention_mask"].bool(), call["input_ids"], 7)}
    close(encoder.output(model, other), expected)


@pytest.mark.parametrize("value", [0.5, torch.ones(1), "flash", True], ids=str)
def test_an_unknown_argument_is_refused(value: object) -> None:
    model = READ[0].build()
    student = Softmax()(model.encoder.layer[0].attention.self, HERE)
    x = torch.randn(2, 5, 32)
    close(student(x, temperature=None, sparse=False)[0], student(x)[0])
    with pytest.raises(StudentError, match="an attention student got the argument 'temperature'"):
        student(x, temperature=value)


@torch.no_grad()
def test_ignoring_a_window_does_not_change_how_its_masks_are_read() -> None:
    encoder = next(e for e in READ if e.kind == "modernbert")
    rope = {kind: {"rope_type": "default", "rope_theta": 100.0} for kind in ("full_attention", "sliding_attention")}
    windowed = encoder.build(rope_parameters=rope)
    full = encoder.build(rope_parameters=rope, layer_types=["full_attention"] * 2)
    replaced(encoder, windowed, Softmax(ignore=("window",))).finalize_(force=True)
    close(encoder.output(windowed), encoder.output(full))

"""The first call of each kind: a student that cannot be called so, or that misreads it, is refused in three lines."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

import segue
from segue.errors import StudentError, VerificationError
from segue.students import LinearAttention


class Odd(timm.layers.Attention):
    """Attention that does something with an argument which others ignore."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, cache_position: Tensor | None = None) -> Tensor:
        shift = 0.0 if cache_position is None else cache_position[..., None].to(x.dtype)
        y: Tensor = super().forward(x + shift, attn_mask)
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Odd(16, 2)

    def forward(self, x: Tensor, cache_position: Tensor | None = None) -> Tensor:
        return x + (self.attn(x) if cache_position is None else self.attn(x, cache_position=cache_position))


X, POSITIONS = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)), torch.arange(5).expand(2, 5)


def started(**settings) -> tuple[Model, segue.Handover]:
    model = Model()
    return model, segue.replace_(model, segue.Plan(sites="attn", student=LinearAttention()), total_steps=4, **settings)


@pytest.mark.parametrize("training", [True, False])
def test_a_call_that_is_misread_is_refused(training: bool) -> None:
    model, handover = started()
    model.train(training)
    model(X)
    expected = handover.seams["attn"].require_teacher()(X)
    with pytest.raises(StudentError) as caught:
        model(X, POSITIONS)
    first, second, hint = str(caught.value).split("\n")
    assert first == "Segue does not read the attention at site 'attn' as this call means it."
    assert second.startswith("  Softmax attention with its weights returns another result, off by ")
    assert hint == (
        "  Hint: handover.cancel_() brings the original model back; register an interface that reads such calls "
        "(segue.students.register_attention)."
    )
    with pytest.raises(StudentError):
        model(X, POSITIONS)
    handover.cancel_()
    assert torch.equal(model.attn(X), expected)


def test_an_example_is_proved_before_anything_changes() -> None:
    model = Model()
    before = list(model.modules())
    with pytest.raises(StudentError, match="does not read the attention at site 'attn'"):
        segue.replace_(model, segue.Plan(sites="attn", student=LinearAttention()), example=(X, POSITIONS))
    assert list(model.modules()) == before


def test_verify_proves_the_users_batch() -> None:
    _, handover = started()
    claims = [check.claim for check in handover.verify(X).checks]
    assert "softmax attention with the teachers' weights equals the teachers" in claims
    with pytest.raises((StudentError, VerificationError), match="off by"):
        handover.verify(X, POSITIONS)


def test_a_call_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs: list[int] = []
    model, handover = started()
    student = handover.seams["attn"].student
    monkeypatch.setattr(student, "prove", lambda *args: proofs.append(1))
    for _ in range(3):
        model(X)
        model(X[:, :3])
    assert len(proofs) == 1


def test_a_student_that_raises_where_its_teacher_works() -> None:
    model = Model()
    segue.replace_(model, segue.Plan(sites="attn", student=lambda teacher, site: nn.Linear(16, 16)), total_steps=4)
    model(X)
    with pytest.raises(StudentError) as caught:
        model(X, POSITIONS)
    first, second, hint = str(caught.value).split("\n")
    assert first == "the student at site 'attn' cannot be called as its teacher is called."
    assert second.startswith("  It raises TypeError: ")
    assert "cache_position" in second
    assert hint == "  Hint: give it the teacher's signature. handover.cancel_() brings the original model back."


class Wide(timm.layers.Attention):
    """Attention that returns float32 under autocast too, because a norm is its last step."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


def test_autocast_is_not_taken_for_a_misreading() -> None:
    model = nn.Sequential(Wide(64, 2))
    nn.init.normal_(model[0].qkv.weight, std=0.3)
    segue.replace_(model, segue.Plan(sites="0", student=LinearAttention()), total_steps=4)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(2, 5, 64)).isfinite().all()


def test_memory_that_runs_out_is_not_called_a_wrong_student() -> None:
    """Programs that look for a batch size catch torch's own error."""

    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("allocated")

    model = Model()
    segue.replace_(model, segue.Plan(sites="attn", student=lambda teacher, site: Large()), total_steps=4)
    with pytest.raises(torch.OutOfMemoryError, match="allocated"):
        model(X)

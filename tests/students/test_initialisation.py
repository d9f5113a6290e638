"""Initialisation: the rules of `Kaiming`, as `Reinit` applies them."""

import math

import pytest
import torch
from torch import nn

from segue.errors import StudentError
from segue.sites import Site
from segue.students import Reinit

SITE = Site("here")


def test_linear_maps_are_drawn_by_kaiming_with_fan_in():
    student = Reinit()(nn.Linear(400, 300), SITE)
    assert student.weight.std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.02)
    assert student.bias.count_nonzero() == 0
    convolution = Reinit()(nn.Conv2d(40, 60, 3), SITE)
    assert convolution.weight.std().item() == pytest.approx(math.sqrt(2 / 360), rel=0.02)


def test_a_linear_map_stored_the_other_way_round_has_its_fan_in():
    from transformers.pytorch_utils import Conv1D

    student = Reinit()(Conv1D(nf=300, nx=400), SITE)  # weight is (in, out)
    assert student.weight.shape == (400, 300)
    assert student.weight.std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.02)


def test_norms_are_reset_to_one_and_zero_with_fresh_statistics():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norms = nn.ModuleList([nn.LayerNorm(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), LlamaRMSNorm(4)])
    for p in norms.parameters():
        nn.init.normal_(p)
    norms[1].running_mean.fill_(3.0)
    fresh = Reinit()(norms, SITE)
    for norm in fresh:
        assert norm.weight.tolist() == [1.0] * 4
        assert getattr(norm, "bias", None) is None or norm.bias.tolist() == [0.0] * 4
    assert fresh[1].running_mean.tolist() == [0.0] * 4
    assert fresh[1].num_batches_tracked == 0


def test_multihead_attentions_raw_matrix_is_drawn_too():
    student = Reinit()(nn.MultiheadAttention(200, 4), SITE)
    assert student.in_proj_weight.std().item() == pytest.approx(math.sqrt(2 / 200), rel=0.02)
    assert student.in_proj_bias.count_nonzero() == 0


def test_other_modules_are_reset_by_their_own_method():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.full((3,), 9.0))

        def reset_parameters(self):
            self.gamma.fill_(0.25)

    assert Reinit()(Odd(), SITE).gamma.tolist() == [0.25] * 3


def test_a_raw_vector_has_no_rule():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(3))

    with pytest.raises(StudentError) as error:
        Reinit()(nn.Sequential(Odd()), SITE)
    assert str(error.value) == (
        "Kaiming() has no rule for 0.temperature.\n"
        "  It is a raw parameter of shape (3,) in Odd, which has no reset_parameters().\n"
        "  Hint: give the module a reset_parameters() method, or write your own student: fn(teacher, site) -> module."
    )


def test_the_teacher_is_left_alone_and_the_student_trains():
    teacher = nn.Linear(3, 3).requires_grad_(False).double()
    before = teacher.weight.clone()
    student = Reinit()(teacher, SITE)
    assert torch.equal(teacher.weight, before)
    assert student.weight.dtype == torch.float64
    assert student.weight.requires_grad

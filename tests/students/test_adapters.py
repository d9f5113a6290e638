"""Students of another width: projected in and out, folded at the end."""

import pytest
import torch
from torch import nn

import segue
from segue.errors import PlanError, StudentError
from segue.sites import Site
from segue.students import Adapter
from segue.students.adapters import Adapted
from tests.helpers.models import build, mlp, rows


def narrow(teacher, site):
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def odd(teacher, site):
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))


def start(student, model: nn.Module | None = None, **settings) -> segue.Handover:
    adapter = Adapter(inside=4, **settings)
    return segue.replace_(model or build(mlp), segue.Plan(sites="2", student=student, adapter=adapter), total_steps=4)


def train(handover: segue.Handover) -> None:
    optimizer = torch.optim.AdamW(handover.parameters(), lr=1e-2)
    for _ in range(4):
        rows().loss(handover.model.train()).backward()
        optimizer.step()
        optimizer.zero_grad()
        handover.step()


def test_a_narrow_student_trains_and_its_projections_are_folded(tmp_path):
    handover = start(narrow)
    names = {name for name, _ in handover.named_parameters()}
    assert {"2.before.weight", "2.student.0.weight", "2.after.bias"} <= names
    before = handover.seams["2"].student.before.weight.clone()
    train(handover)
    assert not torch.equal(handover.seams["2"].student.before.weight, before)
    with handover.as_student():
        alone = rows().predict(handover.model)
    model = handover.finalize_()
    torch.testing.assert_close(rows().predict(model), alone)
    assert [type(part).__name__ for part in model[2]] == ["Linear", "GELU", "Linear"]
    assert (model[2][0].in_features, model[2][2].out_features) == (16, 16)
    with pytest.warns(segue.SegueWarning, match="student"):
        segue.save(model, tmp_path)
    again = segue.load_(build(mlp, seed=1), tmp_path, student=narrow)
    assert torch.equal(rows().predict(again), rows().predict(model))


def test_a_single_linear_map_takes_both():
    handover = start(lambda teacher, site: nn.Linear(4, 4))
    train(handover)
    with handover.as_student():
        alone = rows().predict(handover.model)
    model = handover.finalize_()
    assert isinstance(model[2], nn.Linear)
    torch.testing.assert_close(rows().predict(model), alone)


def test_where_there_is_nothing_to_fold_into_the_projections_stay(tmp_path):
    handover = start(odd)
    train(handover)
    model = handover.finalize_()
    assert isinstance(model[2], Adapted)
    with pytest.warns(segue.SegueWarning, match="student"):
        segue.save(model, tmp_path)
    again = segue.load_(build(mlp, seed=1), tmp_path, student=odd)
    assert torch.equal(rows().predict(again), rows().predict(model))


def test_a_running_handover_with_an_adapter_resumes(tmp_path):
    handover = start(narrow)
    train(handover)
    with pytest.warns(segue.SegueWarning):
        segue.save(handover, tmp_path)
    again = segue.load_(build(mlp), tmp_path, student=narrow)
    assert torch.equal(rows().predict(again.model), rows().predict(handover.model))


def test_equal_widths_need_none():
    teacher, student = nn.Linear(4, 4), nn.Linear(4, 4)
    assert Adapter(inside=4)(student, teacher, segue.Site("x")) is student


def test_it_begins_with_the_same_directions_in_and_out():
    adapted = Adapter(inside=3)(nn.Identity(), nn.Linear(5, 5), segue.Site("x"))
    x = torch.randn(2, 5)
    once = adapted(x)
    torch.testing.assert_close(adapted(once), once)  # a projection on three directions
    assert once.norm() < x.norm()


def test_outputs_in_tuples_are_projected_too():
    class Pair(nn.Module):
        def forward(self, x, scale):
            return x * scale, None

    adapted = Adapter(inside=3)(Pair(), nn.Linear(5, 5), segue.Site("x"))
    y, rest = adapted(torch.ones(2, 5), scale=2.0)
    assert y.shape == (2, 5)
    assert rest is None


def test_what_cannot_be_adapted():
    with pytest.raises(StudentError, match="It is ReLU, which has no linear layer"):
        Adapter(inside=3)(nn.Identity(), nn.ReLU(), segue.Site("x"))
    assert Adapter(inside=3, outside=5)(nn.Identity(), nn.Linear(5, 5), segue.Site("x")).before.in_features == 5
    with pytest.raises(PlanError, match=r"Adapter\(inside=...\) must be a positive integer, got 0"):
        Adapter(inside=0)(nn.Identity(), nn.Linear(5, 5), segue.Site("x"))
    with pytest.raises(PlanError, match="adapter"):
        segue.Plan(sites="2", adapter=3)


def test_a_plan_with_an_adapter_survives_json():
    plan = segue.Plan(sites="2", adapter=Adapter(inside=4))
    assert segue.Plan.from_dict(plan.to_dict()) == plan


class Gated(nn.Module):
    """The layer that is registered last is not the one that is called last, as in Llama's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(8, 20), nn.Linear(20, 8), nn.Linear(8, 20)

    def forward(self, x):
        return self.w2(self.w1(x).sigmoid() * self.w3(x))


def test_the_width_is_that_of_the_output_not_of_the_last_layer():
    student = Adapter(inside=4)(nn.Linear(4, 4), Gated(), Site("here"))
    assert student(torch.randn(2, 3, 8)).shape == (2, 3, 8)

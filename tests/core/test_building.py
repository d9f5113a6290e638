"""Building: students are made and tried before the model changes, and a failure leaves it as it was."""

import copy

import pytest
import torch
from torch import nn

import segue
from segue.errors import PlanError, StudentError
from tests.core.test_handover import state_of
from tests.helpers.tiny import SITES, Net, batch, same_state, start


def test_students_do_not_depend_on_the_global_random_state_nor_disturb_it():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = start()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert same_state(first.model.state_dict(), start().model.state_dict())
    other = start(segue.Plan(sites=SITES, seed=1))
    assert not same_state(first.model.state_dict(), other.model.state_dict())


@pytest.mark.parametrize(
    ("student", "says"),
    [
        (lambda teacher, site: teacher, "It returns the teacher itself"),
        (lambda teacher, site: nn.Sequential(teacher.qkv), "shares 'blocks.0.attn.qkv.weight' with the model"),
        (lambda teacher, site: "linear", "It returns str, which is not an nn.Module"),
        (lambda teacher, site: nn.Linear(8, 8, device="meta"), "Its module is on meta, the teacher on cpu"),
        (lambda teacher, site: nn.Linear(8, 4), r"shape \(8, 5, 8\), the student shape \(8, 5, 4\)"),
        (lambda teacher, site: nn.Linear(8, 8).double(), "It raises RuntimeError"),
        (lambda teacher, site: nn.Linear(5, 8), "It raises RuntimeError: mat1 and mat2"),
        (lambda teacher, site: 1 / 0, "division by zero"),
    ],
)
@pytest.mark.parametrize("mode", [True, False])
def test_a_failed_replacement_leaves_the_model_as_it_was(student, says, mode):
    model = Net().train(mode)
    model.head.requires_grad_(False)
    model.blocks[1].eval()
    before, weights = state_of(model), copy.deepcopy(model.state_dict())
    last_only = "shares" not in says

    def factory(teacher, site):
        return segue.students.Reinit()(teacher, site) if last_only and site.index < 2 else student(teacher, site)

    plan = segue.Plan(sites=SITES, student=factory)
    with pytest.raises((StudentError, ZeroDivisionError), match=says):
        segue.replace_(model, plan, total_steps=5, example=batch()[0])
    assert state_of(model) == before
    assert same_state(model.state_dict(), weights)


@pytest.mark.parametrize("example", ["tensor", "tuple", "dict"])
def test_an_example_may_be_a_tensor_a_tuple_or_a_dict(example):
    x, _ = batch()
    segue.replace_(Net(), segue.Plan(sites=SITES), example={"tensor": x, "tuple": (x,), "dict": {"x": x}}[example])


def test_an_example_that_the_model_cannot_take_is_named():
    with pytest.raises(PlanError, match=r"the model cannot be called with the example.\n.*It raises \w+Error: "):
        segue.replace_(Net(), segue.Plan(sites=SITES), total_steps=5, example=torch.ones(2, 3))


def test_an_example_leaves_no_trace():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.5)).train()
    seen = []
    model[2].register_forward_hook(lambda module, args, output: seen.append(module.training))
    segue.replace_(model, segue.Plan(sites="1"), total_steps=5, example=torch.randn(4, 8) + 3).cancel_()
    assert seen == [False]
    assert model[2].training
    assert model[0].running_mean.abs().max() == 0
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model[:2])


def test_a_user_student_that_freezes_a_part_keeps_it_frozen():
    def student(teacher, site):
        made = segue.students.Reinit()(teacher, site)
        made.qkv.requires_grad_(False)
        return made

    names = [name for name, _ in start(segue.Plan(sites=SITES, student=student)).named_parameters()]
    assert names[0] == "blocks.0.attn.proj.weight"
    thawed = start(segue.Plan(sites=SITES, student=lambda t, s: copy.deepcopy(t).requires_grad_(False)))
    assert len(list(thawed.parameters())) == 12

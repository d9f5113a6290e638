"""Every operator in every family of models: it trains, takes over, is saved and rebuilt; what makes no sense is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import segue
from segue.core.seam import Seam
from segue.errors import StudentError
from segue.losses import FeatureGuidance
from segue.schedules import Linear
from segue.sites import Site
from segue.students import CopyMatching, Fourier, Kaiming, Softmax
from tests.helpers.models import Batch
from tests.students import cases
from tests.students.attention.mixers import found
from tests.students.cases import CAUSAL_TORCH, FAMILIES, GPT2, LLAMA, OPERATORS, TIMM, Family

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")

STEPS = 4
SETTINGS = {"schedule": Linear(start=0.8, until=0.5), "guidance": FeatureGuidance()}
NEEDLESS = "key.bias"  # adds the same to every logit of a query, so softmax does not see it
NOT_CAUSAL = [name for name in OPERATORS if name not in cases.CAUSAL]

every_operator = pytest.mark.parametrize("operator", OPERATORS)
of_families = pytest.mark.parametrize("family", [*FAMILIES, CAUSAL_TORCH], ids=lambda family: family.name)
of_causal_families = pytest.mark.parametrize("family", [GPT2, LLAMA], ids=lambda family: family.name)


def sensible(operator: str, family: Family) -> bool:
    return operator in cases.CAUSAL or not family.causal


def train(handover: segue.Handover, batch: Batch) -> tuple[list[float], dict[str, bool]]:
    """Run the loop that users write to the end; return the losses and which parameters ever had a gradient."""
    handover.model.train()
    optimizer = torch.optim.AdamW(handover.parameters(), lr=1e-2)
    losses, reached = [], {name: False for name, _ in handover.named_parameters()}
    for _ in range(STEPS):
        loss = batch.loss(handover.model) + handover.aux_loss(batch.mask)
        loss.backward()
        for name, parameter in handover.named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all(), name
            reached[name] |= parameter.grad is not None and parameter.grad.count_nonzero() > 0
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
        losses.append(loss.item())
    return losses, reached


@pytest.mark.parametrize(
    ("operator", "family"),
    [
        pytest.param(name, family, id=f"{name} in {family.name}")
        for name in OPERATORS
        for family in [*FAMILIES, CAUSAL_TORCH]
        if sensible(name, family)
    ],
)
def test_an_operator_trains_takes_over_and_is_rebuilt(operator: str, family: Family, tmp_path: Path) -> None:
    batch, model = family.batch(), family.build()
    handover = segue.replace_(model, family.plan(OPERATORS[operator], **SETTINGS), total_steps=STEPS)
    start = {name: value.clone() for name, value in handover.named_parameters()}
    losses, reached = train(handover, batch)
    assert all(map(math.isfinite, losses))
    assert {name for name, had in reached.items() if not had and not name.endswith(NEEDLESS)} == set()
    moved = [name for name, value in handover.named_parameters() if not torch.equal(value, start[name])]
    assert {name for name in start if name not in moved and not name.endswith(NEEDLESS)} == set()
    assert set(handover.alphas.values()) == {0.0}

    handover.finalize_()
    assert not any(isinstance(module, Seam) for module in model.modules())
    segue.save(model, tmp_path)
    fresh = family.build(seed=1)
    assert not torch.equal(batch.predict(fresh), batch.predict(model))
    segue.load_(fresh, tmp_path)
    assert torch.equal(batch.predict(fresh), batch.predict(model))


def test_redrawn_directions_are_saved(tmp_path: Path) -> None:
    """The first ones would come back without being saved: they follow from the plan's seed."""
    model, batch = TIMM.build(), TIMM.batch()
    handover = segue.replace_(model, TIMM.plan(OPERATORS["Performer"]), total_steps=STEPS)
    before = handover.seams["blocks.0.attn"].student.mixer.directions.clone()
    handover.finalize_(force=True)
    for block in model.blocks:
        block.attn.mixer.redraw_(5)
    assert not torch.equal(model.blocks[0].attn.mixer.directions, before)
    segue.save(model, tmp_path)
    assert torch.equal(batch.predict(segue.load_(TIMM.build(seed=1), tmp_path)), batch.predict(model))


# What makes no sense


def untouched(model: nn.Module, before: tuple[list[nn.Module], list[bool]]) -> bool:
    return before == (list(model.modules()), [p.requires_grad for p in model.parameters()])


@of_causal_families
@pytest.mark.parametrize("operator", NOT_CAUSAL)
def test_an_operator_that_sees_everything_is_refused_in_causal_models(operator: str, family: Family) -> None:
    model = family.build()
    before = list(model.modules()), [p.requires_grad for p in model.parameters()]
    with pytest.raises(StudentError) as caught:
        segue.replace_(model, family.plan(OPERATORS[operator]))
    assert str(caught.value) == (
        f"{operator} cannot be causal.\n"
        "  It sees the complete sequence at once, so the future would leak into the past.\n"
        "  Hint: use a causal operator, such as LinearAttention or WindowedLinear. Nothing was changed."
    )
    assert untouched(model, before)


@pytest.mark.parametrize("operator", NOT_CAUSAL)
def test_where_only_the_call_says_that_it_is_causal_an_example_tells(operator: str) -> None:
    model, batch = CAUSAL_TORCH.build(), CAUSAL_TORCH.batch()
    plan = CAUSAL_TORCH.plan(OPERATORS[operator])
    before = list(model.modules()), [p.requires_grad for p in model.parameters()]
    with pytest.raises(StudentError, match=f"{operator} cannot be causal"):
        segue.replace_(model, plan, example=batch.kwargs)
    assert untouched(model, before)
    handover = segue.replace_(model, plan, total_steps=2)
    with pytest.raises(StudentError, match=f"{operator} cannot be causal"):
        batch.logits(model)
    handover.cancel_()
    assert untouched(model, before)


# Settings as data


@pytest.mark.parametrize("init", [CopyMatching(), Kaiming()], ids=repr)
@every_operator
def test_a_plan_with_an_operator_survives_json(operator: str, init: object) -> None:
    plan = segue.Plan(sites="blocks.*.attn", student=replace(OPERATORS[operator], init=init))
    assert segue.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@every_operator
def test_kaiming_keeps_nothing_of_the_teacher(operator: str) -> None:
    teachers, students = {}, {}
    for init in (CopyMatching(), Kaiming()):
        model = TIMM.build()
        handover = segue.replace_(model, TIMM.plan(replace(OPERATORS[operator], init=init)), total_steps=2)
        seam = handover.seams["blocks.0.attn"]
        teachers[init], students[init] = seam.teacher.proj, seam.student.output
    assert torch.equal(students[CopyMatching()].weight, teachers[CopyMatching()].weight)
    assert torch.equal(students[CopyMatching()].bias, teachers[CopyMatching()].bias)
    assert not torch.isclose(students[Kaiming()].weight, teachers[Kaiming()].weight).all()
    assert students[Kaiming()].bias.count_nonzero() == 0


# Which goes where: the two sentences of docs/operators.md


@pytest.mark.parametrize("family", [*FAMILIES, CAUSAL_TORCH], ids=lambda family: family.name)
def test_every_operator_goes_into_every_family_but_for_two_reasons(family: Family) -> None:
    for operator in found.ROWS:
        refusal = cases.is_refused(operator, family)
        if getattr(operator, "tokens", 0) is None and family.spec["tokens"] is None:
            assert refusal is not None
            assert "one weight per position" in refusal
        elif family.causal and not operator.mixer_class.supports_causal:
            assert refusal is not None
            assert "the future would leak into the past" in refusal
        else:
            assert refusal is None


# One student after another


def test_an_operator_replaces_another_operators_student() -> None:
    model, batch = LLAMA.build(), LLAMA.batch()
    expected = batch.predict(model)
    for student in (Softmax(), Softmax()):  # a copy of a copy is the teacher
        segue.replace_(model, LLAMA.plan(student), total_steps=2).finalize_(force=True)
        torch.testing.assert_close(batch.predict(model), expected, rtol=1e-4, atol=1e-4)
    segue.replace_(model, LLAMA.plan(OPERATORS["WindowedLinear"]), total_steps=2).finalize_(force=True)
    assert batch.predict(model).isfinite().all()


def test_a_student_without_queries_and_keys_cannot_be_replaced() -> None:
    student = Fourier()(TIMM.build().blocks[0].attn, Site("here"))
    with pytest.raises(StudentError) as caught:
        Softmax()(student, Site("here"))
    assert str(caught.value) == (
        "Segue cannot replace an attention student with FourierMixer.\n"
        "  It has no queries and keys to read.\n"
        "  Hint: start from the original model. Nothing was changed."
    )

"""Saved plans: every method and every kind of setting that a plan of version 0.1.0 could hold."""

from __future__ import annotations

import json

import pytest

import segue
from segue.core.step_state import step_state
from segue.errors import PlanError
from segue.sites import Site

from . import V0_1_0, unsaved
from .agreement import assert_agrees
from .cases import OwnSchedule, own_student

PLANS = json.loads((V0_1_0 / "plans.json").read_text(encoding="utf-8"))
OWN = "the user's own"


@pytest.mark.parametrize("name", [name for name in PLANS if name != OWN])
def test_a_saved_plan_is_rebuilt_as_it_was(name):
    plan = segue.Plan.from_dict(PLANS[name])
    assert_agrees(PLANS[name], plan, "Plan")
    again = json.loads(json.dumps(plan.to_dict()))
    assert unsaved(again) == []
    assert segue.Plan.from_dict(again) == plan


def test_every_method_is_there_and_gives_the_plan_it_gave():
    names = [name.removeprefix("method ") for name in PLANS if name.startswith("method ")]
    assert len(names) == 10
    site = Site("blocks.0.attn")
    for name in names:
        then, now = segue.Plan.from_dict(PLANS[f"method {name}"]), segue.methods.ALL[name](sites="blocks.*.attn", seed=7)
        assert now == then or name in ("lolcats", "halo")  # written as two phases today, which give the same numbers:
        for step in range(101):
            assert step_state(now, [site], step, 100) == step_state(then, [site], step, 100)


def test_the_parts_that_were_the_users_own_are_asked_for():
    data = PLANS[OWN]
    parts = ["student (own_student)", "schedule (OwnSchedule)", "guidance (len)", "distill.logits (len)"]
    assert unsaved(data) == parts
    with pytest.raises(PlanError, match="own_student"):
        segue.Plan.from_dict(data)
    given = {"schedule": OwnSchedule(), "guidance": lambda teacher, student, mask: (teacher - student).sum(), "distill": None}
    plan = segue.Plan.from_dict(data, student=own_student, **given)
    assert plan.student is own_student
    assert unsaved(plan.to_dict())[:2] == parts[:2]

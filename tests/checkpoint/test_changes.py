"""A handover resumes with the plan, the length and the optimizer of its checkpoint, or is told what differs."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import nn

import segue
from segue.checkpoint import changes
from segue.errors import CheckpointError, ConfigError
from segue.gates import Bernoulli
from segue.losses import CosineGuidance, FeatureGuidance
from segue.schedules import Cosine, Linear, PerSite
from tests.checkpoint.test_restoring import forge, plain
from tests.helpers.tiny import SITES, Net, optimizer_for, train


def copied(teacher, site):
    return nn.Sequential(nn.Linear(8, 8))


def also_copied(teacher, site):
    return nn.Sequential(nn.Linear(8, 8))


PLAN = segue.Plan(sites=SITES, schedule=Linear(until=0.8), guidance=FeatureGuidance(weight=0.5))
OTHERS = {
    "gate": (Bernoulli(), "Blend() -> Bernoulli()"),
    "schedule": (Linear(until=0.5), "Linear(start=1.0, end=0.0, until=0.8) -> Linear(start=1.0, end=0.0, until=0.5)"),
    "guidance": (None, "FeatureGuidance(weight=0.5, schedule=Piecewise(points=[[0.0, 1.0], [0.1, 0.3]... -> None"),
    "seed": (3, "0 -> 3"),
    "backbone": ("train", "'eval' -> 'train'"),
    "teacher_gradient": (True, "None -> True"),
}


def saved(folder, plan=PLAN, total_steps=10):
    handover = segue.replace_(Net().train(), plan, total_steps=total_steps)
    optimizer = optimizer_for(handover)
    train(handover, optimizer, 2)
    return segue.save(handover, folder, optimizer=optimizer)


@pytest.mark.parametrize("name", list(OTHERS))
def test_another_plan_is_refused_listed_and_allowed_by_name(name, tmp_path):
    saved(tmp_path)
    value, says = OTHERS[name]
    handover = segue.replace_(Net().train(), dataclasses.replace(PLAN, **{name: value}), total_steps=10)
    before = plain(dict(handover.model.state_dict()))
    with pytest.raises(CheckpointError) as error:
        segue.load_(handover, tmp_path)
    assert "the run of the checkpoint has other settings.\n  Saved -> given: plan." in str(error.value)
    assert f"plan.{name}: {says}" in str(error.value)
    assert f"allow_changes=('plan.{name}',)" in str(error.value)
    assert plain(dict(handover.model.state_dict())) == before
    assert handover.steps_done == 0
    assert segue.load_(handover, tmp_path, allow_changes=[f"plan.{name}"]).steps_done == 2
    assert getattr(handover.plan, name) == value


def test_a_same_shaped_student_of_another_name_is_refused(tmp_path):
    with pytest.warns(segue.SegueWarning, match="copied"):
        saved(tmp_path, segue.Plan(sites=SITES, student=copied))
    for load in (
        lambda **more: segue.load_(Net().train(), tmp_path, student=also_copied, **more),
        lambda **more: segue.load_(
            segue.replace_(Net().train(), segue.Plan(sites=SITES, student=also_copied), total_steps=10), tmp_path, **more
        ),
    ):
        with pytest.raises(CheckpointError, match="plan.student: your own copied -> your own also_copied"):
            load()
        assert load(allow_changes=("student",)).steps_done == 2

    def local():
        def copied(teacher, site):
            return nn.Sequential(nn.Linear(8, 8))

        return copied

    assert segue.load_(Net().train(), tmp_path, student=local()).steps_done == 2  # only the name is compared


def test_another_length_is_refused(tmp_path):
    saved(tmp_path)
    handover = segue.replace_(Net().train(), PLAN, total_steps=20)
    with pytest.raises(CheckpointError, match="Saved -> given: total_steps: 10 -> 20"):
        segue.load_(handover, tmp_path)
    assert segue.load_(handover, tmp_path, allow_changes=("total_steps",)).total_steps == 20
    unknown = segue.replace_(Net().train(), PLAN)
    assert segue.load_(unknown, tmp_path).total_steps == 10


def test_of_a_long_setting_the_part_that_differs_is_shown():
    def phases(**settings):
        named = [{"kind": "phases.Phase", "name": "a phase", **dict.fromkeys("bcdefghijkl", 1.0)} for _ in range(3)]
        return {"plan.phases": [named[0], {**named[1], "lr": None, **settings}, named[2]]}

    with pytest.raises(CheckpointError, match=re.escape("Saved -> given: plan.phases.1.lr: None -> 0.001.")):
        changes.require_same(phases(), phases(lr=1e-3), ())
    with pytest.raises(CheckpointError, match=re.escape("plan.phases: [Phase(name='a phase', b=1.0")):
        changes.require_same(phases(), {"plan.phases": []}, ())


def test_all_differences_are_in_one_list(tmp_path):
    saved(tmp_path)
    handover = segue.replace_(Net().train(), dataclasses.replace(PLAN, gate=Bernoulli(), seed=1), total_steps=20)
    with pytest.raises(CheckpointError) as error:
        segue.load_(handover, tmp_path, allow_changes=("seed",))
    assert "plan.gate: Blend() -> Bernoulli(); total_steps: 10 -> 20." in str(error.value)
    assert "allow_changes=('plan.gate', 'total_steps')" in str(error.value)
    assert segue.load_(handover, tmp_path, allow_changes=("plan", "total_steps")).steps_done == 2


def test_what_does_not_shape_the_run_may_differ(tmp_path):
    saved(tmp_path)
    plan = dataclasses.replace(PLAN, release=True, unreached="ignore")
    assert segue.load_(segue.replace_(Net().train(), plan, total_steps=10), tmp_path).steps_done == 2


def test_a_permission_for_nothing_is_refused(tmp_path):
    saved(tmp_path)
    with pytest.raises(ConfigError, match=r"allow_changes has 'plan.gat', which is not a setting.*\n.*plan.gate"):
        segue.load_(Net().train(), tmp_path, allow_changes=("plan.gat",))


def test_a_plan_of_an_earlier_version_is_compared_as_it_would_be_written_today(tmp_path):
    """A field that did not exist had its default."""
    plan = segue.Plan(sites=SITES, guidance=CosineGuidance(), schedule=PerSite(schedules={SITES: Cosine()}))
    place = saved(tmp_path, plan)

    def old(state, tensors):
        del state["segue"]["plan"]["guidance"]["weight"]
        del state["segue"]["plan"]["seed"]

    place = forge(place, old)
    assert segue.load_(segue.replace_(Net().train(), plan, total_steps=10), place).steps_done == 2
    other = dataclasses.replace(plan, guidance=CosineGuidance(weight=9.0), gate=Bernoulli())
    with pytest.raises(CheckpointError, match=r"plan.gate: .*plan.guidance: CosineGuidance\(") as error:
        segue.load_(segue.replace_(Net().train(), other, total_steps=10), place)
    assert "seed" not in str(error.value)


# Optimizers


def test_another_optimizer_option_is_refused_or_taken(tmp_path):
    saved(tmp_path)

    def other(**options):
        handover = segue.replace_(Net().train(), PLAN, total_steps=10)
        return handover, torch.optim.AdamW(handover.parameters(), **{"lr": 1e-2, **options})

    for name, value, says in (
        ("lr", 1e-3, "optimizer.lr: 0.01 -> 0.001"),
        ("weight_decay", 0.5, "optimizer.weight_decay: 0.01 -> 0.5"),
        ("betas", (0.5, 0.9), r"optimizer.betas: \[0.9, 0.999\] -> \[0.5, 0.9\]"),
    ):
        handover, optimizer = other(**{name: value})
        with pytest.raises(CheckpointError, match=says):
            segue.load_(handover, tmp_path, optimizer=optimizer)
        segue.load_(handover, tmp_path, optimizer=optimizer, allow_changes=(name,))
        assert optimizer.param_groups[0][name] == value
    handover, optimizer = other(foreach=False)  # how it is computed
    segue.load_(handover, tmp_path, optimizer=optimizer)


def test_what_a_scheduler_moves_is_the_schedulers(tmp_path):
    handover = segue.replace_(Net().train(), PLAN, total_steps=10)
    optimizer = optimizer_for(handover)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    train(handover, optimizer, 1)
    scheduler.step()
    segue.save(handover, tmp_path, optimizer=optimizer, lr_scheduler=scheduler)
    again = segue.replace_(Net().train(), PLAN, total_steps=10)
    fresh = optimizer_for(again)
    segue.load_(
        again, tmp_path, optimizer=fresh, lr_scheduler=torch.optim.lr_scheduler.OneCycleLR(fresh, max_lr=0.1, total_steps=10)
    )
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_how_an_optimizer_computes_is_never_taken_from_a_file():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], foreach=False)
    own, saved = optimizer.state_dict()["param_groups"], optimizer.state_dict()["param_groups"]
    saved[0] |= {"foreach": 10**39, "fused": "x", "no such option": 3}
    assert changes.taken_options(saved, own, ()) == own


def scheduled(**settings: object) -> dict[str, Any]:
    handover = segue.replace_(Net().train(), PLAN, total_steps=10)
    optimizer = optimizer_for(handover)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, **{"step_size": 2, **settings})
    return {"target": handover, "optimizer": optimizer, "lr_scheduler": scheduler}


def test_another_setting_of_torchs_scheduler_is_refused_unless_it_is_allowed(tmp_path):
    first = scheduled()
    train(first["target"], first["optimizer"], 1)
    first["lr_scheduler"].step()
    segue.save(first.pop("target"), tmp_path, **first)
    other = scheduled(gamma=0.3)
    with pytest.raises(CheckpointError, match=r"Saved -> given: lr_scheduler.gamma: 0.1 -> 0.3.\n.*allow_changes=\('lr_s"):
        segue.load_(folder=tmp_path, **other)
    segue.load_(folder=tmp_path, allow_changes=("lr_scheduler.gamma",), **other)
    assert (other["lr_scheduler"].gamma, other["lr_scheduler"].last_epoch) == (0.3, 1)

"""Checkpoints: a running handover, a finalized model, and trainings by segue.fit, all of them continued to the end."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import segue

from . import V0_1_0, cases
from .agreement import assert_same_weights

FOLDER = V0_1_0 / "checkpoints"


@pytest.mark.parametrize("name", ["running", "everything", "own"])
def test_a_running_handover_goes_on_as_if_undisturbed(name):
    schedule = cases.OwnSchedule()
    given = {"student": cases.own_student, "schedule": schedule} if name == "own" else {}
    handover = segue.load_(cases.Net().train(), FOLDER / name, **given)
    assert handover.steps_done == cases.STOP
    assert handover.total_steps == cases.TOTAL
    if name != "own":
        plan = {"running": cases.GUIDED, "everything": cases.EVERYTHING}[name]
        assert handover.plan == dataclasses.replace(plan, sites=tuple(f"blocks.{i}.attn" for i in range(4)))
    optimizer = cases.optimizer_for(handover)
    segue.load_(handover, FOLDER / name, optimizer=optimizer)
    assert schedule.seen == (1.0 if name == "own" else 0.0)
    cases.train(handover, optimizer, cases.TOTAL - cases.STOP)
    assert_same_weights(handover.finalize_().state_dict(), FOLDER / f"{name}.safetensors")


def test_a_finalized_model_is_rebuilt_through_both_of_its_replacements():
    model = segue.load_(cases.Net(), FOLDER / "finalized")
    assert len(model.blocks) == 2
    with torch.no_grad():
        output = model.eval()(cases.batch(99)[0])
    torch.testing.assert_close(output, load_file(FOLDER / "finalized.safetensors")["output"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", list(cases.FITS))
def test_a_training_goes_on_to_the_same_end(name, tmp_path):
    shutil.copytree(V0_1_0 / "fits" / name, tmp_path / name)
    before = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    fitted = cases.fit(name, tmp_path / name)
    model = fitted.model if fitted.handover is None else fitted.handover.finalize_()
    assert_same_weights(model.state_dict(), V0_1_0 / "fits" / f"{name}.safetensors")
    lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    assert [point["step"] for point in lines] == list(range(cases.TOTAL + 1))
    assert lines[: len(before)] == [json.loads(line) for line in before]  # not measured again
    assert [point["step"] for point in fitted.history] == list(range(cases.TOTAL + 1))

"""A handover that was cast: loaded directly into a fresh float32 model, or refused with the call to make."""

import pytest
import torch

import segue
from segue.checkpoint import state as checkpoint
from segue.errors import CheckpointError
from tests.checkpoint.test_restoring import Rig, forge, without
from tests.helpers.tiny import SITES, Net, optimizer_for, same_state

PLAN = segue.Plan(sites=SITES)


def saved(when: str, folder, **plan):
    model = Net().train()
    if when == "before":
        model.to(torch.bfloat16)
    handover = segue.replace_(model, segue.Plan(sites=SITES, **plan), total_steps=10)
    if when == "during":
        model.to(torch.bfloat16)
    optimizer = optimizer_for(handover)
    handover.model(torch.randn(2, 5, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    handover.step()
    segue.save(handover, folder, optimizer=optimizer)
    return handover


@pytest.mark.parametrize("train", ["students", "all"])
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_handover_that_was_cast_loads_into_a_fresh_float32_model(when, train, tmp_path):
    handover = saved(when, tmp_path, train=train)
    resumed = segue.load_(Net().train(), tmp_path)
    segue.load_(resumed, tmp_path, optimizer=optimizer_for(resumed))
    assert same_state(resumed.model.state_dict(), handover.model.state_dict())
    assert resumed.model.head.weight.dtype == torch.bfloat16
    segue.save(resumed, tmp_path / "again")
    assert segue.load_(Net().train(), tmp_path / "again").steps_done == 1


def test_a_failing_load_brings_back_what_the_cast_had_rounded(tmp_path):
    saved("during", tmp_path)
    (place,) = tmp_path.glob("0*")
    place = forge(place, without("students/"))
    rig = Rig("plain")
    before = rig.everything()
    with pytest.raises(CheckpointError, match="does not fit the model"):
        segue.load_(rig.model, place)
    assert rig.everything() == before


@pytest.mark.parametrize(("when", "call"), [("before", "the model before segue.replace_"), ("during", "first")])
def test_a_running_float32_handover_is_told_what_to_call(when, call, tmp_path):
    saved(when, tmp_path)
    handover = segue.replace_(Net().train(), PLAN, total_steps=10)
    with pytest.raises(CheckpointError) as error:
        segue.load_(handover, tmp_path)
    assert str(error.value) == (
        "the checkpoint is torch.bfloat16, the model torch.float32.\n"
        "  They differ first at blocks.0.attn/qkv.weight; a copy would round, or not resume bit for bit.\n"
        f"  Hint: cast {call}: model.to(torch.bfloat16). Nothing was changed."
    )
    model = Net().train()
    if when == "before":
        model.to(torch.bfloat16)
    handover = segue.replace_(model, PLAN, total_steps=10)
    model.to(torch.bfloat16)
    assert segue.load_(handover, tmp_path).steps_done == 1


def test_a_plain_training_of_another_dtype_is_told_too(tmp_path):
    model = Net().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint.save_training(model, 1, tmp_path, optimizer=optimizer)
    other = Net()
    with pytest.raises(CheckpointError, match=r"cast first: model.to\(torch.bfloat16\)"):
        checkpoint.load_training_(other, tmp_path, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    other.to(torch.bfloat16)
    assert checkpoint.load_training_(other, tmp_path, optimizer=torch.optim.SGD(other.parameters(), lr=0.1)) == 1

import copy
import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import segue
from segue.errors import CheckpointError, PlanError, StudentError
from segue.gates import Bernoulli, Blend, GumbelSoftmax
from segue.losses import FeatureGuidance, LogitDistillation
from segue.schedules import Constant, Linear
from tests.helpers.processes import FreshProcess
from tests.helpers.tiny import SITES, Net, batch, optimizer_for, same_bits, same_state, start, train

GATES = {"blend": Blend(), "bernoulli": Bernoulli(), "gumbel": GumbelSoftmax()}
STEPS, STOP = 10, 4


def plan(gate: str, **settings) -> segue.Plan:
    return segue.Plan(sites=SITES, gate=GATES[gate], schedule=Linear(until=0.8), guidance=FeatureGuidance(), **settings)


def rig(gate: str, **settings):
    handover = start(plan(gate, **settings), total_steps=STEPS, dropout=0.2)
    optimizer = optimizer_for(handover)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    return handover, optimizer, scheduler


def run(handover, optimizer, scheduler, steps):
    losses = []
    for _ in range(steps):
        losses += train(handover, optimizer, 1)
        scheduler.step()
    return losses


def undisturbed(gate: str, **settings):
    torch.manual_seed(7)
    parts = rig(gate, **settings)
    return run(*parts, STEPS), parts[0].model.state_dict()


def go_on(gate: str, settings: dict, folder: str) -> None:
    """Continue a run; what a process of its own does."""
    handover, optimizer, scheduler = rig(gate, **settings)
    segue.load_(handover, f"{folder}/run", optimizer=optimizer, lr_scheduler=scheduler)
    losses = run(handover, optimizer, scheduler, STEPS - STOP)
    torch.save({"losses": losses, "weights": handover.model.state_dict()}, f"{folder}/end.pt")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("gate", "settings"),
    [("blend", {}), ("bernoulli", {}), ("gumbel", {}), ("gumbel", {"train": "all"}), ("bernoulli", {"release": True})],
    ids=str,
)
def test_a_run_stopped_in_the_middle_continues_bit_for_bit_in_a_fresh_process(gate, settings, tmp_path):
    losses, weights = undisturbed(gate, **settings)
    torch.manual_seed(7)
    handover, optimizer, scheduler = rig(gate, **settings)
    first = run(handover, optimizer, scheduler, STOP)
    segue.save(handover, tmp_path / "run", optimizer=optimizer, lr_scheduler=scheduler)
    FreshProcess(go_on, gate, settings, str(tmp_path), log=tmp_path / "log").check()
    end = torch.load(tmp_path / "end.pt", weights_only=True)
    assert first + end["losses"] == losses
    assert same_state(end["weights"], weights)


@pytest.mark.parametrize("stop", range(0, STEPS + 1, 2))
def test_any_step_is_a_good_step_to_stop(stop, tmp_path):
    losses, weights = undisturbed("bernoulli")
    torch.manual_seed(7)
    parts = rig("bernoulli")
    first = run(*parts, stop)
    segue.save(parts[0], tmp_path, optimizer=parts[1], lr_scheduler=parts[2])
    torch.manual_seed(99)
    resumed = rig("bernoulli")
    segue.load_(resumed[0], tmp_path, optimizer=resumed[1], lr_scheduler=resumed[2])
    assert first + run(*resumed, STEPS - stop) == losses
    assert same_state(resumed[0].model.state_dict(), weights)


def test_a_resume_at_step_0_still_compares_the_two_sides(tmp_path):
    """No forward has done so: a student that does not fit is found although the teacher has no share."""
    misfit = segue.Plan(sites=SITES, student=lambda teacher, site: nn.Linear(8, 4), schedule=Constant(alpha=0.0))
    with pytest.warns(segue.SegueWarning, match="student"):
        segue.save(start(misfit), tmp_path)
    resumed = start(misfit)
    segue.load_(resumed, tmp_path)
    with pytest.raises(StudentError, match="must return what its teacher returns"):
        resumed.model(batch()[0])


def test_a_plain_model_gets_its_handover_back(tmp_path):
    handover, optimizer, scheduler = rig("gumbel")
    run(handover, optimizer, scheduler, STOP)
    segue.save(handover, tmp_path)
    resumed = segue.load_(Net(dropout=0.2).train(), tmp_path)
    assert repr(resumed) == repr(handover)
    assert resumed.plan.gate == GumbelSoftmax()
    x, _ = batch()
    assert same_bits(resumed.model.eval()(x), handover.model.eval()(x))


def test_a_checkpoint_leaves_the_teachers_and_a_frozen_backbone_out(tmp_path):
    from safetensors.torch import load_file

    handover, _optimizer, _scheduler = rig("blend")
    folder = segue.save(handover, tmp_path)
    names = set(load_file(folder / "tensors.safetensors"))
    assert {name.split("/")[0] for name in names} == {"students", "random"}
    assert sorted(os.listdir(folder)) == ["manifest.json", "state.json", "tensors.safetensors"]


def test_a_finalized_model_is_rebuilt_in_a_fresh_model_with_other_weights(tmp_path):
    handover, optimizer, scheduler = rig("blend")
    run(handover, optimizer, scheduler, STEPS)
    model = handover.finalize_().eval()
    segue.save(model, tmp_path)
    fresh = Net(dropout=0.2, seed=5).eval()
    assert segue.load_(fresh, tmp_path) is fresh
    assert same_state(fresh.state_dict(), model.state_dict())
    assert same_bits(fresh(batch()[0]), model(batch()[0]))
    assert fresh.segue == json.loads(json.dumps(model.segue))
    segue.save(fresh, tmp_path / "again")


def low_rank(teacher, site):
    return nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8))


def test_a_users_own_student_is_given_again(tmp_path):
    handover = start(segue.Plan(sites=SITES, student=low_rank), total_steps=5)
    train(handover, optimizer_for(handover), 5)
    model = handover.finalize_().eval()
    with pytest.warns(segue.SegueWarning, match=r"the plan's student \(low_rank\) is your own, so only its name is saved"):
        segue.save(model, tmp_path)
    with pytest.raises(PlanError, match=r"pass it again: segue.load_\(..., student=...\)"):
        segue.load_(Net(), tmp_path)
    fresh = segue.load_(Net(seed=3).eval(), tmp_path, student=low_rank)
    assert same_bits(fresh(batch()[0]), model(batch()[0]))


def test_two_replacements_in_a_row_are_rebuilt_in_order(tmp_path):
    first = start(total_steps=5)
    train(first, optimizer_for(first), 5)
    second = segue.replace_(first.finalize_(), segue.Plan(sites="blocks.*.mlp"), total_steps=5)
    train(second, optimizer_for(second), 5)
    model = second.finalize_()
    segue.save(model, tmp_path)
    fresh = segue.load_(Net(seed=9).train(), tmp_path)
    assert same_bits(fresh(batch()[0]), model(batch()[0]))


def test_sites_chosen_by_type_or_function_are_saved_by_name(tmp_path):
    from tests.helpers.tiny import Attention

    handover = start(segue.Plan(sites=Attention))
    segue.save(handover, tmp_path)
    assert segue.load_(Net(), tmp_path).plan.sites == ("blocks.0.attn", "blocks.1.attn", "blocks.2.attn")


# Refusals


def test_another_models_teachers_or_backbone_are_refused(tmp_path):
    handover = start()
    segue.save(handover, tmp_path)
    other = Net(seed=1).train()
    before = other.state_dict()
    with pytest.raises(CheckpointError) as error:
        segue.load_(other, tmp_path)
    assert str(error.value) == (
        "this model is not the model of the checkpoint.\n"
        "  The teachers at 3 sites differ from those it was trained with ('blocks.0.attn' first).\n"
        "  Hint: load the same pretrained weights and use the same sites. Nothing was changed."
    )
    assert same_state(other.state_dict(), before)
    head = Net().train()
    with torch.no_grad():
        head.head.bias.add_(1)
    with pytest.raises(CheckpointError, match="The weights around the sites differ"):
        segue.load_(head, tmp_path)
    assert not any(type(m).__name__ == "Seam" for m in head.modules())


def test_other_sites_and_other_students_are_refused(tmp_path):
    segue.save(start(), tmp_path)
    with pytest.raises(CheckpointError, match="use the same sites"):
        segue.load_(start(segue.Plan(sites="blocks.0.attn")), tmp_path)
    narrow = start(segue.Plan(sites=SITES, student=low_rank))
    before = {name: value.clone() for name, value in narrow.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"plan.student: Reinit\(\) -> your own low_rank"):
        segue.load_(narrow, tmp_path)
    with pytest.raises(CheckpointError, match="build the same model with the same plan"):
        segue.load_(narrow, tmp_path, allow_changes=("plan.student",))
    assert same_state(narrow.model.state_dict(), before)


def test_no_pickle_is_executed(tmp_path):
    handover = start()
    folder = segue.save(handover, tmp_path)
    for file in folder.iterdir():
        assert not file.read_bytes().startswith((b"PK", b"\x80"))
    for source in Path(segue.__file__).parent.rglob("*.py"):
        code = source.read_text()
        assert "torch.load(" not in code, source
        assert not re.search(r"pickle\.load|Unpickler|from pickle import", code), source


def test_other_mistakes_are_named(tmp_path):
    handover, optimizer, _ = rig("blend")
    with pytest.raises(CheckpointError, match="There is no such folder"):
        segue.load_(Net(), tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="has no file `latest`"):
        segue.load_(Net(), tmp_path)
    with pytest.raises(CheckpointError, match="Net is not a finalized model"):
        segue.save(Net(), tmp_path)
    segue.save(handover, tmp_path)
    with pytest.raises(CheckpointError, match=r"the checkpoint has no state of the optimizer.\n.*\n.*optimizer=optimizer"):
        segue.load_(handover, tmp_path, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="It cannot hold the students"):
        segue.load_(Net(dropout=0.2), tmp_path, optimizer=optimizer)
    handover.finalize_(force=True)
    segue.save(handover.model, tmp_path / "model")
    with pytest.raises(CheckpointError, match="It holds a finalized model"):
        segue.load_(start(), tmp_path / "model")


def test_a_finalized_model_is_saved_without_its_wrapper(tmp_path):
    handover, _, _ = rig("blend")
    model = handover.finalize_(force=True)
    wrapped = nn.DataParallel(model)
    wrapped.segue = model.segue
    with pytest.raises(segue.errors.SegueError, match="DataParallel"):
        segue.save(wrapped, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_backbone_that_trains_along_resumes_from_the_same_original(tmp_path):
    """With train="all" the distillation needs the model that replace_ was given; another one is refused."""
    settings = segue.Plan(sites=SITES, train="all", distill=LogitDistillation(), schedule=Linear())
    torch.manual_seed(7)
    whole = start(settings, total_steps=6)
    optimizer = optimizer_for(whole)
    losses = train(whole, optimizer, 3)
    segue.save(whole, tmp_path, optimizer=optimizer)
    losses += train(whole, optimizer, 3)
    resumed = segue.load_(Net().train(), tmp_path)
    optimizer = optimizer_for(resumed)
    segue.load_(resumed, tmp_path, optimizer=optimizer)
    assert train(resumed, optimizer, 3) == losses[3:]
    other = Net().train()
    with torch.no_grad():
        other.head.bias.add_(1)
    with pytest.raises(CheckpointError, match="The weights around the sites differ"):
        segue.load_(other, tmp_path)


def test_an_error_of_the_users_own_factory_is_not_blamed_on_the_checkpoint_alone(tmp_path):
    def broken(teacher, site):
        raise TypeError("a mistake of mine")

    with pytest.warns(segue.SegueWarning, match="is your own"):
        segue.save(start(segue.Plan(sites=SITES, student=low_rank), total_steps=5), tmp_path)
    with pytest.raises(CheckpointError, match=r"TypeError: a mistake of mine.\n.*look at your own student, if") as caught:
        segue.load_(Net(), tmp_path, student=broken)
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_handover_whose_length_is_not_known_yet_is_rebuilt(tmp_path):
    torch.manual_seed(0)
    model = Net()
    original = copy.deepcopy(model)
    segue.save(segue.replace_(model, segue.Plan(sites=SITES)), tmp_path)
    assert segue.load_(original, tmp_path).total_steps is None

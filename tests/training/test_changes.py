"""A training resumes with the settings that it began with, or lists those that differ; each is allowed by its name."""

import dataclasses
import re
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import segue
from segue.checkpoint import state as checkpoint
from segue.errors import CheckpointError, ConfigError
from segue.schedules import Linear
from segue.training.batches import Stream
from segue.training.tasks import Classification
from tests.helpers.tiny import SITES, Net, batch, same_state
from tests.training.fit_cases import Stop, fit, noisy, shuffled

RECIPE = segue.Recipe(steps=9, lr=1e-2, seed=4, warmup=0.2)


def one(teacher: nn.Module, site: segue.Site) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8))


def two(teacher: nn.Module, site: segue.Site) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8))


PLAN = segue.Plan(sites=SITES, schedule=Linear(until=0.8), student=one)
CHANGES = {
    "recipe.lr": {"recipe": {"lr": 1e-3}},
    "recipe.seed": {"recipe": {"seed": 5}},
    "recipe.accumulate": {"recipe": {"accumulate": 2}},
    "recipe.precision": {"recipe": {"precision": "bf16"}},
    "recipe.weight_decay": {"recipe": {"weight_decay": 0.5}},
    "recipe.betas": {"recipe": {"betas": (0.5, 0.9)}},
    "recipe.eps": {"recipe": {"eps": 1e-3}},
    "recipe.clip": {"recipe": {"clip": None}},
    "recipe.decay": {"recipe": {"decay": "constant"}},
    "recipe.final_lr": {"recipe": {"final_lr": 1e-3}},
    "recipe.warmup": {"recipe": {"warmup": 0.5}},
    "total_steps": {"recipe": {"steps": 12}},
    "plan.gate": {"plan": {"gate": segue.gates.Bernoulli()}},
    "plan.schedule": {"plan": {"schedule": Linear(until=0.5)}},
    "plan.student": {"plan": {"student": two}},
    "plan.seed": {"plan": {"seed": 7}},
    "batches.per_epoch": {"batches": lambda: DataLoader(TensorDataset(*batch(0, size=28)), batch_size=4, shuffle=True)},
    "batches.first": {"batches": lambda: DataLoader(TensorDataset(*batch(1, size=24)), batch_size=4, shuffle=True)},
}
TOGETHER = {  # another seed is another order; another number of batches too
    "recipe.seed": ("batches.first",),
    "batches.per_epoch": ("batches.first",),
}


def train(folder, change=None, loss=None, plan=PLAN, **settings):
    change = change or {}
    recipe = dataclasses.replace(RECIPE, **change.get("recipe", {}))
    plan = None if plan is None else dataclasses.replace(plan, **change.get("plan", {}))
    batches = change.get("batches", shuffled)()
    loss = loss or Classification(label_smoothing=0.1)
    return fit(Net(dropout=0.2), plan, batches, loss, recipe=recipe, folder=folder, checkpoint_every=3, resume=True, **settings)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A training that was stopped after its checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(RuntimeError, match="power"):
        train(folder, loss=Stop("error", 4))
    return folder


def copy_of(folder, to):
    return shutil.copytree(folder, to / "copy", ignore=shutil.ignore_patterns(".lock"))


@pytest.mark.parametrize("name", CHANGES)
def test_another_setting_is_refused_listed_and_allowed_by_name(name, stopped, tmp_path):
    folder = copy_of(stopped, tmp_path)
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as error:
        train(folder, CHANGES[name])
    first, listed, hint = str(error.value).splitlines()
    assert first == "the run of the checkpoint has other settings."
    assert re.match(rf"  Saved -> given: {name}: .+ -> .+\.$", listed)
    assert "; " not in listed
    assert f"allow_changes=('{name}',)" in hint
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"} == {
        path: content for path, content in files.items() if path.name != ".lock"
    }
    fitted = train(folder, CHANGES[name], allow_changes=(name, *TOGETHER.get(name, ())))
    assert fitted.handover.steps_done == fitted.total_steps
    assert checkpoint.saved_step(folder / "checkpoints") == fitted.total_steps
    again = train(folder, CHANGES[name], loss=Stop("error", 0))  # what was changed is what is saved now
    assert same_state(again.model.state_dict(), fitted.model.state_dict())


def test_the_smoothing_of_labels_is_compared_and_a_loss_of_your_own_is_not(tmp_path):
    train(tmp_path)
    with pytest.raises(CheckpointError, match="Saved -> given: loss.label_smoothing: 0.1 -> 0.2"):
        train(tmp_path, loss=Classification(label_smoothing=0.2))
    train(tmp_path, loss=lambda model, batch: model(batch[0]).square().mean())


def test_a_change_that_is_allowed_takes_effect(stopped, tmp_path):
    for name, option, value in (("recipe.weight_decay", "weight_decay", 0.5), ("recipe.eps", "eps", 1e-3)):
        folder = copy_of(stopped, tmp_path / name)
        train(folder, CHANGES[name], allow_changes=(name,))
        _, state, _ = segue.checkpoint.folders.read(folder / "checkpoints")
        groups = next(value for key, value in state["optimizer"]["dict"] if key == "param_groups")["list"]
        assert dict(map(tuple, groups[0]["dict"]))[option] == value


def test_every_difference_is_in_one_list(stopped, tmp_path):
    folder = copy_of(stopped, tmp_path)
    change = {"recipe": {"lr": 1.0, "steps": 20}, "plan": {"gate": segue.gates.Bernoulli()}}
    with pytest.raises(CheckpointError) as error:
        train(folder, change)
    assert "total_steps: 9 -> 20; recipe.lr: 0.01 -> 1.0; plan.gate: Blend() -> Bernoulli()." in str(error.value)
    with pytest.raises(ConfigError, match="allow_changes has 'recipe.lrr', which is not a setting of this run"):
        train(folder, change, allow_changes=("recipe.lrr",))


def test_how_it_is_watched_and_computed_may_change_without_a_word(stopped, tmp_path):
    folder = copy_of(stopped, tmp_path)
    change = {"recipe": {"on_nan": "skip", "shard": True}, "plan": {"release": True}}
    fitted = train(folder, change, evaluations=3, validation=[batch(50)])
    undisturbed = train(tmp_path / "undisturbed")
    assert same_state(*(each.handover.finalize_().state_dict() for each in (fitted, undisturbed)))


def test_a_plain_training_is_compared_too(tmp_path):
    with pytest.raises(RuntimeError):
        train(tmp_path, plan=None, loss=Stop("error", 4))
    for name in ("recipe.lr", "recipe.seed", "total_steps", "batches.first"):
        with pytest.raises(CheckpointError, match=f"Saved -> given: {name}: "):
            train(tmp_path, CHANGES[name], plan=None)
    train(tmp_path, CHANGES["total_steps"], plan=None, allow_changes=("total_steps",))


def test_a_checkpoint_without_the_record_resumes_unless_its_length_differs(stopped, tmp_path, monkeypatch):
    """As version 0.1.0 wrote it."""
    from tests.checkpoint.test_restoring import forge

    folder = copy_of(stopped, tmp_path)

    def old(state, tensors):
        state["lr_scheduler"]["dict"] = [pair for pair in state["lr_scheduler"]["dict"] if pair[0] != "settings"]
        del state["parameters"]

    for place in segue.checkpoint.folders.checkpoints(folder / "checkpoints"):
        name = forge(place, old).name
    (folder / "checkpoints" / "latest").write_text(name)
    with pytest.raises(CheckpointError, match="Saved -> given: total_steps: 9 -> 12"):
        train(folder, CHANGES["total_steps"])
    with pytest.raises(CheckpointError, match="optimizer.eps"):  # what the optimizer itself says
        train(folder, CHANGES["recipe.eps"])
    fitted = train(folder)
    assert same_state(fitted.model.state_dict(), train(tmp_path / "undisturbed").model.state_dict())


@pytest.mark.parametrize("make", [shuffled, noisy])
@pytest.mark.parametrize("count", [1, 5, 6, 7, 11, 12, 18])
def test_the_first_batch_of_the_epoch_is_known_after_a_skip(make, count):
    """Also where an epoch has just ended, and the rest of the stream is the same."""
    read, skipped = Stream(make(), seed=3), Stream(make(), seed=3)
    for _ in range(count):
        next(read)
    skipped.skip(count)
    assert skipped.first == read.first != ""
    assert len({Stream(make(), seed=3).first, read.first}) == 2
    for _ in range(7):
        torch.manual_seed(0)
        a = next(read)
        torch.manual_seed(0)
        assert all(map(torch.equal, a, next(skipped)))
        assert read.first == skipped.first


def test_a_loader_that_does_not_repeat_its_order_is_noticed(tmp_path):
    """Its own generator moves on from epoch to epoch, and a fresh one does not."""

    def own():
        generator = torch.Generator().manual_seed(1)
        return DataLoader(TensorDataset(*batch(0, size=8)), batch_size=4, shuffle=True, generator=generator)

    change = {"batches": own}
    with pytest.raises(RuntimeError):
        train(tmp_path, change, loss=Stop("error", 7))
    with pytest.raises(CheckpointError, match="batches.first"):
        train(tmp_path, change)


def test_a_changed_accumulation_keeps_the_place_in_the_data_at_every_later_resume(stopped, tmp_path):
    change = CHANGES["recipe.accumulate"]
    seen = {}
    for name, stops in (("once", ()), ("twice", (8,))):
        folder = copy_of(stopped, tmp_path / name)
        for stop in stops:
            with pytest.raises(RuntimeError, match="power"):
                train(folder, change, loss=Stop("error", stop), allow_changes=("recipe.accumulate",))
        seen[name] = train(folder, change, allow_changes=("recipe.accumulate",)).model.state_dict()
    assert same_state(seen["once"], seen["twice"])

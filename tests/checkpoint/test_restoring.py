"""A load that fails changes nothing: forged and damaged checkpoints, optimizers in another order, objects that refuse."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import segue
from segue.checkpoint import folders
from segue.checkpoint import state as checkpoint
from segue.checkpoint.optimizers import fitting
from segue.core import randomness, tensor_files
from segue.errors import CheckpointError, PlanError, SegueError
from tests.helpers.tiny import SITES, Net, optimizer_for, train

TOTAL, DONE = 10, 3


class Adaptive:
    """A schedule with a state."""

    def __init__(self) -> None:
        self.seen = 0.0

    def __call__(self, progress: float, site: segue.Site) -> float:
        return max(1.0 - progress - 0.01 * self.seen, 0.0)  # NaN if that is what it has seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = float(state["seen"])


def plan(**settings: Any) -> segue.Plan:
    schedule = settings.pop("schedule", None) or Adaptive()
    return segue.Plan(sites=SITES, schedule=schedule, gate=segue.gates.Bernoulli(), train="all", **settings)


class Rig:
    """Everything that load_ may write to: a handover, a finalized model or a plain training, and what trains it."""

    def __init__(self, kind: str, *, steps: int = 0, seed: int = 7) -> None:
        randomness.seed_all(seed)
        self.kind, self.model = kind, Net(dropout=0.2).train()
        self.handover = None if kind in ("training", "plain") else segue.replace_(self.model, plan(), total_steps=TOTAL)
        parameters = self.model.parameters() if self.handover is None else self.handover.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        self.scheduler: Any = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self.optimizer),
                torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, TOTAL),
            ],
            milestones=[2],
        )
        for _ in range(steps):
            if self.handover is not None:
                train(self.handover, self.optimizer, 1)
            else:
                self.model(torch.randn(2, 5, 8)).sum().backward()
                self.optimizer.step()
            self.scheduler.step()
        if self.handover is not None and steps:
            self.handover.plan.schedule.seen = 2.0

    @property
    def parts(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "lr_scheduler": self.scheduler}

    def save(self, folder: Path) -> Path:
        if self.handover is None:
            return checkpoint.save_training(self.model, DONE, folder, **self.parts)
        with pytest.warns(segue.SegueWarning, match="Adaptive"):
            return segue.save(self.handover, folder, **self.parts)

    def load(self, folder: Path) -> None:
        if self.kind == "training":
            checkpoint.load_training_(self.model, folder, **self.parts)
        elif self.kind == "plain":
            segue.load_(self.model, folder, schedule=Adaptive())
        else:
            segue.load_(self.handover, folder, **self.parts)

    def everything(self) -> Any:
        """Return all that a failed call could have changed, as comparable data."""
        handover = self.handover
        parts = [plain(self.optimizer.state_dict()), plain(self.scheduler.state_dict()), plain(randomness.states())]
        parts.append([sorted((k, str(v)[:80]) for k, v in vars(part).items()) for part in (self.scheduler,)])
        modules = [(name, type(m), m.training, sorted(vars(m))) for name, m in self.model.named_modules()]
        flags = [(name, p.requires_grad, p.dtype, p.data_ptr()) for name, p in self.model.named_parameters()]
        model = [plain(dict(self.model.state_dict())), modules, flags, getattr(self.model, "segue", None)]
        if handover is not None:
            seams = [(seam.state, seam.modes, plain(seam.student_weight)) for seam in handover.seams.values()]
            model += [handover.steps_done, handover.total_steps, handover.alphas, handover.plan.schedule.seen, seams]
        return parts, model


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tensor_files.fingerprint({"": value})
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else str(value)


def forge(place: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Path:
    """Change the content of a checkpoint and make all its hashes right again."""
    state = json.loads((place / "state.json").read_text())
    tensors = {name: tensor.clone() for name, tensor in tensor_files.read(place / "tensors.safetensors").items()}
    change(state, tensors)
    (place / "state.json").write_text(json.dumps(state))
    tensor_files.write(place / "tensors.safetensors", tensors)
    manifest = json.dumps({"files": {name: folders.hash_file(place / name) for name in folders.FILES}}).encode()
    (place / "manifest.json").write_bytes(manifest)
    return place.rename(place.with_name(f"{place.name.partition('-')[0]}-{folders.hashlib.sha256(manifest).hexdigest()[:16]}"))


def set_at(*path: Any, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Return a change of one value of the state; `...` as a value removes it."""

    def change(state: dict[str, Any], tensors: dict[str, Any]) -> None:
        *way, last = path
        for step in way:
            state = state[step] if not isinstance(step, str) or step in state else dict_at(state, step)
        if value is ...:
            del state[last]
        else:
            state[last] = value

    return change


def dict_at(packed: dict[str, Any], key: str) -> Any:
    """Find a value in a packed dictionary."""
    return next(value for name, value in packed["dict"] if name == key)


def without(prefix: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(state: dict[str, Any], tensors: dict[str, Any]) -> None:
        del tensors[next(name for name in tensors if name.startswith(prefix))]

    return change


def reshaped(prefix: str, end: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(state: dict[str, Any], tensors: dict[str, Any]) -> None:
        name = next(
            name for name in sorted(tensors) if name.startswith(prefix) and name.endswith(end) and tensors[name].dim() > 1
        )
        tensors[name] = tensors[name].T.contiguous()[:-1]

    return change


def of_integers(prefix: str, end: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(state: dict[str, Any], tensors: dict[str, Any]) -> None:
        name = next(name for name in sorted(tensors) if name.startswith(prefix) and name.endswith(end))
        tensors[name] = tensors[name].view(torch.int32)

    return change


EITHER = {
    "no step": set_at("segue", "step", value=...),
    "a step below 0": set_at("segue", "step", value=-1),
    "a step of text": set_at("segue", "step", value="3"),
    "half a step": set_at("segue", "step", value=2.5),
    "no kind": set_at("kind", value=...),
    "another kind": set_at("kind", value="soup"),
    "a list for the record": set_at("segue", value=[]),
    "no random states": set_at("random", value=...),
    "random states of nobody": set_at("random", value={"list": []}),
    "random states of text": set_at("random", value="dice"),
    "half of the random states": set_at("random", value={"list": [{"dict": [["python", {"list": [3, {"list": []}, None]}]]}]}),
    "random states of an unknown kind": set_at("random", value={"set": []}),
    "a tensor of the random states is gone": without("random/"),
    "a weight is gone": without("optimizer/"),
    "an optimizer of text": set_at("optimizer", value="Adam"),
    "an optimizer without groups": set_at("optimizer", value={"dict": [["state", {"dict": []}]]}),
    "an optimizer of one parameter": set_at(
        "optimizer",
        value={"dict": [["state", {"dict": []}], ["param_groups", {"list": [{"dict": [["params", {"list": [0]}]]}]}]]},
    ),
    "no optimizer": set_at("optimizer", value=...),
    "names of another optimizer": set_at("parameters", 0, 0, 0, value="elsewhere.weight"),
    "shapes of another optimizer": set_at("parameters", 0, 0, 1, value=[1, 2]),
    "moments of another shape": reshaped("optimizer/state/", "exp_avg"),
    "moments of integers": of_integers("optimizer/state/", "exp_avg_sq"),
    "moments after integer steps": of_integers("optimizer/state/", "step"),
    "a scheduler of another class": set_at("lr_scheduler", value={"dict": [["last_epoch", 3]]}),
    "a scheduler of text": set_at("lr_scheduler", value="cosine"),
    "no scheduler": set_at("lr_scheduler", value=...),
}
TRAINING = {
    **EITHER,
    "a weight of the model is gone": without("model/"),
    "a weight of the model has another shape": reshaped("model/", "weight"),
    "a weight of the model is of integers": of_integers("model/", "weight"),
}
HANDOVER = {
    **EITHER,
    "a student's weight is gone": without("students/"),
    "a student's weight has another shape": reshaped("students/", "weight"),
    "a student's weight is of integers": of_integers("students/", "weight"),
    "a weight of the backbone is gone": without("backbone/"),
    "no teachers": set_at("segue", "teachers", value=...),
    "other teachers": set_at("segue", "teachers", value={}),
    "another backbone": set_at("backbone", value="0"),
    "no plan": set_at("segue", "plan", value=...),
    "a length of text": set_at("segue", "total_steps", value="ten"),
    "no schedule": set_at("schedule", value=...),
    "a schedule of text": set_at("schedule", value="linear"),
    "a schedule without its state": set_at("schedule", value={}),
    "a schedule that goes nowhere": set_at("schedule", value={"seen": float("nan")}),
}
PARTS = ("optimizer", "scheduler", "moments", "a weight is gone")  # a plain model has none of these


CASES = [
    *(("training", name, change) for name, change in TRAINING.items()),
    *(("handover", name, change) for name, change in HANDOVER.items()),
    ("plain", "a step without a length", set_at("segue", "total_steps", value=None)),
    *(("plain", name, change) for name, change in HANDOVER.items() if not any(part in name for part in PARTS)),
]


@pytest.mark.parametrize(("kind", "name", "change"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_forged_checkpoint_is_refused_and_changes_nothing(kind, name, change, tmp_path):
    saved = Rig("training" if kind == "training" else "handover", steps=DONE).save(tmp_path)
    place = forge(saved, change)
    rig = Rig(kind, seed=8, steps=0 if kind == "plain" else 1)
    random.random(), numpy.random.rand(), torch.rand(3)
    before = rig.everything()
    with pytest.raises(SegueError) as error:
        rig.load(place)
    assert rig.everything() == before
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize("kind", ["training", "handover", "plain"])
def test_the_same_checkpoint_unforged_loads_and_changes_everything(kind, tmp_path):
    """Otherwise the test above could not fail."""
    source = Rig("training" if kind == "training" else "handover", steps=DONE)
    place = forge(source.save(tmp_path), lambda state, tensors: None)
    rig = Rig(kind, seed=8, steps=0 if kind == "plain" else 1)
    before = rig.everything()
    rig.load(place)
    after = rig.everything()
    assert after != before
    if kind != "plain":
        assert after[0][:2] == [plain(part.state_dict()) for part in (source.optimizer, source.scheduler)]
        assert after[1][0] == plain(dict(source.model.state_dict()))


class Refusing(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler that takes a part of its state, and then fails."""

    def __init__(self, optimizer: Any, error: BaseException) -> None:
        super().__init__(optimizer, lambda step: 1.0)
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_epoch = 99
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("no room"), KeyboardInterrupt("Ctrl-C")], ids=str)
@pytest.mark.parametrize("kind", ["training", "handover"])
def test_what_was_written_is_undone_when_a_users_object_fails(kind, error, tmp_path):
    Rig(kind, steps=DONE).save(tmp_path)
    rig = Rig(kind, seed=8, steps=1)
    rig.scheduler = Refusing(rig.optimizer, error)
    before = rig.everything()
    with pytest.raises(CheckpointError if isinstance(error, Exception) else KeyboardInterrupt) as caught:
        rig.load(tmp_path)
    assert rig.everything() == before
    if isinstance(error, Exception):
        assert str(caught.value) == (
            "the lr_scheduler does not take the state of the checkpoint.\n"
            "  Refusing.load_state_dict raises RuntimeError: no room.\n"
            "  Hint: give a lr_scheduler of the class and the settings that were saved. Nothing was changed."
        )


def test_a_failure_of_the_very_last_write_is_undone_too(tmp_path, monkeypatch):
    Rig("handover", steps=DONE).save(tmp_path)
    rig = Rig("handover", seed=8, steps=1)
    before = rig.everything()

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(rig.handover, "resume_at", fail)
    with pytest.raises(CheckpointError, match="MemoryError"):
        rig.load(tmp_path)
    monkeypatch.undo()
    assert rig.everything() == before


# A finalized model


@pytest.mark.parametrize(
    ("name", "change"),
    {
        "no plan": set_at("segue", "plan", value=...),
        "a plan of another format": set_at("segue", "plan", "format", value=7),
        "no such sites": set_at("segue", "plan", "sites", value=["blocks.9.attn"]),
        "a weight is gone": without("model/"),
        "a weight of another shape": reshaped("model/head", "weight"),
        "a weight of integers": of_integers("model/head", "weight"),
        "a list for the record": set_at("segue", value=[]),
        "an earlier record of text": set_at("segue", "earlier", value="yes"),
    }.items(),
)
def test_a_forged_finalized_model_changes_nothing(name, change, tmp_path):
    handover = segue.replace_(Net(), segue.Plan(sites=SITES, student=drawing), total_steps=5)
    with pytest.warns(segue.SegueWarning, match="drawing"):
        place = forge(segue.save(handover.finalize_(force=True), tmp_path), change)
    rig = Rig("plain", seed=8)
    before = rig.everything()
    with pytest.raises(SegueError) as error:
        segue.load_(rig.model, place, student=drawing)
    assert rig.everything() == before
    assert len(str(error.value).splitlines()) == 3


def drawing(teacher: nn.Module, site: segue.Site) -> nn.Module:
    """A user's student that draws from every random state."""
    random.random(), numpy.random.rand(), torch.rand(3)
    return copy.deepcopy(teacher)


def test_parts_of_a_plan_are_for_a_plain_model_and_have_names(tmp_path):
    saved = Rig("handover", steps=DONE).save(tmp_path)
    rig = Rig("handover", seed=8, steps=1)
    before = rig.everything()
    with pytest.raises(PlanError, match="a running handover has its plan already, got gate"):
        segue.load_(rig.handover, saved, gate=segue.gates.Blend())
    assert rig.everything() == before
    with pytest.raises(PlanError, match=r"a plan has no part 'studnet'.\n.*student"):
        segue.load_(Net().train(), saved, schedule=Adaptive(), studnet=drawing)


# Optimizers


def reordered(handover: segue.Handover) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(handover.parameters())[::-1], lr=1e-2)


def in_two_groups(handover: segue.Handover) -> torch.optim.Optimizer:
    first, *rest = handover.parameters()
    return torch.optim.AdamW([{"params": rest}, {"params": [first]}], lr=1e-2)


def of_fewer(handover: segue.Handover) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(handover.parameters())[:-1], lr=1e-2)


def twins_swapped(handover: segue.Handover) -> torch.optim.Optimizer:
    """Every shape is right: only the names tell."""
    named = dict(handover.named_parameters())
    a, b = "blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"
    return torch.optim.AdamW([named[{a: b, b: a}.get(name, name)] for name in named], lr=1e-2)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            reordered,
            r"Parameter 0 of group 0 is blocks.2.attn.student.proj.bias \(8,\), was blocks.0.attn.student.qkv.weight \(24, 8\)",
        ),
        (in_two_groups, r"It has groups of \[11, 1\] parameters, the checkpoint of \[12\]."),
        (of_fewer, r"It has groups of \[11\] parameters, the checkpoint of \[12\]."),
        (
            twins_swapped,
            r"Parameter 0 of group 0 is blocks.1.attn.student.qkv.weight \(24, 8\), was blocks.0.attn.student.qkv.weight",
        ),
    ],
)
@pytest.mark.parametrize("version", ["now", "0.1.0"])
def test_an_optimizer_with_other_parameters_is_refused(build, says, version, tmp_path):
    first = segue.replace_(Net().train(), segue.Plan(sites=SITES), total_steps=TOTAL)
    optimizer = optimizer_for(first)
    train(first, optimizer, 2)
    place = segue.save(first, tmp_path, optimizer=optimizer)
    if version == "0.1.0":  # which saved no names: only shapes tell
        if build is twins_swapped:
            pytest.skip("their shapes are the same")
        place = forge(place, set_at("parameters", value=...))
        says = says if "groups of" in says else r"Parameter 0 has the shape \(8,\), its exp_avg in the checkpoint \(24, 8\)."
    second = segue.replace_(Net().train(), segue.Plan(sites=SITES), total_steps=TOTAL)
    other = build(second)
    before = plain(other.state_dict()), plain(dict(second.model.state_dict()))
    with pytest.raises(CheckpointError, match=rf"does not hold the parameters of the checkpoint in their order.\n  {says}"):
        segue.load_(second, place, optimizer=other)
    assert (plain(other.state_dict()), plain(dict(second.model.state_dict()))) == before
    assert second.steps_done == 0
    segue.load_(second, place, optimizer=optimizer_for(second))
    assert second.steps_done == 2


class ScheduleFree(torch.optim.SGD):
    """Keep progress in the groups, as schedule-free optimizers and Prodigy do."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.update(k=0, weight_sum=0.0)

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += 0.5
        return super().step(closure)


@pytest.mark.parametrize("forged", [None, 1.5, float("nan"), "x"])
def test_progress_that_an_optimizer_keeps_in_its_groups_is_restored(forged) -> None:
    optimizer, again = (ScheduleFree([nn.Parameter(torch.ones(3))]) for _ in range(2))
    for _ in range(4):
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    model = nn.Module()
    if forged is None:
        again.load_state_dict(fitting(saved, None, again, model, ()))
        assert (again.param_groups[0]["k"], again.param_groups[0]["weight_sum"]) == (4, 2.0)
    else:
        saved["param_groups"][0]["k" if forged != forged else "weight_sum"] = "x" if forged == 1.5 else forged
        with pytest.raises(ValueError, match="of the optimizer is"):
            fitting(saved, None, again, model, ())


def test_a_setting_of_such_an_optimizer_is_still_compared() -> None:
    optimizer, again = ScheduleFree([nn.Parameter(torch.ones(3))]), ScheduleFree([nn.Parameter(torch.ones(3))], lr=0.2)
    with pytest.raises(CheckpointError, match="optimizer.lr"):
        fitting(optimizer.state_dict(), None, again, nn.Module(), ())

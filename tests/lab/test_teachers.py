"""Teachers: trained once for each configuration, saved under its hash, complete or not at all."""

import dataclasses
import json
import os
import signal

import pytest
import torch

from segue.core import tensor_files
from segue.errors import ConfigError, DataError, SegueError
from segue.lab.config import Teacher, config_hash, to_dict
from segue.lab.teachers import teacher_model
from segue.training.batches import Batches
from tests.helpers.tiny import same_state
from tests.helpers.tiny_runs import HEAD, TASK, TEACHER, WHOLE


@pytest.fixture(scope="module")
def loaded():
    return TASK.load()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, loaded):
    """Train the teacher once, and return the folder of teachers with it."""
    folder = tmp_path_factory.mktemp("teachers")
    teacher_model(TEACHER, folder, loaded)
    return folder


def counted(loaded, stop=None, how=None):
    """Return the task with batches that are counted, and that stop the training at one of them."""
    seen = []

    def batches(size, seed):
        whole = loaded.train(size, seed)

        def make(chosen, generator):
            seen.append(len(chosen))
            if len(seen) == stop:
                if how is None:
                    raise RuntimeError("the power failed")
                os.kill(os.getpid(), how)
            return whole.make(chosen, generator)

        return Batches(whole.count, size, make, seed=seed)

    return dataclasses.replace(loaded, train=batches), seen


def test_a_teacher_is_trained_once_and_then_read(trained, loaded):
    place = trained / config_hash(TEACHER)
    files = {path: path.stat().st_mtime_ns for path in place.glob("**/*.s*")}
    again, seen = counted(loaded)
    model, known = teacher_model(TEACHER, trained, again)
    assert seen == []
    assert {path: path.stat().st_mtime_ns for path in place.glob("**/*.s*")} == files
    assert known["config"] == to_dict(TEACHER)
    assert {point["stage"] for point in known["points"]} == {0, 1}
    assert known["scores"] == known["points"][-1]["scores"]
    assert tensor_files.fingerprint(model.state_dict()) == known["fingerprint"]
    x, y = (torch.cat(parts) for parts in zip(*loaded.final, strict=True))
    with torch.no_grad():
        accuracy = (model.eval()(x).argmax(-1) == y).double().mean().item()
    assert known["scores"]["accuracy"] == pytest.approx(accuracy)
    assert json.loads((place / "teacher.json").read_text()) == known


def test_another_configuration_is_another_teacher(trained, loaded):
    others = [dataclasses.replace(TEACHER, seed=1), dataclasses.replace(TEACHER, stages=(WHOLE,))]
    states = [teacher_model(teacher, trained, loaded)[0].state_dict() for teacher in (TEACHER, *others)]
    assert len({config_hash(teacher) for teacher in (TEACHER, *others)}) == 3
    assert not same_state(states[0], states[1])
    assert not same_state(states[0], states[2])
    assert len([path for path in trained.iterdir() if (path / "teacher.json").exists()]) == 3


def test_the_first_stage_changes_the_head_only_and_the_second_everything(trained, loaded, tmp_path):
    fresh = loaded.build(TEACHER.seed).state_dict()
    head, _ = teacher_model(dataclasses.replace(TEACHER, stages=(HEAD,)), tmp_path, loaded)
    both, _ = teacher_model(TEACHER, trained, loaded)

    def changed(model):
        return {name for name, value in model.state_dict().items() if not torch.equal(value, fresh[name])}

    assert changed(head) == {"head.weight", "head.bias"}
    assert changed(both) == set(fresh)
    assert all(parameter.requires_grad for model in (head, both) for parameter in model.parameters())


STAGES = {"in the first stage": 2, "at the end of the first stage": 3, "in the second stage": 6, "in the last step": 8}


@pytest.mark.parametrize("when", STAGES)
@pytest.mark.parametrize("how", [None, signal.SIGTERM], ids=["error", "SIGTERM"])
def test_a_teacher_whose_training_was_stopped_becomes_the_same(when, how, trained, loaded, tmp_path):
    stopping, seen = counted(loaded, STAGES[when], how)
    with pytest.raises(RuntimeError if how is None else SystemExit):
        teacher_model(TEACHER, tmp_path, stopping)
    assert len(seen) == STAGES[when]
    place = tmp_path / config_hash(TEACHER)
    assert not (place / "teacher.json").exists()
    again, seen = counted(loaded)
    model, known = teacher_model(TEACHER, tmp_path, again)
    undisturbed, wanted = teacher_model(TEACHER, trained, loaded)
    assert same_state(model.state_dict(), undisturbed.state_dict())
    assert known["fingerprint"] == wanted["fingerprint"]
    without = [{k: v for k, v in point.items() if k != "seconds"} for point in known["points"]]
    assert without == [{k: v for k, v in point.items() if k != "seconds"} for point in wanted["points"]]


def copied(trained, folder):
    """Copy the finished teacher and return the path of its weights."""
    place = folder / config_hash(TEACHER)
    place.mkdir()
    for name in ("teacher.json", "teacher.safetensors"):
        (place / name).write_bytes((trained / place.name / name).read_bytes())
    return place / "teacher.safetensors"


DAMAGE = {
    "one bit": lambda data: data[:-7] + bytes([data[-7] ^ 1]) + data[-6:],
    "cut short": lambda data: data[: len(data) // 2],
    "cut in the header": lambda data: data[:20],
    "empty": lambda data: b"",
    "missing": None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_weights_are_refused_and_the_remedy_named(damage, trained, loaded, tmp_path):
    path = copied(trained, tmp_path)
    teacher_model(TEACHER, tmp_path, loaded)  # complete as it is
    if DAMAGE[damage] is None:
        path.unlink()
    else:
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(DataError) as caught:
        teacher_model(TEACHER, tmp_path, loaded)
    assert f"the teacher in {path.parent} cannot be loaded." in str(caught.value)
    assert "delete the folder" in str(caught.value)


def test_a_torn_description_is_refused_too(trained, loaded, tmp_path):
    path = copied(trained, tmp_path)
    known = path.with_name("teacher.json")
    known.write_text(known.read_text()[:100])
    with pytest.raises(SegueError, match="cannot be loaded"):
        teacher_model(TEACHER, tmp_path, loaded)


def test_weights_without_a_description_are_trained_again(trained, loaded, tmp_path):
    path = copied(trained, tmp_path)
    path.with_name("teacher.json").unlink()
    path.write_bytes(b"torn")
    model, _ = teacher_model(TEACHER, tmp_path, loaded)
    assert same_state(model.state_dict(), teacher_model(TEACHER, trained, loaded)[0].state_dict())


def test_a_head_that_is_not_there_is_explained(loaded, tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Headless(type(TASK)):
        head = "classifier.*"

    names = {field.name: getattr(TASK, field.name) for field in dataclasses.fields(TASK)}
    teacher = Teacher(task=Headless(**names), stages=(HEAD,), batch=32)
    with pytest.raises(ConfigError, match="no parameter matches the head 'classifier.*'") as caught:
        teacher_model(teacher, tmp_path, loaded)
    assert "The model is a VisionTransformer" in str(caught.value)

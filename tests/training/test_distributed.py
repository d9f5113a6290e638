"""Training in two gloo processes, under DDP and under FSDP2, against one process on the same batches."""

import json
import socket
import sys
from dataclasses import asdict

import pytest
import torch

import segue
from segue.lab.config import from_dict
from segue.lab.run import run
from segue.reporting.records import read_all
from tests.helpers import tiny_runs
from tests.helpers.processes import Ranks, run_python
from tests.helpers.tiny import Net, same_state
from tests.training.fit_workers import (
    DEPTH,
    ENGINES,
    PLANS,
    STEPS,
    CountedBatches,
    Stopping,
    coins,
    fit,
    jobs,
    lab,
    train,
    without_times,
)

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(scope="module")
def left_by_one(tmp_path_factory):
    """Let one process stop in the middle, for two to resume."""
    folder = tmp_path_factory.mktemp("ranks")
    for engine in ENGINES:
        for name in ("dcr_dfg", "no plan"):
            place = folder / f"left by one for {engine}, {name}"
            with pytest.raises(RuntimeError, match="the power failed"):
                fit("one", PLANS[name], folder=place, steps=STEPS, loss=Stopping("error", 4))
    return folder


@pytest.fixture(scope="module")
def ranks(left_by_one):
    return Ranks(jobs(left_by_one), left_by_one)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return train("one", tmp_path_factory.mktemp("one"))


def assert_close(found, wanted, where=""):
    """Compare points to float32 rounding."""
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for name in wanted:
            assert_close(found[name], wanted[name], f"{where}/{name}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for index, pair in enumerate(zip(found, wanted, strict=True)):
            assert_close(*pair, f"{where}/{index}")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-5, abs=2e-7), where
    else:
        assert found == wanted, where


@pytest.mark.parametrize("engine", ENGINES)
def test_points_and_weights_are_those_of_one_process(engine, ranks, single):
    first, second = ranks[f"train {engine}"]
    assert len(first) >= 5
    for name, wanted in single.items():
        if name not in first:
            continue
        assert_close(first[name]["points"], wanted["points"], name)
        assert first[name]["points"] == second[name]["points"], name
        assert same_state(first[name]["weights"], second[name]["weights"]), name
        for key, weight in wanted["weights"].items():
            torch.testing.assert_close(first[name]["weights"][key], weight, rtol=1e-4, atol=1e-6, msg=f"{name}: {key}")


@pytest.mark.parametrize("engine", ENGINES)
def test_each_process_takes_its_part_of_every_batch_through_the_engine_that_was_asked_for(engine, ranks, single):
    networks = {"ddp": ["DistributedDataParallel"], "fsdp2": ["FSDPNet"]}
    first, second = ranks[f"train {engine}"]
    for name in first:
        for found in (first[name], second[name]):
            from_features = name.startswith("local fit") or (name.startswith("transfer") and engine == "ddp")
            directly = ["Net"] if from_features else []  # the forward of the teachers
            assert found["networks"] == networks[engine] + directly, name
            assert found["sharded"] == [engine == "fsdp2"], name
        assert (first[name]["rows"], second[name]["rows"], single[name]["rows"]) == ([3] * 3, [2] * 3, [5] * 3)


def test_the_coins_of_those_runs_fall_all_on_the_teacher_all_on_the_student_and_mixed():
    assert set(coins()) == {0.0, 1.0, 2.0}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_resumes_bit_for_bit_with_the_dropout_of_each_process(engine, ranks):
    for found in ranks[f"resume {engine}"]:
        for name, both in found.items():
            assert both["resumed points"] == both["points"], name
            assert same_state(both["resumed"], both["weights"]), name


@pytest.mark.parametrize("engine", ENGINES)
def test_one_process_resumes_a_run_of_two_and_the_reverse(engine, ranks, left_by_one):
    (left, _), (gone_on, also) = ranks[f"leave_at {engine}"], ranks[f"resume_other {engine}"]
    for name in ("dcr_dfg", "no plan"):
        wanted = without_times(fit("one", PLANS[name], steps=STEPS).history)
        alone = fit("one", PLANS[name], steps=STEPS, folder=left[name], resume=True)
        assert_close(without_times(alone.history), wanted, f"one after two, {name}")
        assert_close(gone_on[name], wanted, f"two after one, {name}")
        assert gone_on[name] == also[name]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_signal_to_one_process_stops_both_after_the_same_step_with_a_checkpoint(engine, ranks):
    other, hit = ranks[f"stop {engine}"]
    assert other["SIGTERM 3"] == hit["SIGTERM 3"] == ("SystemExit 143", 4)
    assert hit["SIGINT 2"] == ("KeyboardInterrupt", 3)
    assert other["SIGINT 2"] == ("SystemExit 143", 3)
    assert other["SIGTERM 5"] == hit["SIGTERM 5"] == ("SystemExit 143", 6)  # the last step


@pytest.mark.parametrize("engine", ENGINES)
def test_a_nan_in_one_process_stops_both_or_is_left_out_by_both(engine, ranks):
    first, second = ranks[f"broken {engine}"]
    for found, step in (("stop", 3), ("accumulated", 1), ("loss", 0)):
        assert first[found].startswith(f"step {step} has no finite update: loss nan")
        assert second[found].startswith(f"step {step} has no finite update: loss nan")
    assert "The batch itself contains inf or NaN (in process 1)." in second["stop"]
    assert "The batch itself contains inf or NaN (in process 1)." in second["accumulated"]
    assert "finite output; the loss function returns nan (in process 1)." in second["loss"]
    assert "'blocks.1.attn.proj.weight' is inf or NaN after 6 of 6 steps." in first["weights"]
    assert "It is a weight of the student at site 'blocks.1.attn'" in first["weights"]
    for name in ("stop", "accumulated", "loss", "weights"):
        assert first[name] == second[name]
    for name in ("skip", "skip, with statistics"):
        assert first[name][0] == second[name][0] == 1
        assert all(bool(torch.isfinite(weight).all()) for weight in second[name][1].values())
    assert same_state(first["skip"][1], second["skip"][1])


@pytest.mark.parametrize("engine", ENGINES)
def test_guard_average_and_early_stopping_agree_in_all_processes_and_resume_bit_for_bit(engine, ranks):
    first, second = ranks[f"guarded {engine}"]
    assert [(event["step"], event["kind"]) for event in first["events"]] == [(7, "not finite"), (10, "loss")]
    for name in ("events", "points", "ends"):
        assert first[name] == second[name]
    assert same_state(first["weights"], second["weights"])
    for found in (first, second):
        assert found["resumed points"] == found["points"]
        assert found["ends"][0] == found["ends"][1]
        assert found["ends"][0][1] is not None
        assert same_state(found["resumed"], found["weights"])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_training_that_fails_in_several_processes_leaves_the_model_as_it_was(engine, ranks):
    for found in ranks[f"failed {engine}"]:
        assert [restored for restored, _ in found.values()] == [True, True]
        if sys.version_info >= (3, 11):
            assert all(bool(notes) == (engine == "fsdp2") for _, notes in found.values())


@pytest.mark.parametrize("engine", ENGINES)
def test_processes_with_batches_of_their_own_train_on_all_of_them(engine, ranks):
    first, second = ranks[f"own_batches {engine}"]
    wanted = fit("one", PLANS["dcr_dfg"], batches=CountedBatches(count=6, size=4))
    assert_close(first["points"], without_times(wanted.history))
    assert first["points"] == second["points"]


@pytest.mark.parametrize("engine", ENGINES)
def test_trackers_end_without_parting_the_processes(engine, ranks, left_by_one):
    assert [found["sum"] for found in ranks[f"track {engine}"]] == [2.0, 2.0]
    assert len(list((left_by_one / f"tracked {engine}").glob("segue/events.out.tfevents*"))) == 1


def without_measures_of_the_machine(train):
    points = [{name: value for name, value in point.items() if name != "seconds"} for point in train["points"]]
    return {name: value for name, value in train.items() if name not in ("seconds", "peak_memory")} | {"points": points}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_whole_run_of_the_lab_has_the_numbers_of_one_process(engine, ranks, left_by_one, tmp_path):
    first, second = (without_measures_of_the_machine(found) for found in ranks[f"lab {engine}"])
    wanted = without_measures_of_the_machine(lab("one", tmp_path))
    assert first == second
    assert_close(first, wanted)
    kept = segue.load_(tiny_runs.TASK.load().build(5), left_by_one / engine / "tiny" / "lab" / "model")
    alone = segue.load_(tiny_runs.TASK.load().build(5), tmp_path / "one" / "tiny" / "lab" / "model")
    for name, weight in alone.state_dict().items():
        torch.testing.assert_close(kept.state_dict()[name], weight, rtol=1e-4, atol=1e-6)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_segue_run_launched_by_torchrun_has_the_numbers_of_one_process(tmp_path):
    """The teacher trains under DDP, the replacement under FSDP2, in uneven parts; `lab` above has both engines for both."""
    launch = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", "segue"]
    options = [f"--option={option}" for option in ("steps=5", "teacher_steps=5", "depth=2")]
    settings = [f"--set={setting}" for setting in ("batch=15", "evaluations=[1,5]", "recipe.shard=true", "recipe.eps=1e-3")]
    command = [
        "run",
        "--method=theseus",
        "--preset=demo",
        "--data-fraction=0.1",
        f"--out={tmp_path / 'two'}",
        *options,
        *settings,
    ]
    done = run_python("-m", "torch.distributed.run", *launch, *command, cwd=tmp_path)
    assert done.stdout.count("students alone: accuracy") == 1
    (found,) = read_all(tmp_path / "two")
    assert found.meta_info["hardware"]["processes"] == 2
    alone = run(from_dict(found.run_info.config), tmp_path / "one" / "run")
    found, alone = (without_measures_of_the_machine(json.loads(json.dumps(asdict(r.train_info)))) for r in (found, alone))
    assert_close(found, alone)


def test_a_checkpoint_of_two_processes_is_one_that_the_public_functions_read(ranks, left_by_one):
    (left, _) = ranks["leave_at fsdp2"]
    handover = segue.load_(Net(depth=DEPTH).train(), f"{left['dcr_dfg']}/checkpoints")
    assert 3 <= handover.steps_done <= STEPS

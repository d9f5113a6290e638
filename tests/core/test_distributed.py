"""Two gloo processes, under DDP and under FSDP2, against one process on the same global batch."""

from pathlib import Path

import pytest
import torch

import segue
from tests.core import workers
from tests.helpers.processes import Ranks
from tests.helpers.tiny import same_state


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return Ranks(workers.jobs(folder), folder)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return workers.train("one", tmp_path_factory.mktemp("one"))


@pytest.mark.processes
@pytest.mark.parametrize("engine", workers.ENGINES)
def test_losses_and_weights_are_those_of_one_process(engine, ranks, single):
    first, second = ranks[f"train {engine}"]
    for plan, wanted in single.items():
        assert first[plan]["losses"] == second[plan]["losses"] == pytest.approx(wanted["losses"], rel=1e-5), plan
        assert same_state(first[plan]["weights"], second[plan]["weights"]), plan
        assert first[plan]["loop"] == second[plan]["loop"], plan
        for site, loop in wanted["loop"].items():
            assert first[plan]["loop"][site] == pytest.approx(loop, rel=1e-4), (plan, site)
        for name, weight in wanted["weights"].items():
            torch.testing.assert_close(first[plan]["weights"][name], weight, rtol=1e-4, atol=1e-6, msg=f"{plan}: {name}")


def test_the_coins_of_those_runs_fall_all_on_the_teacher_all_on_the_student_and_mixed():
    falls = [sum(workers.coins(workers.unlucky_seed(), step)) for step in (1, 2, 3)]
    assert sorted(falls) == [0.0, pytest.approx(1.5, abs=0.5), 3.0]
    assert workers.plans()["bernoulli, plain"].seed == workers.unlucky_seed()


@pytest.mark.processes
@pytest.mark.parametrize(("engine", "shards"), [("ddp", 1), ("fsdp2", workers.WORLD)])
def test_takeover_frees_the_teachers_and_training_goes_on(engine, shards, ranks, tmp_path):
    single = workers.release("one", tmp_path)
    assert [held > 0 for held in single["bytes"]] == [True, True, True, True, False, False]
    for found in ranks[f"release {engine}"]:
        assert found["losses"] == pytest.approx(single["losses"], rel=1e-5)
        assert found["bytes"] == [held // shards for held in single["bytes"]]
        assert found["yours"] == (single["yours"] if engine == "ddp" else None)
        assert found["resumed"] == found["losses"][-1:]


@pytest.mark.processes
@pytest.mark.parametrize("engine", workers.ENGINES)
def test_a_run_resumes_under_its_engine_and_in_one_process(engine, ranks):
    first, second = ranks[f"resume {engine}"]
    for found in (first, second):
        assert found["resumed"] == found["losses"]
        assert same_state(found["resumed weights"], found["weights"])
    alone = workers.resumable("one")
    segue.load_(alone.handover, Path(first["folder"]), optimizer=alone.optimizer)
    assert same_state(alone.weights(), first["saved"]["weights"])
    assert alone.evaluate() == pytest.approx(first["saved"]["evaluation"], rel=1e-5)
    alone.train(1)
    assert second["folder"] == first["folder"]


@pytest.mark.processes
@pytest.mark.parametrize("engine", workers.ENGINES)
def test_a_wrapped_model_is_verified_and_measured(engine, ranks):
    for found in ranks[f"verify {engine}"]:
        assert found["passed"]
        assert all(-1 <= cosine <= 1 for cosine in found["cosines"])
        assert found["losses"] == found["undisturbed"]


@pytest.mark.processes
@pytest.mark.parametrize("engine", workers.ENGINES)
def test_students_are_calibrated_on_the_batches_of_all_processes(engine, ranks, tmp_path):
    single = workers.calibrate("one", tmp_path)
    for found in ranks[f"calibrate {engine}"]:
        assert found["after"] == pytest.approx(single["after"], rel=1e-4)
        for name, weight in single["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-3, atol=1e-5)

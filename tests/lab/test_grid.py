"""Grids: many runs in worker processes; failures listed, interruptions survived, on Ray too."""

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from segue.checkpoint.state import saved_step
from segue.errors import ConfigError, MissingExtraError
from segue.lab.experiment import Experiment
from segue.lab.grid import run_grid, run_named, worker_threads
from segue.reporting import records as results
from tests.helpers.processes import FreshProcess

WORKERS = 2

RUNS = '''
"""Digits, a two-block ViT, a few steps; every batch may take a while, so that there is a middle to stop in."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from segue import methods
from segue.lab.config import Run, Stage, Teacher
from segue.lab.models import SmallViT
from segue.data import Digits
from segue.lab.tasks import ImageTask
from segue.training.recipe import Recipe
from segue.students import Reinit


@dataclass(frozen=True)
class Student:
    """A factory of this file's own, which cannot be saved by name."""

    how: str = "well"

    def __call__(self, teacher, site):
        student = Reinit()(teacher, site)
        if self.how == "killed":  # as the system does when memory runs out
            os.kill(os.getpid(), signal.SIGKILL)
        return student


def runs(pause: float = 0.0, only: str = "", failing: tuple[str, ...] = ()) -> list[Run]:
    def slow(images, generator):
        time.sleep(pause)
        return images

    task = ImageTask(source=Digits(), model=SmallViT(depth=2, width=16, heads=2), augment=slow, eval_examples=100)
    teacher = Teacher(task=task, stages=(Stage(recipe=Recipe(steps=6, lr=1e-2)),), batch=32)

    def run(method, seed=0, **plan):
        return Run(
            experiment="tiny",
            method=method,
            label=method,
            plan=getattr(methods, method)(**{"sites": task.sites, "seed": seed, **plan}),
            task=task,
            teacher=teacher,
            recipe=Recipe(steps=20, lr=1e-2, seed=seed),
            batch=16,
            data_fraction=0.1,
            evaluations=10,
            seed=seed,
        )

    good = [run("dcr_dfg"), run("theseus", 1, student=lambda teacher, site: Student()(teacher, site))]
    bad = {
        "killed": run("distillation", student=Student("killed")),
        "no such site": run("dcr", sites="blocks.*.atn"),
    }
    return [each for each in [*(bad[how] for how in failing), *good] if only in each.method]
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return an experiment's file."""
    path = tmp_path_factory.mktemp("experiment") / "runs.py"
    path.write_text(RUNS)
    return str(path)


@pytest.fixture(scope="module")
def undisturbed(place, tmp_path_factory):
    """Carry out the runs one after the other in this process."""
    out = tmp_path_factory.mktemp("undisturbed") / "tiny"
    experiment = Experiment(place)
    threads = torch.get_num_threads()
    torch.set_num_threads(worker_threads(WORKERS))  # as in a worker: more threads round in another way
    for run in experiment.runs():
        run_named(experiment, run.name, out)
    torch.set_num_threads(threads)
    return out


@pytest.mark.parametrize(
    ("allowed", "cores", "workers", "threads"),
    [(None, 8, 2, 4), ("1", 8, 2, 1), ("16", 8, 2, 4), ("2,4", 8, 1, 2), ("x", 2, 4, 1)],
)
def test_workers_share_the_cores_and_keep_to_the_threads_that_the_user_allows(monkeypatch, allowed, cores, workers, threads):
    """More threads than free cores wait for each other: a training on a busy machine took seventy times as long."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", allowed)
    assert worker_threads(workers) == threads


def numbers(out, name):
    """Return a run's result but for times, memory and where it ran."""
    data = dataclasses.asdict(results.read(out / name / "result.json"))
    data.pop("meta_info")
    train = data["train_info"]
    train.pop("seconds")
    train.pop("peak_memory")
    for point in train["points"]:
        point.pop("seconds")
    return data


def carry_out(place, options, out):
    """Run a grid; what a process of its own does."""
    run_grid(Experiment(place, options), Path(out), workers=WORKERS)


def start(place, out, **options):
    """Start a grid in a process of its own."""
    return FreshProcess(carry_out, place, options, str(out), log=out.parent / "error")


def evaluations(out, name):
    path = out / name / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_until(true, grid):
    """Wait for something that is sure to happen; the limit is only there for what hangs."""
    limit = time.monotonic() + 300
    while not true():
        assert time.monotonic() < limit, "it never happened"
        assert grid.process.is_alive(), f"the grid has ended: {grid.error}"
        time.sleep(0.05)


def workers_of(grid):
    return [child for child in psutil.Process(grid.pid).children(recursive=True) if "segue.lab.grid" in child.cmdline()]


@pytest.fixture
def nothing_left_behind():
    """End what a failed test has left running."""
    left = []
    yield left
    for process in left:
        if process.is_running():
            process.kill()


@pytest.mark.processes
def test_a_grid_stopped_by_ctrl_c_then_by_kill_9_then_restarted_gives_the_results_of_an_undisturbed_one(
    place, undisturbed, tmp_path, nothing_left_behind
):
    out = tmp_path / "tiny"
    first, second = "dcr_dfg-seed0", "theseus-seed1"

    grid = start(place, out, pause=0.25, only="dcr_dfg")
    nothing_left_behind.append(psutil.Process(grid.pid))
    wait_until(lambda: evaluations(out, first) >= 2, grid)
    workers = workers_of(grid)
    nothing_left_behind.extend(workers)
    os.kill(grid.pid, signal.SIGINT)
    assert grid.wait() != 0
    assert "KeyboardInterrupt" in grid.error
    assert len(workers) == 1
    assert not any(worker.is_running() for worker in workers)  # the grid has waited for them
    stopped_at = saved_step(out / first / "checkpoints")
    assert 2 <= stopped_at < 20
    assert not (out / first / "result.json").exists()

    grid = start(place, out, pause=0.75)  # long enough that the first run has not ended when the second has begun
    nothing_left_behind.append(psutil.Process(grid.pid))
    before = evaluations(out, first)
    wait_until(lambda: evaluations(out, first) > before and evaluations(out, second) >= 2, grid)
    workers = workers_of(grid)
    nothing_left_behind.extend(workers)
    assert len(workers) == 2
    os.kill(grid.pid, signal.SIGKILL)
    assert grid.wait() == -signal.SIGKILL
    psutil.wait_procs(workers, timeout=120)
    assert not any(worker.is_running() for worker in workers)  # they have noticed, saved and stopped
    assert saved_step(out / first / "checkpoints") > stopped_at
    assert saved_step(out / second / "checkpoints") >= 2
    assert not list(out.glob("*/result.json"))

    outcomes = run_grid(Experiment(place, {"failing": ["killed"]}), out, workers=WORKERS)
    how = {outcome.name: outcome for outcome in outcomes}
    assert {name: outcome.ok for name, outcome in how.items()} == {
        "distillation-seed0": False,
        first: True,
        second: True,
    }
    assert how[first].why == how[second].why == ""
    for name in (first, second):
        assert numbers(out, name) == numbers(undisturbed, name)
    assert len(list((out / "teachers").glob("*/teacher.json"))) == 1
    trained = [path for path in out.glob("*/log.txt") if "teacher 1/1" in path.read_text()]
    assert len(trained) == 1  # by one worker, for all of them
    assert "killed" in how["distillation-seed0"].why


@pytest.mark.processes
def test_what_is_finished_is_skipped(place, undisturbed, capsys):
    before = {path: path.stat().st_mtime_ns for path in undisturbed.glob("*/result.json")}
    assert run_grid(Experiment(place), undisturbed, workers=WORKERS) == []
    assert "2 runs, 2 finished before, 0 to do" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in undisturbed.glob("*/result.json")} == before


@pytest.mark.processes
def test_results_of_another_configuration_stop_the_grid_before_it_begins(place, undisturbed, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(RUNS.replace("lr=1e-2, seed=seed", "lr=2e-2, seed=seed"))
    with pytest.raises(ConfigError, match="belongs to another run than"):
        run_grid(Experiment(str(other)), undisturbed)


@pytest.mark.processes
def test_a_grid_on_ray_gives_the_same_results_and_ends_the_cluster_it_has_begun(place, undisturbed, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is not installed (segue[ray])")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a change that Ray would warn of
    monkeypatch.chdir(tmp_path)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    experiment = Experiment(place, {"failing": ["no such site"]})
    try:
        outcomes = run_grid(experiment, Path("ray/tiny"), workers=WORKERS, engine="ray")
        left_running = ray.is_initialized()
    finally:
        ray.shutdown()
    names = {outcome.name: (outcome.ok, outcome.why) for outcome in outcomes}
    assert names["dcr_dfg-seed0"] == names["theseus-seed1"] == (True, "")
    assert not names["dcr-seed0"][0]
    assert "matched 0 of" in names["dcr-seed0"][1]
    for name in ("dcr_dfg-seed0", "theseus-seed1"):
        assert numbers(tmp_path / "ray" / "tiny", name) == numbers(undisturbed, name)
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    psutil.wait_procs(left, timeout=30)
    assert not any(child.is_running() for child in left)
    assert not left_running


@pytest.mark.processes
def test_without_ray_its_engine_names_the_extra(place, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match="pip install segue"):
        run_grid(Experiment(place), tmp_path / "out", engine="ray")


@pytest.mark.processes
@pytest.mark.parametrize("settings", [{"engine": "rai"}, {"workers": 0}], ids=str)
def test_a_grid_that_cannot_begin_changes_nothing(settings, place, tmp_path):
    with pytest.raises(ConfigError) as caught:
        run_grid(Experiment(place), tmp_path / "out", **settings)
    assert "engine" not in settings or "write 'ray'" in str(caught.value)
    assert not (tmp_path / "out").exists()

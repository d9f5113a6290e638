"""Tuning: equally many recorded trials for every method, on held-out training data; resumable, and applied to grids."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from segue import methods
from segue.errors import ConfigError, ResultError
from segue.lab import tune as tuning_module
from segue.lab.config import Choice, config_hash, setting
from segue.lab.experiment import Experiment
from segue.lab.grid import Outcome, run_named
from segue.lab.run import run as train
from segue.lab.tune import FILE, Tuning, arms_of, axes_of, read, tune, tuned
from segue.losses import FeatureAxis, FeatureGuidance, LogitDistillation, OnTeacherStream
from segue.phases import Phase, Rates
from segue.reporting import records
from segue.schedules import Constant, Hold
from segue.training.recipe import Recipe
from tests.helpers import tiny_runs

RUNS = """
from dataclasses import replace

from segue.lab.config import Run
from segue.training.recipe import Recipe
from tests.helpers import tiny_runs

REFERENCE = "student_only"


def runs(seeds: int = 2) -> list[Run]:
    recipe = Recipe(steps=4, lr=1e-2)
    return [
        tiny_runs.config(method, seed=seed, recipe=replace(recipe, seed=seed), data_fraction=0.05)
        for seed in range(seeds)
        for method in ("student_only", "dcr_dfg")
    ]
"""
FIT = Phase(name="fit", length=0.2, local=True, lr=4e-3)
LOCAL = FeatureGuidance(schedule=Hold(fraction=0.5, then=Constant(alpha=0.0)))
GUIDED = "plan.guidance.weight"
TUNING = Tuning(trials=4, steps_share=0.5, hold_out=0.1)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Experiment:
    path = tmp_path_factory.mktemp("experiment") / "runs.py"
    path.write_text(RUNS)
    return Experiment(str(path))


def in_this_process(jobs, out, workers):
    """Carry jobs out without worker processes."""
    for name, one in jobs.items():
        run_named(one, name, out)
        yield Outcome(name, True, 0.0)


@pytest.fixture(scope="module")
def finished(experiment, tmp_path_factory):
    """Tune in this process."""
    out = tmp_path_factory.mktemp("tuned") / "tune"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("segue.lab.grid._in_processes", in_this_process)
        assert tune(experiment, out, tuning=TUNING) == []
    return out


def test_every_method_has_as_many_trials_and_each_is_a_run_on_held_out_training_data(finished, experiment):
    saved = json.loads((finished / FILE).read_text())
    assert [one["method"] for one in saved["methods"]] == ["student_only", "dcr_dfg"]
    for one in saved["methods"]:
        assert len(one["trials"]) == TUNING.trials == one["choice"]["trials"]
        scores = [trial["score"] for trial in one["trials"]]
        assert one["choice"]["score"] == max(scores)
        for trial in one["trials"]:
            ((name, score),) = trial["runs"].items()
            result = records.read(finished / name / records.FILE)
            assert result.train_info.final["accuracy"] == score == trial["score"]
            assert result.train_info.total_steps == 2  # half of the experiment's
            config = result.run_info.config
            assert config["task"]["hold_out"] == 130  # a tenth of 1,297
            assert config["teacher"]["task"]["hold_out"] == 0  # the teacher is the experiment's
            assert config["seed"] == config["plan"]["seed"] == config["recipe"]["seed"] == 1000  # no seed of the experiment
            assert config["recipe"]["lr"] == trial["settings"]["recipe.lr"]
    guided = saved["methods"][1]["trials"]
    assert {trial["settings"]["plan.guidance.weight"] for trial in guided} >= {1.0}
    assert all(list(trial["settings"]) == ["recipe.lr"] for trial in saved["methods"][0]["trials"])


def test_as_many_examples_are_trained_on_as_in_the_experiment(experiment):
    (arm, _) = arms_of(experiment, TUNING)
    trial = arm.changes((0.0,))[0](arm.run)
    own = arm.run.task.load(data_fraction=arm.run.data_fraction).examples
    assert trial.task.load(data_fraction=trial.data_fraction).examples == pytest.approx(own, abs=5)


def test_an_interrupted_search_resumes_to_the_same_choice(finished, experiment, tmp_path, monkeypatch):
    carried_out = []

    def two_at_a_time(jobs, out, workers):
        for name in list(jobs)[:2]:
            carried_out.append(name)
            (out / name).mkdir(parents=True)
            for file in ("config.json", records.FILE):  # the same numbers as those of the undisturbed run
                (out / name / file).write_bytes((finished / name / file).read_bytes())
            yield Outcome(name, True, 0.0)
        raise KeyboardInterrupt

    monkeypatch.setattr("segue.lab.grid._in_processes", two_at_a_time)
    for _ in range(20):
        try:
            assert tune(experiment, tmp_path, tuning=TUNING) == []
            break
        except KeyboardInterrupt:
            continue
    assert json.loads((tmp_path / FILE).read_text()) == json.loads((finished / FILE).read_text())
    assert len(carried_out) == len(set(carried_out)) == 2 * TUNING.trials


def test_a_diverged_trial_counts_as_the_worst_and_a_failed_one_stops_the_search(finished, experiment, tmp_path, monkeypatch):
    def failing(jobs, out, workers):
        for name in jobs:
            why = "TrainingError: the loss is inf." if "lr_0.02" in name else ""
            if not why:
                (out / name).mkdir(parents=True)
                for file in ("config.json", records.FILE):
                    (out / name / file).write_bytes((finished / name / file).read_bytes())
            yield Outcome(name, not why, 0.0, why)

    monkeypatch.setattr("segue.lab.grid._in_processes", failing)
    tune(experiment, tmp_path / "a", tuning=replace(TUNING, trials=3))
    trials = json.loads((tmp_path / "a" / FILE).read_text())["methods"][0]["trials"]
    assert [trial["score"] is None for trial in trials] == [False, True, False]

    monkeypatch.setattr("segue.lab.grid._in_processes", lambda jobs, *_: (Outcome(n, False, 0.0, "no memory") for n in jobs))
    assert len(tune(experiment, tmp_path / "b", tuning=TUNING)) == 6
    assert not (tmp_path / "b" / FILE).exists()


def test_trials_of_other_settings_that_diverged_are_tried_again(experiment, tmp_path, monkeypatch):
    """A run that diverges before its first checkpoint leaves no config.json that would refuse them."""
    tried = []

    def diverging(jobs, out, workers):
        tried.append(list(jobs))
        yield from (Outcome(name, False, 0.0, "TrainingError: the loss is inf.") for name in jobs)

    monkeypatch.setattr("segue.lab.grid._in_processes", diverging)
    for share in (0.5, 0.5, 1.0):
        assert tune(experiment, tmp_path, tuning=replace(TUNING, trials=3, steps_share=share)) == []
    assert len(tried) == 2
    assert tried[0] == tried[1]


def test_trials_of_other_settings_are_refused(finished, experiment):
    with pytest.raises(ConfigError, match="belongs to another run"):
        tune(experiment, finished, tuning=replace(TUNING, steps_share=1.0))


def test_a_tuned_grid_has_the_chosen_settings_and_says_how_they_were_chosen(finished, experiment, tmp_path):
    found = tuned(experiment, finished / FILE)
    choices = {change.method: change.choice for change in read(finished / FILE)}
    for own, run in zip(experiment.runs(), found.runs(), strict=True):
        choice = choices[run.method]
        assert choice is not None
        assert run.choice == choice
        assert own.choice is None
        assert {path: setting(run, path) for path in choice.settings} == choice.settings
        assert (run.task, run.recipe.steps, run.seed) == (own.task, own.recipe.steps, own.seed)  # all else is the experiment's
    again = Experiment.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found  # through grid.json, and to the workers
    run = again.runs()[1]
    assert config_hash(run) == config_hash(replace(run, choice=None, reference=None))  # they change no number
    info = train(run, tmp_path / "grid" / run.name).run_info
    assert (info.reference, info.choice and info.choice["settings"]) == ("student_only", choices["dcr_dfg"].settings)  # type: ignore[union-attr]


def test_every_method_needs_settings(finished, experiment, tmp_path):
    saved = json.loads((finished / FILE).read_text())
    saved["methods"].pop()
    (tmp_path / FILE).write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match="no settings for the method 'dcr_dfg' of the group 'all'"):
        tuned(experiment, tmp_path / FILE)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"experiment": "other"}, "tuned for the experiment 'other'"),
        ({"config_hash": "0" * 16}, "have other settings now, or other options"),
    ],
)
def test_settings_of_another_experiment_are_refused(change, found, finished, experiment, tmp_path):
    saved = json.loads((finished / FILE).read_text())
    saved["methods"][-1] |= change
    (tmp_path / FILE).write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=rf"(?s)are of another experiment\..*{found}"):
        tuned(experiment, tmp_path / FILE)
    for method in saved["methods"]:  # as files from before they were noted
        del method["experiment"], method["config_hash"]
    (tmp_path / FILE).write_text(json.dumps(saved))
    assert tuned(experiment, tmp_path / FILE).changes == tuned(experiment, finished / FILE).changes


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"format": 2}, "has a format"),
        ({"methods": [{}]}, "is not what `segue tune` writes"),
        ({"methods": 3}, "is not what `segue tune` writes"),
    ],
)
def test_a_damaged_file_is_refused(finished, tmp_path, damage, says):
    saved = json.loads((finished / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps(saved | damage))
    with pytest.raises(ResultError, match=says):
        read(tmp_path / FILE)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ResultError, match="cannot be read"):
        read(tmp_path / FILE)


@pytest.mark.parametrize(
    ("plan", "paths"),
    [
        ({}, ["recipe.lr", "plan.guidance.weight"]),
        ({"guidance": None}, ["recipe.lr"]),
        ({"guidance": FeatureGuidance(weight=0.0)}, ["recipe.lr"]),
        ({"guidance": lambda teacher, student, mask: (teacher - student).square().mean()}, ["recipe.lr"]),
        (
            {"guidance": OnTeacherStream(then=FeatureAxis(then=FeatureGuidance())), "distill": LogitDistillation()},
            ["recipe.lr", "plan.guidance.then.then.weight", "plan.distill.weight"],
        ),
        ({"schedule": Hold(fraction=0.5, then=Constant(alpha=0.0)), "guidance": LOCAL}, ["recipe.lr"]),
        ({"phases": (FIT, Phase(name="after"))}, ["recipe.lr", "plan.phases.0.lr"]),
        ({"phases": (FIT, Phase(name="after", task=0.0)), "distill": LogitDistillation()}, ["recipe.lr", "plan.phases.0.lr"]),
        (
            {"phases": (FIT, Phase(name="after")), "distill": LogitDistillation()},
            ["recipe.lr", "plan.phases.0.lr", "plan.distill.weight"],
        ),
        ({"phases": (FIT, Phase(name="after", lr=1e-3, guidance=0.1))}, ["plan.phases.0.lr", "plan.phases.1.lr", GUIDED]),
        (
            {"phases": (replace(FIT, lr=Rates(new=1e-2, copied=1e-4)), Phase(name="after", lr=1e-3))},
            ["plan.phases.0.lr.new", "plan.phases.0.lr.copied", "plan.phases.1.lr"],
        ),
    ],
)
def test_rates_and_the_weights_of_own_losses_are_tuned(plan, paths):
    axes = axes_of(tiny_runs.config(methods.dcr_dfg, plan=plan))
    assert [axis.path for axis in axes] == paths
    rates = Recipe(steps=4, lr=Rates(new=1e-2, backbone=1e-4))
    assert [axis.path for axis in axes_of(tiny_runs.config(methods.dcr, recipe=rates))] == [
        "recipe.lr.new",
        "recipe.lr.backbone",
    ]
    assert [axis.factor for axis in axes] == [4.0 if path.endswith("weight") else 2.0 for path in paths]


def test_a_best_value_at_an_edge_and_a_setting_without_trials_are_recorded(finished):
    arm = tuning_module.Arm(tiny_runs.config(), axes_of(tiny_runs.config()), {"task.hold_out": 9}, (1000,))
    tried = {(0.0, 0.0): 0.1, (1.0, 0.0): 0.3, (-1.0, 0.0): 0.2}
    known = {arm.changes(point)[0](replace(arm.run, task=tiny_runs.TASK)).name: score for point, score in tried.items()}
    choice = Choice(**tuning_module._described(arm, tried, known)["choice"])
    assert choice.settings == {"recipe.lr": 0.02, "plan.guidance.weight": 1.0}
    assert (choice.at_edge, choice.not_varied) == (("recipe.lr",), ("plan.guidance.weight",))


def test_a_task_that_cannot_hold_out_is_refused(monkeypatch, experiment):
    class Bare:
        """A task of a user."""

    run = experiment.runs()[0]
    object.__setattr__(run, "task", Bare())
    monkeypatch.setattr(Experiment, "runs", lambda self: [run])
    with pytest.raises(ConfigError, match="the task Bare cannot hold out training data"):
        arms_of(experiment, TUNING)


@pytest.mark.parametrize("wrong", [{"trials": 2}, {"hold_out": 1.0}, {"hold_out": 0.0}, {"steps_share": 1.5}, {"seeds": 0}])
def test_wrong_settings_of_a_search_are_refused(wrong):
    with pytest.raises(ConfigError):
        Tuning(**wrong)
    with pytest.raises(ConfigError):
        Tuning.from_dict({"trails": 3})


def test_seeds_of_a_trial_are_averaged():
    assert tuning_module.mean([0.25, 0.75]) == 0.5
    assert tuning_module.mean([0.25, None]) is None


@pytest.mark.processes
def test_a_worker_process_carries_out_what_is_missing(finished, experiment, tmp_path: Path):
    shutil.copytree(finished.parent, tmp_path / "copy")
    out = tmp_path / "copy" / finished.name
    saved = json.loads((out / FILE).read_text())
    (name,) = saved["methods"][1]["trials"][-1]["runs"]
    shutil.rmtree(out / name)
    (out / FILE).unlink()
    assert tune(experiment, out, tuning=TUNING, workers=2) == []
    assert json.loads((out / FILE).read_text()) == saved

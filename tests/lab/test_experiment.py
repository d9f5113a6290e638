"""Experiments: files that return runs, what is refused in them, and what is changed in the runs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from segue.errors import ConfigError
from segue.lab.config import Choice
from segue.lab.experiment import Change, Experiment
from tests.helpers import tiny_runs

RUNS = """
from segue import methods
from segue.students import Reinit
from tests.helpers import tiny_runs


def runs(pause: float = 0.0, only: str = ""):
    own = {"student": lambda teacher, site: Reinit()(teacher, site)}
    good = [tiny_runs.config("dcr_dfg"), tiny_runs.config("theseus", seed=1, plan=own)]
    return [run for run in good if only in run.method]
"""
CHOICE = Choice(settings={"recipe.lr": 0.5}, trials=3, seeds=1, hold_out=10, score=0.9)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> str:
    """Return an experiment's file."""
    path = tmp_path_factory.mktemp("experiment") / "runs.py"
    path.write_text(RUNS)
    return str(path)


def written(folder, text):
    path = folder / "runs.py"
    path.write_text(text)
    return Experiment(str(path))


def test_an_experiment_may_hold_anything_that_python_can_write(place):
    first, second = Experiment(place).runs()
    assert (first.name, second.name) == ("dcr_dfg-seed0", "theseus-seed1")
    assert callable(second.plan.student)
    assert [run.name for run in Experiment(place, {"only": "theseus"}).runs()] == ["theseus-seed1"]


def test_a_wrong_option_gets_the_nearest_names(place):
    with pytest.raises(ConfigError, match="has no option 'pauze'") as caught:
        Experiment(place, {"pauze": 1}).runs()
    assert "Nearest names: pause" in str(caught.value)


def test_an_option_without_a_default_is_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="needs the option 'model'"):
        written(tmp_path, "def runs(model, seeds=3):\n    return []\n").runs()


def test_two_runs_of_one_name_are_refused(tmp_path):
    experiment = written(tmp_path, RUNS + "\n\none = runs\n\n\ndef runs():\n    return [*one(), *one()]\n")
    with pytest.raises(ConfigError, match="has two runs called 'dcr_dfg-seed0'"):
        experiment.runs()


@pytest.mark.parametrize("text", ["", "runs = 3\n", "def run():\n    return []\n"])
def test_a_file_without_runs_is_explained(text, tmp_path):
    with pytest.raises(ConfigError, match="has no function `runs`"):
        written(tmp_path, text).runs()


@pytest.mark.parametrize("returned", ["None", "3", "['dcr']", "[None]"])
def test_runs_that_are_none_are_explained(returned, tmp_path):
    with pytest.raises(ConfigError, match="must return a list of Run"):
        written(tmp_path, f"def runs():\n    return {returned}\n").runs()


@pytest.mark.parametrize("place", ["no/such/runs.py", "no.such.module"])
def test_an_experiment_that_is_not_there_is_explained(place):
    with pytest.raises(ConfigError) as caught:
        Experiment(place).runs()
    assert place in str(caught.value)


def test_an_installed_module_is_an_experiment_too(place, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(place).parent))
    monkeypatch.delitem(sys.modules, "runs", raising=False)
    assert len(Experiment("runs").runs()) == 2
    monkeypatch.delitem(sys.modules, "runs", raising=False)


def test_a_change_is_made_in_the_runs_of_its_method_and_group_only(place):
    change = Change(method="theseus", group="all", settings={"recipe.lr": 0.5, "recipe.betas.0": 0.5}, choice=CHOICE)
    own, runs = Experiment(place).runs(), Experiment(place, changes=(change,)).runs()
    assert runs[0] == own[0]
    assert (runs[1].recipe, runs[1].choice) == (replace(own[1].recipe, lr=0.5, betas=(0.5, 0.999)), CHOICE)
    for other in ({"method": "dcr"}, {"group": "5 %"}, {"seed": 3}):
        assert replace(change, **other)(own[1]) == own[1]
    assert replace(change, seed=1)(own[1]).recipe == runs[1].recipe


def test_changes_travel_through_a_file(place):
    change = Change(method="theseus", group="all", settings={"recipe.betas": (0.5, 0.9)}, seed=1, choice=CHOICE)
    experiment = Experiment(place, {"only": "theseus"}, (change,))
    again = Experiment.from_dict(json.loads(json.dumps(experiment.to_dict())))
    (run,) = again.runs()
    assert (run.recipe.betas, run.choice) == ((0.5, 0.9), CHOICE)
    assert json.dumps(again.to_dict()) == json.dumps(experiment.to_dict())
    assert Experiment.from_dict({"place": place, "options": {}}) == Experiment(place)  # version 0.1.0 writes no changes


@pytest.mark.parametrize("changes", [3, [{}], [{"method": 3}], ["a"]])
def test_damaged_changes_are_refused(place, changes):
    with pytest.raises(ConfigError, match=r"grid\.json"):
        Experiment.from_dict({"place": place, "options": {}, "changes": changes})


def test_a_setting_that_a_run_lacks_is_named(place):
    with pytest.raises(ConfigError, match="Recipe has no setting 'rl'"):
        Experiment(place, changes=(Change(method="dcr_dfg", group="all", settings={"recipe.rl": 1.0}),)).runs()


def test_the_reference_is_noted_in_every_run(tmp_path):
    runs = written(tmp_path, f"{RUNS}\nREFERENCE = 'theseus'\n").runs()
    assert {run.reference for run in runs} == {"theseus"}
    part = Experiment(str(tmp_path / "runs.py"), {"only": "dcr"}).runs()
    assert [(run.method, run.reference) for run in part] == [("dcr_dfg", "theseus")]  # though its own runs are left out
    assert {run.reference for run in written(tmp_path, RUNS).runs()} == {None}
    assert tiny_runs.config(reference="dcr").reference == "dcr"


@pytest.mark.parametrize("reference", ["'thesues'", "3"])
def test_a_reference_without_a_run_is_refused(reference, tmp_path):
    with pytest.raises(ConfigError, match="REFERENCE of the experiment") as caught:
        written(tmp_path, f"{RUNS}\nREFERENCE = {reference}\n").runs()
    assert "theseus" in str(caught.value)


def test_a_file_of_a_package_imports_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "my_experiments" / "mine"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "arms.py").write_text("STEPS = 3")
    text = "from my_experiments.mine.arms import STEPS\nfrom tests.helpers import tiny_runs\n"
    place = folder / "runs.py"
    place.write_text(text + "def runs(): return [tiny_runs.config(batch=STEPS)]")
    assert Experiment(str(place)).runs()[0].batch == 3
    assert str(tmp_path) in sys.path

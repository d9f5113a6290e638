"""segue tune, grid --tuned, pack and report: from trials to a page that anyone can rebuild."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from segue.cli import commands, tune
from segue.errors import ConfigError
from segue.lab.grid import Outcome, run_named
from segue.lab.report import figures
from tests.helpers.command import call, runner
from tests.lab.report.saved_runs import grid, save

RUNS = """
from dataclasses import replace

from tests.helpers import tiny_runs

REFERENCE = "student_only"


def runs(steps=2):
    run = tiny_runs.config("student_only", data_fraction=0.05, diagnostics=())
    return [replace(run, recipe=replace(run.recipe, steps=steps), label="Students [alone]")]
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Write an experiment, and carry out its runs in this process."""

    def in_this_process(jobs, out, workers):
        for name, one in jobs.items():
            run_named(one, name, out)
            yield Outcome(name, True, 0.0)

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("segue.lab.grid._in_processes", in_this_process)
    path = Path("experiments/mine/runs.py")
    path.parent.mkdir(parents=True)
    path.write_text(RUNS)
    return path


def test_settings_are_chosen_used_packed_and_reported(place, monkeypatch):
    monkeypatch.setattr(figures, "draw", lambda summary, folder: [])
    shown = call("tune", "mine", "--trials", "3", "--hold-out", "0.1")
    assert "Students [alone] (0." in shown
    assert "0.005 0.01 0.02" in shown  # what was tried
    assert "Next: segue grid experiments/mine --tuned runs/mine_tune/tuned.json" in " ".join(shown.split())
    chosen = json.loads(Path("runs/mine_tune/tuned.json").read_text())

    Path("runs/mine_tune/tuned.json").unlink()
    call("resume", "runs/mine_tune")  # the user's own experiment, known by what it is: no question
    assert json.loads(Path("runs/mine_tune/tuned.json").read_text()) == chosen

    call("grid", "mine", "--tuned", "runs/mine_tune/tuned.json")
    assert "1 finished before" in call("resume", "runs/mine")  # grid.json has the settings
    result = json.loads(Path("runs/mine/student_only-seed0/result.json").read_text())
    rate = chosen["methods"][0]["choice"]["settings"]["recipe.lr"]
    assert result["run_info"]["config"]["recipe"]["lr"] == rate
    assert result["run_info"]["reference"] == "student_only"

    call("report", "runs/mine")
    call("pack", "runs/mine", "--out", "experiments/mine/results")
    call("report", "experiments/mine/results", "--out", "page")
    assert [path.name for path in Path("experiments/mine/results").iterdir()] == ["results.jsonl"]
    assert Path("page/table.md").read_text() == Path("runs/mine/table.md").read_text()
    assert f"recipe.lr {rate:g}" in Path("page/table.md").read_text()
    assert "How the settings were chosen" in Path("page/report.html").read_text()


def test_packing_says_how_small_it_is(tmp_path):
    save(grid(methods=["dcr"], groups=["all"], seeds=3, evaluations=3, sites=1), tmp_path / "runs")
    shown = call("pack", tmp_path / "runs", "--out", tmp_path / "packed")
    size = (tmp_path / "packed" / "results.jsonl").stat().st_size
    assert f"3 runs in {size:,} bytes, {size // 3:,} for a run." in " ".join(shown.split())


def test_a_search_that_fails_says_why_and_chooses_nothing(place, monkeypatch):
    failing = lambda jobs, *_: (Outcome(name, False, 0.0, "the disk is full") for name in jobs)  # noqa: E731
    monkeypatch.setattr("segue.lab.grid._in_processes", failing)
    result = runner.invoke(commands.app, ["tune", "mine", "--trials", "3"], catch_exceptions=False)
    assert result.exit_code == 1
    assert "the disk is full" in result.stdout
    assert not Path("runs/mine_tune/tuned.json").exists()


def test_a_folder_of_trials_that_somebody_sends_runs_no_code(place):
    folder = Path("theirs")
    folder.mkdir()
    known = {"place": str(place.resolve()), "options": {}, "workers": 1, "engine": "local", "tuning": {"trials": 3}}
    (folder / tune.SETTINGS).write_text(json.dumps(known))
    with pytest.raises(ConfigError, match="is not run"):
        call("resume", folder)
    (folder / tune.SETTINGS).write_text(json.dumps(known | {"tuning": {"trials": 2}}))
    with pytest.raises(ConfigError, match="trials"):
        call("resume", folder, "--run-file")


def test_wrong_settings_are_refused_before_anything_is_written(place):
    for wrong in (["--hold-out", "1"], ["--steps-share", "0"], ["-o", "stps=3"]):
        with pytest.raises(ConfigError):
            call("tune", "mine", *wrong)
    with pytest.raises(ConfigError, match="there is no file nothing.json"):
        call("grid", "mine", "--tuned", "nothing.json")
    assert not Path("runs").exists()

"""`segue resume`: code and downloads that only the folder asks for wait for its user."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from segue.cli import commands
from segue.errors import ConfigError
from segue.lab import consent
from segue.lab.grid import Experiment
from tests.helpers.command import runner

CODE = """
from pathlib import Path

Path("marker").touch()


def runs(seeds=1):
    return []
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def grid(tmp_path, monkeypatch) -> Path:
    """A folder as a stranger may send it: grid.json names a file beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "runs.py").write_text(CODE)
    write(tmp_path / "grid")
    return tmp_path / "grid"


def write(folder: Path, place: str = "theirs/runs.py", **options: object) -> None:
    folder.mkdir(exist_ok=True)
    known = {"place": place, "options": options, "workers": 1, "engine": "local"}
    (folder / "grid.json").write_text(json.dumps(known))


def resume(folder: Path, *options: str) -> str:
    """Resume, and return the error; the experiment above has no runs, which is one too."""
    with pytest.raises(ConfigError) as caught:
        runner.invoke(commands.app, ["resume", str(folder), *options], catch_exceptions=False)
    assert len(str(caught.value).splitlines()) == 3
    return str(caught.value)


def test_the_file_that_a_folder_names_is_not_run(grid):
    said = resume(grid)
    assert said.startswith("the experiment theirs/runs.py is not run.\n  It is code")
    assert f"segue resume {grid} --run-file" in said
    assert not Path("marker").exists()


def test_a_module_that_a_folder_names_is_not_imported(grid, monkeypatch):
    Path("somebody.py").write_text(CODE)
    Path("segue_like.py").write_text(CODE)
    monkeypatch.syspath_prepend(".")
    for place in ("somebody", "segue_like", "segue", "segue./x/../theirs/runs.py", "theirs/runs"):
        write(grid, place)
        assert "is not run" in resume(grid)
        assert not Path("marker").exists()


def test_with_the_flag_it_is_run(grid):
    assert "must return a list of Run" in resume(grid, "--run-file")
    assert Path("marker").exists()


@pytest.mark.parametrize(("answer", "runs"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_in_a_terminal_the_user_is_asked(grid, monkeypatch, answer, runs):
    shown = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", shown)
    with pytest.raises(ConfigError):
        commands.resume(grid)
    assert Path("marker").exists() is runs
    assert "names the experiment theirs/runs.py, which is code. Run it? [y/N]" in shown.getvalue()


def test_what_the_user_ran_in_this_folder_before_is_run_again_until_anything_changes(grid, tmp_path):
    place = str(tmp_path / "theirs" / "runs.py")
    write(grid, place, seeds=1)
    consent.remember(Experiment(place, {"seeds": 1}), grid)
    assert "must return a list of Run" in resume(Path("grid"))
    write(grid, place, seeds=2)
    assert "is not run" in resume(grid), "other options"
    write(tmp_path / "other", place, seeds=1)
    assert "is not run" in resume(tmp_path / "other"), "another folder"
    write(grid, place, seeds=1)
    (tmp_path / "theirs" / "runs.py").write_text(CODE + "\n")
    assert "is not run" in resume(grid), "another content"


def test_without_a_home_the_user_is_asked(grid, monkeypatch, tmp_path):
    place = str(tmp_path / "theirs" / "runs.py")
    write(grid, place)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs" / "runs.py"))  # a file: nothing can be written there
    consent.remember(Experiment(place), grid)
    assert "is not run" in resume(grid)


def test_segues_own_experiment_needs_no_question(grid):
    write(grid, "segue.cli.demo", seeds=0)
    assert "must return a list of Run" in resume(grid)
    write(grid, "segue.cli.commands")
    assert "has no function `runs`" in resume(grid)

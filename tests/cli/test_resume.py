"""`segue resume`: code and downloads that only the folder asks for wait for its user."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from segue import SegueWarning
from segue.checkpoint import folders
from segue.cli import commands, main
from segue.errors import CheckpointError, ConfigError
from segue.lab import consent
from segue.lab.experiment import Experiment
from segue.lab.run import run
from segue.training.fit import Loop
from tests.checkpoint.test_restoring import forge
from tests.helpers.command import call, runner
from tests.helpers.tiny_runs import config

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


# A damaged checkpoint, and another one that is complete


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory) -> Path:
    """A run that failed at its eighth step: its checkpoints are of the steps 7 and 6."""
    folder = tmp_path_factory.mktemp("a run") / "runs" / "dcr_dfg"
    stop_after(7, lambda: run(config(), folder))
    return folder


def stop_after(step: int, work: Any) -> None:
    plain = Loop.step

    def failing(loop: Loop, interruption: Any) -> Any:
        if loop.done == step and loop.handover is not None:
            raise RuntimeError("the power failed")
        return plain(loop, interruption)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(RuntimeError, match="power"):
        patched.setattr(Loop, "step", failing)
        work()


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder.parent.parent, to / "a copy", ignore=shutil.ignore_patterns(".lock"))
    return to / "a copy" / folder.parent.name / folder.name


def damaged(folder: Path) -> str:
    """Damage the newest checkpoint, resume, and return the hint of the error."""
    newest, *_ = folders.checkpoints(next(folder.rglob("checkpoints")))
    (newest / "tensors.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=f"the checkpoint {newest} is damaged") as caught:
        call("resume", folder)
    return str(caught.value).splitlines()[-1]


def followed(hint: str) -> str:
    """Execute the command of a hint."""
    program, *arguments = shlex.split(hint[hint.index("segue resume") :])
    assert program == "segue"
    return call(*arguments)


def final(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())["train_info"]["final"]


def test_the_command_of_the_hint_resumes_a_run(stopped_run, tmp_path):
    folder = copied(stopped_run, tmp_path)
    assert re.search(r"students alone: accuracy [\d.]+ \(teacher [\d.]+\)", followed(damaged(folder)))
    undisturbed = copied(stopped_run, tmp_path / "other")
    call("resume", undisturbed)
    assert final(folder) == final(undisturbed)
    with pytest.raises(ConfigError, match="It is finished: its result is there"):
        call("resume", folder, "--checkpoint", stopped_run / "checkpoints")


def test_a_deleted_latest_does_not_begin_again(stopped_run, tmp_path):
    folder = copied(stopped_run, tmp_path)
    (folder / "checkpoints" / "latest").unlink()
    with pytest.warns(SegueWarning, match="names no checkpoint, so the newest complete one is taken: 00000007-"):
        call("resume", folder)
    undisturbed = copied(stopped_run, tmp_path / "other")
    call("resume", undisturbed)
    assert final(folder) == final(undisturbed)


def test_changes_are_allowed_by_name(stopped_run, tmp_path):
    """The data of a run are made by code, which may have changed."""
    folder = copied(stopped_run, tmp_path)

    def old(state: dict[str, Any], tensors: Any) -> None:
        settings = next(value for key, value in state["lr_scheduler"]["dict"] if key == "settings")
        settings["dict"] = [[key, "another" if key == "batches.first" else value] for key, value in settings["dict"]]

    place, *_ = folders.checkpoints(folder / "checkpoints")
    (folder / "checkpoints" / "latest").write_text(forge(place, old).name)
    with pytest.raises(CheckpointError, match="Saved -> given: batches.first: 'another' -> ") as caught:
        call("resume", folder)
    options = re.search("segue resume DIR (.*). Nothing was changed", str(caught.value))
    assert "students alone" in call("resume", folder, *options[1].split())


@pytest.mark.slow
def test_ctrl_c_names_the_command_that_resumes(tmp_path, monkeypatch, capsys):
    plain, out = Loop.step, tmp_path / "a folder"

    def interrupted(loop: Loop, interruption: Any) -> Any:
        if loop.done == 1 and loop.handover is not None:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(loop, interruption)

    options = ("-o", "steps=3", "-o", "teacher_steps=2", "-o", "depth=2", "--set", "evaluations=1", "--set", "diagnostics=[]")
    with monkeypatch.context() as patched, pytest.raises(SystemExit) as left:
        patched.setattr(Loop, "step", interrupted)
        patched.setattr(sys, "argv", ["segue", "run", "--method", "dcr", "--out", str(out), *options])
        main()
    assert left.value.code == 128 + signal.SIGINT
    said = capsys.readouterr().err
    assert "stopped at step 2 of 3" in said
    _, _, command = said.partition("To resume: ")
    assert "students alone" in followed(command.splitlines()[0])
    assert {path.name for path in tmp_path.iterdir()} == {out.name}, "everything is in --out"
    assert {path.name for path in out.iterdir()} == {"dcr-seed0", "teachers"}


def test_a_grid_has_no_checkpoint_of_its_own(grid):
    assert "give the folder of that run: segue resume" in resume(grid, "--checkpoint", "x")
    assert "give the folder of that run: segue resume" in resume(grid, "--allow-changes", "lr")

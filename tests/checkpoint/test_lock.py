"""One process at a time in a folder; the second one is told who the first is, and a killed one leaves nothing locked."""

import os
import platform
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import pytest

import segue
from segue.checkpoint.lock import FILE, locked
from segue.errors import CheckpointError
from tests.checkpoint.test_state import rig
from tests.helpers.processes import FreshProcess, Ranks
from tests.helpers.tiny import SITES
from tests.training.fit_cases import fit

REAL = filelock.FileLock
PLAN = segue.methods.dcr(sites=SITES)


class Wait(segue.Classification):
    """A loss that waits in its third step, until a file appears."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder, self.calls = Path(folder), 0

    def __call__(self, model, batch):
        self.calls += 1
        if self.calls == 3:
            (self.folder / "waiting").touch()
            wait_for(self.folder / "go")
        return super().__call__(model, batch)


def wait_for(path: Path) -> None:
    for _ in range(6000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} does not appear")


def test_the_filelock_of_an_old_torch_is_enough(tmp_path, monkeypatch):
    """Only `acquire` takes an interval there."""

    class Old:
        def __init__(self, path: Path) -> None:
            self.lock = REAL(path)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.lock, name)

    monkeypatch.setattr("filelock.FileLock", Old)
    with locked(tmp_path):
        assert (tmp_path / FILE).read_text()


def train(folder: str) -> None:
    fit(plan=PLAN, loss=Wait(folder), folder=f"{folder}/run", resume=True, checkpoint_every=1)


def in_use(folder: Path, pid: int) -> str:
    return (
        rf"{folder} is in use by another process.\n  process {pid} on {platform.node()}, since 20\d\d-.* UTC: .*\n.*wait until"
    )


@pytest.mark.processes
def test_a_second_process_is_told_who_trains_in_the_folder_and_the_first_one_ends_undisturbed(tmp_path):
    first = FreshProcess(train, str(tmp_path), log=tmp_path / "log")
    wait_for(tmp_path / "waiting")
    run = tmp_path / "run"
    before = sorted(run.rglob("*"))
    with pytest.raises(CheckpointError, match=in_use(run, first.pid)):
        fit(plan=PLAN, folder=run, resume=True)
    with pytest.raises(CheckpointError, match=in_use(run / "checkpoints", first.pid)):
        segue.save(rig("blend")[0], run / "checkpoints")
    assert sorted(run.rglob("*")) == before
    assert f"process {first.pid}" in (run / FILE).read_text()
    (tmp_path / "go").touch()
    first.check()
    assert (run / FILE).read_text() == ""
    fit(plan=PLAN, folder=run, resume=True)  # it is free again


@pytest.mark.processes
def test_a_killed_process_holds_nothing(tmp_path):
    first = FreshProcess(train, str(tmp_path), log=tmp_path / "log")
    wait_for(tmp_path / "waiting")
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert fit(plan=PLAN, folder=tmp_path / "run", resume=True).handover.steps_done == 6


def save_often(place: str) -> None:
    """Save again and again; being refused is no failure."""
    for _ in range(30):
        try:
            segue.save(rig("blend")[0], place)
        except CheckpointError as error:
            if "is in use by another process" not in str(error):
                raise


@pytest.mark.processes
def test_two_processes_that_save_to_one_folder_never_disturb_each_other(tmp_path):
    both = [FreshProcess(save_often, str(tmp_path / "run"), log=tmp_path / f"log{i}") for i in range(2)]
    for process in both:
        process.check()
    assert segue.load_(rig("blend")[0], tmp_path / "run").steps_done == 0


def enter_in_a_thread(folder: Path) -> None:
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            with locked(folder):
                pass
        except CheckpointError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    for error in errors:
        raise error


def test_the_holder_enters_again_another_thread_does_not(tmp_path):
    with locked(tmp_path):
        with locked(tmp_path / "." / "sub" / ".."):
            segue.save(rig("blend")[0], tmp_path)
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} "):
            enter_in_a_thread(tmp_path)
    enter_in_a_thread(tmp_path)


def test_a_folder_that_cannot_be_locked_is_named(tmp_path):
    (tmp_path / FILE).mkdir()
    with pytest.raises(CheckpointError, match="cannot be locked"), locked(tmp_path):
        pass


def test_folders_that_were_made_for_nothing_go_again(tmp_path):
    with locked(tmp_path / "a" / "b"):
        pass
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "c"):
        (tmp_path / "c" / "result").touch()
    (tmp_path / "mine").mkdir()
    with locked(tmp_path / "mine"):
        pass
    assert {place.name for place in tmp_path.iterdir()} == {"c", "mine"}


def test_a_fork_does_not_hold_what_its_parent_holds(tmp_path):
    with locked(tmp_path):
        if not (child := os.fork()):
            try:
                with locked(tmp_path):
                    os._exit(1)
            except CheckpointError:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(CheckpointError):
            enter_in_a_thread(tmp_path)


def test_a_lock_file_with_foreign_content_is_shown_without_control_characters(tmp_path):
    with locked(tmp_path):
        (tmp_path / FILE).write_bytes(b"\x1b[31mred\xff")
        with pytest.raises(CheckpointError, match=r"\n  \\x1b\[31mred. holds its lock"):
            enter_in_a_thread(tmp_path)


def rank(place: str) -> str:
    try:
        fit(plan=PLAN, folder=place)
    except CheckpointError as error:
        return str(error)
    return "trained"


@pytest.mark.processes
def test_ranks_share_the_lock_and_are_refused_together(tmp_path):
    held = tmp_path / "held"
    with locked(held):
        found = Ranks({"free": partial(rank, str(tmp_path / "free")), "held": partial(rank, str(held))}, tmp_path)
    assert found["free"] == ["trained", "trained"]
    assert all("is in use by another process" in said and f"process {os.getpid()}" in said for said in found["held"])


def test_a_file_is_no_folder_to_train_in(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for place in (file, file / "below"):
        with pytest.raises(CheckpointError, match=r"notes.txt.* cannot be locked\.\n"):
            fit(folder=place)
    assert file.read_text() == "mine"

"""Checkpoint folders: damaged ones are refused, a crash leaves the last one, the newest are kept."""

import os
import random
import resource
import shutil
import stat
import sys
import warnings
from pathlib import Path

import pytest

import segue
from segue.checkpoint import folders
from segue.errors import CheckpointError
from tests.checkpoint.test_state import rig, run
from tests.helpers.processes import FreshProcess
from tests.helpers.tiny import Net


def damage(folder: Path, how: str) -> None:
    tensors, state, manifest = (folder / n for n in ("tensors.safetensors", "state.json", "manifest.json"))
    if how == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:-10])
    elif how == "flipped":
        content = bytearray(tensors.read_bytes())
        content[-1] ^= 1
        tensors.write_bytes(content)
    elif how == "tampered":
        state.write_text(state.read_text().replace('"seed": 0', '"seed": 1'))
    elif how == "missing":
        tensors.unlink()
    elif how == "manifest":
        manifest.write_text(manifest.read_text().replace("a", "b"))
    elif how == "torn":
        manifest.unlink()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("truncated", "tensors.safetensors does not match its checksum"),
        ("flipped", "tensors.safetensors does not match its checksum"),
        ("tampered", "state.json does not match its checksum"),
        ("missing", "tensors.safetensors is missing"),
        ("manifest", "The manifest does not match the folder's name"),
        ("torn", "The manifest is missing"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_previous_one_works(how, says, tmp_path):
    handover, optimizer, scheduler = rig("blend")
    earlier = segue.save(handover, tmp_path)
    run(handover, optimizer, scheduler, 2)
    damage(segue.save(handover, tmp_path), how)
    with pytest.raises(CheckpointError, match=says) as error:
        segue.load_(Net(dropout=0.2), tmp_path)
    assert f"Hint: another one is complete: {earlier}. Take it with segue.load_(model, {str(earlier)!r})" in str(error.value)
    assert segue.load_(Net(dropout=0.2), earlier).steps_done == 0


def test_a_crash_while_saving_leaves_the_last_one_in_place(tmp_path, monkeypatch):
    handover, optimizer, scheduler = rig("blend")
    segue.save(handover, tmp_path)
    run(handover, optimizer, scheduler, 2)
    replace = os.replace
    for failing in range(2):  # before the folder is in place, and before the pointer is
        done = []

        def crash(source, target, failing=failing, done=done):
            if len(done) == failing:
                raise KeyboardInterrupt
            done.append(replace(source, target))

        monkeypatch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            segue.save(handover, tmp_path)
        monkeypatch.setattr(os, "replace", replace)
        assert segue.load_(Net(dropout=0.2), tmp_path).steps_done == 0
        assert not list(tmp_path.glob(".draft*"))


def test_only_the_newest_are_kept(tmp_path):
    handover, optimizer, scheduler = rig("blend")
    for _ in range(4):
        run(handover, optimizer, scheduler, 1)
        segue.save(handover, tmp_path, keep=2)
    kept = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert [name[:8] for name in kept] == ["00000003", "00000004"]
    segue.save(handover, tmp_path)
    segue.save(handover, tmp_path)
    assert segue.load_(Net(dropout=0.2), tmp_path).steps_done == 4


def test_a_checkpoint_of_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "FORMAT", 99)
    segue.save(rig("blend")[0], tmp_path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"has format 99.\n  This version of Segue reads format 1."):
        segue.load_(Net(dropout=0.2), tmp_path)


# `latest`


def broken_pointer(pointer: Path, how: str) -> None:
    content = bytearray(pointer.read_bytes())
    pointer.unlink()
    if how == "empty":
        pointer.write_bytes(b"")
    elif how == "bit flip":
        content[3] ^= 0x80  # no text any more
        pointer.write_bytes(content)
    elif how == "another digit":
        content[-1] = ord("0" if chr(content[-1]) != "0" else "1")
        pointer.write_bytes(content)
    elif how == "leads elsewhere":
        pointer.write_text("../../elsewhere")
    elif how == "FIFO":
        os.mkfifo(pointer)
    elif how == "device":
        pointer.symlink_to("/dev/zero")
    elif how == "folder":
        pointer.mkdir()
    elif how == "huge":
        with pointer.open("wb") as file:
            file.truncate(1 << 40)


@pytest.mark.parametrize(
    "how", ["deleted", "empty", "bit flip", "another digit", "leads elsewhere", "FIFO", "device", "folder", "huge"]
)
def test_without_a_good_pointer_the_newest_complete_checkpoint_is_taken_and_named(how, tmp_path):
    handover, optimizer, scheduler = rig("blend")
    for _ in range(3):
        run(handover, optimizer, scheduler, 1)
        newest = segue.save(handover, tmp_path, keep=3)
    broken_pointer(tmp_path / "latest", how)
    with pytest.warns(segue.SegueWarning, match=f"the newest complete one is taken: {newest.name}"):
        assert segue.load_(Net(dropout=0.2), tmp_path).steps_done == 3
    damage(newest, "torn")
    with pytest.warns(segue.SegueWarning, match="the newest complete one is taken: 00000002-"):
        assert segue.load_(Net(dropout=0.2), tmp_path).steps_done == 2
    for other in folders.checkpoints(tmp_path):
        damage(other, "missing")
    with pytest.raises(CheckpointError, match="is damaged.\n.*\n  Hint: there is no other complete checkpoint in its folder"):
        segue.load_(Net(dropout=0.2), tmp_path)
    run(handover, optimizer, scheduler, 1)
    segue.save(handover, tmp_path)
    assert segue.load_(Net(dropout=0.2), tmp_path).steps_done == 4


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors.safetensors"])
@pytest.mark.parametrize("how", ["FIFO", "device", "folder", "huge"])
def test_only_regular_files_of_a_stated_size_are_read(name, how, tmp_path):
    place = segue.save(rig("blend")[0], tmp_path)
    broken_pointer(place / name, how)
    says = "not a regular file" if how != "huge" else "bytes|manifest does not match|header is damaged"
    with pytest.raises(CheckpointError, match=rf"is damaged.\n.*({says})"):
        segue.load_(Net(dropout=0.2), tmp_path)


def test_a_file_with_more_bytes_than_its_header_says_is_not_hashed(tmp_path):
    place = segue.save(rig("blend")[0], tmp_path)
    with (place / "tensors.safetensors").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="tensors.safetensors cannot be read: it has 1,099,511,627,776 bytes"):
        segue.load_(Net(dropout=0.2), tmp_path)


def forged(place: Path, state: bytes) -> Path:
    """Write another state into a checkpoint, with hashes that are right."""
    (place / "state.json").write_bytes(state)
    digests = {name: folders.hash_file(place / name) for name in folders.FILES}
    manifest = folders.json.dumps({"files": digests}).encode()
    (place / "manifest.json").write_bytes(manifest)
    return place.rename(place.with_name(f"00000000-{folders.hashlib.sha256(manifest).hexdigest()[:16]}"))


@pytest.mark.parametrize("state", [b"[]", b"\xff", b"{}", b'{"format": 1}', b'{"format": 1, "aliases": {"a": "b"}}'])
def test_a_forged_state_is_refused_in_three_lines(state, tmp_path):
    with pytest.raises(CheckpointError, match="cannot be understood"):
        segue.load_(Net(dropout=0.2), forged(segue.save(rig("blend")[0], tmp_path), state))


# Saved again, killed, pruned


def test_a_state_that_is_saved_again_keeps_its_files(tmp_path):
    handover, _, _ = rig("blend")
    place = segue.save(handover, tmp_path)
    before = {path: path.stat().st_ino for path in place.iterdir()}
    assert segue.save(handover, tmp_path) == place
    assert {path: path.stat().st_ino for path in place.iterdir()} == before
    damage(place, "flipped")
    assert segue.save(handover, tmp_path) == place
    assert segue.load_(Net(dropout=0.2), tmp_path).steps_done == 0
    assert not list(tmp_path.glob(".draft*"))


OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


def save_and_die(case: str, place: str) -> None:
    """Save a state, in a copy of a folder for every k, and die at the k-th file operation; what a process of its own does."""
    handover, optimizer, scheduler = rig("blend")
    run(handover, optimizer, scheduler, 1)
    if case != "the only one":
        segue.save(handover, f"{place}/base")
    run(handover, optimizer, scheduler, 1)
    if case != "another step":
        saved = segue.save(handover, f"{place}/base")
        if case == "a damaged one":
            damage(saved, "flipped")
    drawn = random.getstate()
    for k in range(1000):
        shutil.copytree(f"{place}/base", f"{place}/{k}")
        if not (child := os.fork()):
            left = k

            def die(event: str, *_: object) -> None:
                nonlocal left
                if event in OPERATIONS:
                    left -= 1
                    if left < 0:
                        os._exit(9)

            os.fsync = lambda handle, sync=os.fsync: (die("open"), sync(handle))
            sys.addaudithook(die)
            random.setstate(drawn)  # a fork seeds it again
            segue.save(handover, f"{place}/{k}", keep=1)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break


@pytest.mark.processes
@pytest.mark.parametrize("case", ["the only one", "another step", "a damaged one"])
def test_a_kill_at_any_file_operation_leaves_a_complete_checkpoint(case, tmp_path):
    place = tmp_path / "killed"
    FreshProcess(save_and_die, case, str(place), log=tmp_path / "log").check()
    killed = sorted((path for path in place.iterdir() if path.name != "base"), key=lambda path: int(path.name))
    assert len(killed) > 15
    found = []
    for folder in killed:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", segue.SegueWarning)
            try:
                found.append(segue.load_(Net(dropout=0.2), folder).steps_done)
            except CheckpointError as error:
                if case != "a damaged one" or "another one is complete: " not in str(error):
                    raise
                found.append(1)
    assert found == sorted(found)
    assert set(found) == ({2} if case == "the only one" else {1, 2})
    assert len(folders.checkpoints(killed[-1])) == 1


def steps(folder: Path) -> list[int]:
    return [int(path.name[:8]) for path in folders.checkpoints(folder)]


def test_a_full_disk_is_named_and_leaves_the_last_one(tmp_path):
    handover, optimizer, scheduler = rig("blend")
    run(handover, optimizer, scheduler, 1)
    before = segue.save(handover, tmp_path, optimizer=optimizer)
    run(handover, optimizer, scheduler, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))  # the system refuses larger files
    try:
        with pytest.raises(CheckpointError) as caught:
            segue.save(handover, tmp_path, optimizer=optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    first, second, _ = str(caught.value).splitlines()
    assert first == f"{tmp_path} cannot be written."
    assert second == "  File too large."
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", before.name, "latest"]
    assert segue.save(handover, tmp_path, optimizer=optimizer).exists()


def test_which_ones_are_kept_depends_on_no_clock(tmp_path):
    handover, optimizer, scheduler = rig("blend")
    for step in range(1, 6):
        run(handover, optimizer, scheduler, 1)
        place = segue.save(handover, tmp_path, keep=2)
        date = (1 if step % 2 else 4) * 10**9  # 2001 and 2096
        os.utime(place, (date, date))
        assert steps(tmp_path) == [step, step - 1][: min(step, 2)]


def test_a_run_that_begins_again_in_the_same_folder_keeps_its_own_checkpoints(tmp_path):
    first, optimizer, scheduler = rig("blend")
    for _ in range(4):
        run(first, optimizer, scheduler, 2)
        segue.save(first, tmp_path, keep=3)
    assert steps(tmp_path) == [8, 6, 4]
    second, optimizer, scheduler = rig("blend")
    kept = []
    for _ in range(3):
        run(second, optimizer, scheduler, 1)
        segue.save(second, tmp_path, keep=3)
        kept.append(steps(tmp_path))
    assert kept == [[8, 6, 1], [8, 2, 1], [3, 2, 1]]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o027])
def test_modes_are_those_of_the_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        place = segue.save(rig("blend")[0], tmp_path / "run")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (place, *place.iterdir(), tmp_path / "run" / "latest")}
    assert modes == dict.fromkeys(modes, 0o666 & ~umask) | {place.name: 0o777 & ~umask}

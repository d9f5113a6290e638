"""Checkpoint folders: damaged ones are refused, a crash leaves the last one, the newest are kept."""

import os
from pathlib import Path

import pytest

import segue
from segue.checkpoint import folders
from segue.errors import CheckpointError
from tests.checkpoint.test_state import rig, run
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
    assert str(error.value).endswith(f"Hint: an earlier one is intact: {earlier}.")
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

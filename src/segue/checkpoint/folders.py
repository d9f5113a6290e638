"""Checkpoint folders: safetensors and JSON, written atomically, verified on read.

runs/mine/latest                     the name of the newest checkpoint, replaced atomically
runs/mine/00000300-5f0c.../          one checkpoint; its name carries the hash of its manifest
    manifest.json                    the hash of each file
    state.json, tensors.safetensors
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from segue.checkpoint.lock import locked
from segue.core import files, tensor_files
from segue.errors import CheckpointError, SegueError, SegueWarning

FORMAT = 1
NAME = re.compile(r"(\d{8,})-[0-9a-f]{16}")
FILES = ("state.json", "tensors.safetensors")
DRAFT = ".draft"  # the beginning of the names of what is not in place yet, or not any more


class Checkpoint(NamedTuple):
    """What a checkpoint holds, read and verified."""

    folder: Path
    state: dict[str, Any]
    tensors: dict[str, Tensor]


def write(folder: Path, state: dict[str, Any], tensors: dict[str, Tensor], keep: int) -> Path:
    """Write one checkpoint, let `latest` name it, and keep the newest few; nothing goes before its successor is in place."""
    with locked(folder), files.writing(folder):
        _clear_drafts(folder)  # of a process that was killed
        try:
            draft = folder / DRAFT
            draft.mkdir()  # with the modes that the umask says, as all files in it
            place = folder / _fill(draft, state, tensors)
            _put_in_place(draft, place)
            before = _pointed(folder)
            _point(folder, place.name)
            for path in _newest_first(folder, place.name, before)[max(1, keep) :]:
                _discard(path)
        finally:
            _clear_drafts(folder)
    return place


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint, the latest of a run or the given one, and refuse it if anything is damaged."""
    folder = _locate(folder)
    if reason := damage(folder):
        raise _damaged(folder, reason)
    with understood(folder):
        state = json.loads(files.content(folder / "state.json"))
        if state["format"] != FORMAT:
            raise CheckpointError(
                f"the checkpoint {folder} has format {state['format']!r}.",
                f"This version of Segue reads format {FORMAT}.",
                "read it with the version that wrote it.",
            )
        tensors = tensor_files.read(folder / "tensors.safetensors")
        tensors |= {name: tensors[original] for name, original in state["aliases"].items()}
    return Checkpoint(folder, state, tensors)


@contextmanager
def understood(folder: Path, own: Iterable[str] = ()) -> Iterator[None]:
    """Refuse a checkpoint whose files have the right hashes and the wrong content: another program wrote them.

    Or a part of the plan that the user has given again is at fault (`own` names them).
    """
    try:
        yield
    except SegueError:
        raise
    except Exception as error:
        yours = f"look at your own {', '.join(own)}, if the error comes from there, or " if own else ""
        raise CheckpointError(
            f"the checkpoint {folder} cannot be understood.",
            f"{type(error).__name__}: {error}.",
            f"{yours}read it with the version that wrote it. Nothing was changed.",
        ) from error


def checkpoints(folder: Path) -> list[Path]:
    """Return every checkpoint of a run, complete or not, that of the last step first."""
    found = [path for path in folder.glob("[0-9]*-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (step_in(path.name), path.name), reverse=True)


def exist(folder: Path) -> bool:
    """Return whether a folder has, or had, a checkpoint."""
    return os.path.lexists(folder / "latest") or bool(checkpoints(folder))


def damage(folder: Path) -> str | None:
    """Say what is wrong with a checkpoint, or None."""
    try:
        content = files.content(folder / "manifest.json")
    except FileNotFoundError:
        return "The manifest is missing"
    except OSError as error:
        return f"The manifest cannot be read: {error}"
    if hashlib.sha256(content).hexdigest()[:16] != folder.name.rpartition("-")[2]:
        return "The manifest does not match the folder's name"
    try:
        digests = {name: str(json.loads(content)["files"][name]) for name in FILES}
    except (ValueError, LookupError, TypeError):
        return "The manifest does not list the files of a checkpoint"
    for name, digest in digests.items():
        try:
            if hash_file(folder / name) != digest:
                return f"{name} does not match its checksum"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error}"
    return None


def hash_file(path: Path) -> str:
    """Hash the bytes of a regular file; one that is larger than it can be is refused before they are read."""
    size = path.stat().st_size
    most = tensor_files.announced_size(path) if path.suffix == ".safetensors" else files.LARGEST_TEXT
    if size > most:
        raise OSError(f"it has {size:,} bytes, at most {most:,} can be right")
    digest = hashlib.sha256()
    with files.opened(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _fill(draft: Path, state: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Write the files of a checkpoint to the disk, and return its name."""
    text = json.dumps({"format": FORMAT, **state}).encode()
    if len(text) > files.LARGEST_TEXT:
        raise CheckpointError(
            "the state is too large for a checkpoint.",
            f"Without its tensors it has {len(text):,} bytes, and at most {files.LARGEST_TEXT:,} are read.",
            "keep numbers in tensors, not in lists.",
        )
    tensor_files.write(draft / "tensors.safetensors", tensors)
    (draft / "state.json").write_bytes(text)
    digests = {name: hash_file(draft / name) for name in FILES}
    manifest = json.dumps({"format": FORMAT, "files": digests}, indent=1).encode()
    (draft / "manifest.json").write_bytes(manifest)
    for path in (*draft.iterdir(), draft):
        _flush(path)
    return f"{state['segue']['step']:08d}-{hashlib.sha256(manifest).hexdigest()[:16]}"


def _put_in_place(draft: Path, place: Path) -> None:
    """Give a written checkpoint its name; one that has it already holds the same bytes, or is damaged."""
    if os.path.lexists(place):
        if damage(place) is None:
            return
        _discard(place)
    os.replace(draft, place)
    _flush(place.parent)


def _point(folder: Path, name: str) -> None:
    """Let `latest` name a checkpoint."""
    pointer = folder / f"{DRAFT}-latest"
    pointer.write_text(name, encoding="utf-8")
    _flush(pointer)
    if (folder / "latest").is_dir():  # a file does not replace a folder
        _discard(folder / "latest")
    os.replace(pointer, folder / "latest")
    _flush(folder)


def _newest_first(folder: Path, newest: str, before: str | None) -> list[Path]:
    """Order checkpoints by when they were written, without asking a clock.

    The newest, the one that was it before, then by step; steps beyond the newest are left from an earlier run.
    """

    def order(path: Path) -> tuple[bool, bool, bool]:
        return path.name == newest, path.name == before, step_in(path.name) <= step_in(newest)

    return sorted(checkpoints(folder), key=order, reverse=True)


def _locate(folder: Path) -> Path:
    """Find the checkpoint that a folder stands for: itself, or the latest in it."""
    if folder.is_dir() and (NAME.fullmatch(folder.name) or os.path.lexists(folder / "manifest.json")):
        return folder
    if name := _pointed(folder):
        return folder / name
    found = checkpoints(folder)
    complete = next((path for path in found if damage(path) is None), None)
    if complete is not None:
        warnings.warn(
            f"{folder / 'latest'} names no checkpoint, so the newest complete one is taken: {complete.name}.",
            SegueWarning,
            stacklevel=2,
        )
        return complete
    if found:
        raise _damaged(found[0], str(damage(found[0])))
    raise CheckpointError(
        f"{folder} has no checkpoint.",
        "The folder has no file `latest`." if folder.exists() else "There is no such folder.",
        "give the folder that segue.save wrote to.",
    )


def _pointed(folder: Path) -> str | None:
    """Return the checkpoint that `latest` names, or None where it is missing, unreadable, or names none."""
    try:
        name = files.content(folder / "latest", 4096).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if NAME.fullmatch(name) and (folder / name).is_dir() else None


def _damaged(folder: Path, reason: str) -> CheckpointError:
    complete = next((other for other in checkpoints(folder.parent) if other != folder and damage(other) is None), None)
    hint = "there is no other complete checkpoint in its folder."
    if complete is not None:
        place = str(complete)
        hint = f"another one is complete: {place}. Take it with segue.load_(model, {place!r}), fit(..., resume={place!r})"
        if run := _run_of(complete):
            hint += f", or segue resume {shlex.quote(str(run))} --checkpoint {shlex.quote(place)}"
    return CheckpointError(f"the checkpoint {folder} is damaged.", f"{reason}.", hint)


def _run_of(checkpoint: Path) -> Path | None:
    """Return the folder of the run or conversion that wrote a checkpoint, if `segue resume` takes it."""
    training = checkpoint.parent.parent
    if (training / "settings.json").exists() and training.name == "training":
        return training.parent
    return training if (training / "config.json").exists() else None


def step_in(name: str) -> int:
    """Return the step that the name of a checkpoint's folder says."""
    return int(name.partition("-")[0])


def _discard(path: Path) -> None:
    """Take a folder away at once: whenever a kill comes, what has the name of a checkpoint has all its files."""
    os.replace(path, path.with_name(f"{DRAFT}-old-{path.name}"))


def _clear_drafts(folder: Path) -> None:
    for path in folder.glob(f"{DRAFT}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

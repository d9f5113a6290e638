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
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from segue.core import tensor_files
from segue.errors import CheckpointError

FORMAT = 1


def write(folder: Path, state: dict[str, Any], tensors: dict[str, Tensor], keep: int) -> Path:
    """Write one checkpoint, let `latest` name it, and keep the newest few."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder))
    try:
        tensor_files.write(draft / "tensors.safetensors", tensors)
        (draft / "state.json").write_text(json.dumps({"format": FORMAT, **state}), encoding="utf-8")
        files = {name: hash_file(draft / name) for name in ("state.json", "tensors.safetensors")}
        manifest = json.dumps({"format": FORMAT, "files": files}, indent=1).encode()
        (draft / "manifest.json").write_bytes(manifest)
        for file in draft.iterdir():
            _flush(file)
        name = f"{state['segue']['step']:08d}-{hashlib.sha256(manifest).hexdigest()[:16]}"
        if (folder / name).exists():
            shutil.rmtree(folder / name)
        os.replace(draft, folder / name)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    pointer = folder / ".latest-new"
    pointer.write_text(name, encoding="utf-8")
    _flush(pointer)
    os.replace(pointer, folder / "latest")
    _flush(folder)
    _forget_old(folder, name, keep)
    return folder / name


def read(folder: Path) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """Read a checkpoint, the latest of a run or the given one, and refuse it if anything is damaged."""
    folder = _resolve(folder)
    if reason := _damage(folder):
        raise _damaged(folder, reason)
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint {folder} has format {state.get('format')!r}.",
            f"This version of Segue reads format {FORMAT}.",
            "read it with the version that wrote it.",
        )
    tensors = tensor_files.read(folder / "tensors.safetensors")
    tensors |= {name: tensors[original] for name, original in state["aliases"].items()}
    return folder, state, tensors


def _resolve(folder: Path) -> Path:
    if (folder / "manifest.json").exists():
        return folder
    pointer = folder / "latest"
    if not pointer.exists():
        raise CheckpointError(
            f"{folder} has no checkpoint.",
            "The folder has no file `latest`." if folder.exists() else "There is no such folder.",
            "give the folder that segue.save wrote to.",
        )
    return folder / Path(pointer.read_text(encoding="utf-8").strip()).name


def _damage(folder: Path) -> str | None:
    """Say what is wrong with a checkpoint, or None."""
    manifest = folder / "manifest.json"
    if not manifest.exists():
        return "The manifest is missing"
    content = manifest.read_bytes()
    if hashlib.sha256(content).hexdigest()[:16] != folder.name.rpartition("-")[2]:
        return "The manifest does not match the folder's name"
    for name, digest in json.loads(content)["files"].items():
        file = folder / Path(name).name
        if not file.exists():
            return f"{name} is missing"
        if hash_file(file) != digest:
            return f"{name} does not match its checksum"
    return None


def _damaged(folder: Path, reason: str) -> CheckpointError:
    others = sorted((other for other in folder.parent.glob("*-*") if other != folder), reverse=True)
    intact = next((other for other in others if other.is_dir() and _damage(other) is None), None)
    hint = "there is no other checkpoint in its folder." if intact is None else f"an earlier one is intact: {intact}."
    return CheckpointError(f"the checkpoint {folder} is damaged.", f"{reason}.", hint)


def _forget_old(folder: Path, newest: str, keep: int) -> None:
    for draft in folder.glob(".draft-*"):  # of a process that was killed while writing; only one writes here
        shutil.rmtree(draft, ignore_errors=True)
    others = [p for p in folder.glob("[0-9]*-*") if p.is_dir() and p.name != newest]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in others[max(0, keep - 1) :]:
        shutil.rmtree(path, ignore_errors=True)


def hash_file(path: Path) -> str:
    """Hash a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

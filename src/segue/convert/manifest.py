"""The manifest of a converted folder: the hash of every file. Its own hash, the digest, is in the model card."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from segue.checkpoint.folders import hash_file
from segue.core import files as safe_files
from segue.errors import CheckpointError

FILE = "manifest.json"
CARD = "README.md"
FORMAT = 1
SHOWN = re.compile(r"sha256 of `manifest\.json` `([^`]*)`")  # as `line` writes it
# neither Segue nor transformers reads these, so that they may be added and changed
NOT_READ = (FILE, "training", "eval", ".*", "LICENSE*", "*.md", "*.png", "*.jpg", "*.svg", "*.pdf")


def write(folder: Path) -> str:
    """Write the manifest of a folder, and return its digest."""
    files = {name: hash_file(path) for name, path in sorted(_present(folder).items())}
    content = json.dumps({"format": FORMAT, "files": files}, indent=1).encode() + b"\n"
    (folder / FILE).write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def line(digest: str) -> str:
    """Return how a model card shows the digest."""
    return f"- **Digest**: sha256 of `{FILE}` `{digest}`"


def listed(folder: Path) -> dict[str, str]:
    """Read the manifest: the hash of every file by its name."""
    try:
        files = json.loads(safe_files.content(folder / FILE))["files"]
        if isinstance(files, dict) and all(isinstance(value, str) for value in files.values()):
            return files
        reason = "it lists no hashes"
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise refused(folder, f"{FILE} cannot be read ({reason}).")


def verify(folder: Path, digest: str | None = None) -> None:
    """Refuse a folder with a missing, changed or added file, or with another digest than the given one or the card's."""
    files = listed(folder)
    found = hash_file(folder / FILE)
    shown = SHOWN.search(_card(folder))
    for expected, source in ((digest, "the given digest"), (shown and shown.group(1), CARD)):
        if expected is not None and found != expected:
            raise refused(folder, f"{FILE} has changed: its sha256 is {found[:16]}…, {source} says {expected[:16]}…")
    present = _present(folder)
    if added := sorted(set(present) - set(files)):
        raise refused(folder, f"{added[0]} is not part of it: {FILE} does not name it.", "remove that file.")
    compare(folder, files, FILE)


def compare(folder: Path, files: Mapping[str, Any], source: str) -> None:
    """Refuse files that are missing, or whose hash differs."""
    for name, expected in files.items():
        if not (folder / name).is_file():
            raise refused(folder, f"{name} is missing.")
        try:
            found = hash_file(folder / name)
        except OSError as error:
            raise refused(folder, f"{name} cannot be read: {error}.") from None
        if found != expected:
            hint = "copy the folder again; if the change is yours, from_pretrained(..., verify=False)."
            raise refused(folder, f"{name} has changed: its hash differs from {source}.", hint)


def _card(folder: Path) -> str:
    try:
        return safe_files.content(folder / CARD).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise refused(folder, f"{CARD} cannot be read: {error}.") from None


def refused(folder: Path, found: str, hint: str = "copy the complete folder again.") -> CheckpointError:
    """Return the error of a folder that is not as it was written."""
    return CheckpointError(f"{folder} cannot be loaded as a converted model.", found, hint)


def _present(folder: Path) -> dict[str, Path]:
    """Find every file by its name in the folder; a link to a folder counts as a file, which no manifest lists."""
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if (path.is_symlink() or not path.is_dir()) and not any(fnmatchcase(name.parts[0], each) for each in NOT_READ):
            found[name.as_posix()] = path
    return found

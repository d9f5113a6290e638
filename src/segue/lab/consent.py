"""Experiments are code: which of them this user has run before, so that `segue resume` runs them again without a question."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from segue.lab.experiment import Experiment


def is_shipped(experiment: Experiment) -> bool:
    """Return whether an experiment is a part of Segue itself."""
    return experiment.place.startswith("segue.") and not experiment.place.endswith(".py")


def remember(experiment: Experiment, folder: Path) -> None:
    """Note that the user has run this file with these options in this folder; the note is not in the folder."""
    with suppress(OSError, RuntimeError):  # no home, a full disk: then the user is asked again
        note = _note(experiment, folder)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


def is_known(experiment: Experiment, folder: Path) -> bool:
    """Return whether the user has run exactly this before: the same content of the file, options and folder."""
    with suppress(OSError, RuntimeError):
        return _note(experiment, folder).exists()
    return False


def _note(experiment: Experiment, folder: Path) -> Path:
    content = hashlib.sha256(Path(experiment.place).read_bytes()).hexdigest()
    command = [str(Path(experiment.place).resolve()), content, experiment.options, str(folder.resolve())]
    name = hashlib.sha256(json.dumps(command, sort_keys=True).encode()).hexdigest()
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return home / "segue" / "experiments" / name

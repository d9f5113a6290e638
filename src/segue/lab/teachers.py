"""Teachers: trained once for each configuration, and saved under its hash."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from segue.checkpoint.lock import locked_on_rank_0
from segue.core import tensor_files
from segue.errors import ConfigError, DataError
from segue.lab.config import Teacher, config_hash, to_dict
from segue.lab.tasks import Loaded
from segue.reporting.records import read_json, write_json
from segue.training.distributed import launched
from segue.training.fit import fit

COMPLETE = "teacher.json"  # is written last
CACHE = "SEGUE_TEACHERS"  # environment variable: a folder of teachers for the runs of all grids


def teachers_of(teacher: Teacher, run: Path) -> Path:
    """Return the folder of the teachers: the one that SEGUE_TEACHERS names, or `teachers` beside the run.

    Version 0.1.0 kept them one folder above; one that is complete there is used, and nothing is written there.
    """
    if named := os.environ.get(CACHE):
        return Path(named)
    first = run.parent.parent / "teachers"
    there = (first / config_hash(teacher) / COMPLETE).exists()
    return first if there else run.parent / "teachers"


def teacher_model(teacher: Teacher, folder: Path, loaded: Loaded) -> tuple[nn.Module, dict[str, Any]]:
    """Return the trained teacher and its record; train it unless an earlier run has, or it needs no training."""
    if not teacher.stages:
        return loaded.build(teacher.seed), {}
    place = folder / config_hash(teacher)
    processes = launched()
    with locked_on_rank_0(place, wait=True):  # runs that share it wait for the one that trains it
        if not (place / COMPLETE).exists():
            _train(teacher, place, loaded)
        processes.wait()
    model = loaded.build(teacher.seed)
    known, tensors = _read(place)
    model.load_state_dict(tensors)
    return model, known


def scores_of(model: nn.Module, about: Any, folder: Path, measure: Callable[[nn.Module], dict[str, float]]) -> dict[str, float]:
    """Measure a pretrained model once for all runs that share the folder, and keep its scores under its weights and `about`."""
    found = json.dumps([tensor_files.fingerprint(model.state_dict()), about], sort_keys=True)
    path = folder / "scores" / f"{hashlib.sha256(found.encode()).hexdigest()[:16]}.json"
    with locked_on_rank_0(path.parent, wait=True):  # all processes that were launched together see the same file, or none
        known = path.exists()
        scores: dict[str, float] = read_json(path, "scores")["scores"] if known else measure(model)
        if not known and launched().rank == 0:
            write_json({"about": about, "scores": scores}, path)
        launched().wait()
    return scores


def _read(place: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        known: dict[str, Any] = json.loads((place / COMPLETE).read_text(encoding="utf-8"))
        tensors = tensor_files.read(place / "teacher.safetensors")
        complete = tensor_files.fingerprint(tensors) == known["fingerprint"]
    except Exception:  # a truncated file makes its reader raise anything
        complete = False
    if not complete:
        raise DataError(
            f"the teacher in {place} cannot be loaded.",
            "Its files are damaged.",
            "delete the folder; the teacher is then trained again.",
        )
    return known, tensors


def _train(teacher: Teacher, place: Path, loaded: Loaded) -> None:
    batches = loaded.train(teacher.batch, teacher.seed)
    points: list[dict[str, Any]] = []
    state: dict[str, Tensor] | None = None
    for number, stage in enumerate(teacher.stages):
        model = loaded.build(teacher.seed)  # a fresh one, because the last may be sharded
        if state is not None:
            model.load_state_dict(state)
        with _training_only(model, teacher.task.head if stage.head_only else "*"):
            result = fit(
                model,
                None,
                batches,
                teacher.task.loss,
                recipe=stage.recipe,
                validation=loaded.final if number == len(teacher.stages) - 1 else loaded.validation,
                folder=place / f"stage{number}",
                resume=True,
                evaluations=5,
                progress=f"teacher {number + 1}/{len(teacher.stages)}",
            )
        points += [{"stage": number, **point} for point in result.history]
        state = {name: tensor_files.full(value).detach().cpu().contiguous() for name, value in model.state_dict().items()}
    if launched().rank == 0 and state is not None:
        tensor_files.write(place / "teacher.safetensors", state)
        scores = points[-1]["scores"]
        known = {"config": to_dict(teacher), "scores": scores, "points": points, "fingerprint": tensor_files.fingerprint(state)}
        write_json(known, place / COMPLETE)


@contextmanager
def _training_only(model: nn.Module, pattern: str) -> Iterator[None]:
    """Train only the parameters whose names match."""
    chosen = [name for name, _ in model.named_parameters() if fnmatchcase(name, pattern)]
    if not chosen:
        raise ConfigError(
            f"no parameter matches the head {pattern!r}.",
            f"The model is a {type(model).__name__}.",
            "correct the `head` pattern of the model's configuration.",
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    try:
        yield
    finally:
        model.requires_grad_(True)

"""Results: one JSON file per finished run, and the reading of many.

runs/small/                          an experiment
    dcr_dfg-100%-seed0/              a run
        config.json                  what was asked for
        metrics.jsonl                one line per look at the running handover
        checkpoints/                 while it runs
        result.json                  when it has finished: run_info, train_info, meta_info
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import segue
from segue.errors import ResultError

FORMAT = 1
FILE = "result.json"
PACKAGES = ("torch", "accelerate", "timm", "transformers", "torchvision", "numpy")


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one look at a running handover saw; what a run does not measure stays empty."""

    step: int
    epoch: float
    seconds: float  # of training so far, looks left out
    flops: float  # of training so far
    alpha: float  # the teacher's share, mean over the sites
    loss: float | None = None  # of training, mean since the last look, guidance included
    blend: dict[str, float] = field(default_factory=dict)  # scores of the model as it trains, by name
    students: dict[str, float] = field(default_factory=dict)  # scores of the students alone
    cosine: dict[str, float] = field(default_factory=dict)  # interface cosine by site, on the students' own stream
    relative_error: dict[str, float] = field(default_factory=dict)  # by site, likewise
    gradient_norm: dict[str, float] = field(default_factory=dict)  # of each student, mean since the last look, unclipped
    drift_blend: dict[str, float] = field(default_factory=dict)  # relative squared distance after the block of each site
    drift_students: dict[str, float] = field(default_factory=dict)  # from the untouched model's stream
    gate_variance: dict[str, float] = field(default_factory=dict)  # of each student's gradient, caused by the gates
    gate_variance_error: dict[str, float] = field(default_factory=dict)  # its standard error; 0 where it is exact
    data_variance: dict[str, float] = field(default_factory=dict)  # of each student's gradient, over minibatches
    predicted_variance: dict[str, float] = field(default_factory=dict)  # the paper's formula for `gate_variance`
    curvature_bias: dict[str, float] = field(default_factory=dict)  # of the loss, by mixing at a site at random
    curvature_bound: dict[str, float] = field(default_factory=dict)  # the paper's bound on it
    path_rise: dict[str, float] = field(default_factory=dict)  # of the loss from a site's teacher to its student
    path_bound: dict[str, float] = field(default_factory=dict)  # the paper's bound on it


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Which run this is."""

    experiment: str
    name: str  # of its folder
    method: str  # the line it belongs to in a figure
    label: str  # that line's name for people
    group: str  # the setting it belongs to: share of the data, depth; methods are compared within a group
    seed: int
    config: dict[str, Any]
    config_hash: str


@dataclass(frozen=True, kw_only=True)
class TrainInfo:
    """What happened."""

    score: str  # the name of the score that counts, higher is better
    total_steps: int
    steps_per_epoch: int
    sites: list[str]  # in the order of depth
    teacher: dict[str, float]  # the untouched model's scores, on the examples of `final`
    teacher_look: dict[str, float]  # and on the examples of the points
    points: list[Point]  # the first is the plain swap, before any training
    final: dict[str, float]  # the students alone, on all examples held out
    seconds: float  # of training, looks left out
    flops: float
    step_flops: dict[str, float]  # of one step: students alone, the dearest step of the plan, a full teacher pass
    peak_memory: int  # bytes: of the GPU, or of the process
    skipped_steps: int = 0
    cost: dict[str, Any] = field(default_factory=dict)  # of the plan by phase (segue.cost), for one micro-batch


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run."""

    run_info: RunInfo
    train_info: TrainInfo
    meta_info: dict[str, Any]  # versions, hardware, commit, when

    @property
    def final(self) -> float:
        """The score that counts of the students alone, at the end; NaN if it was not finite."""
        score: float | None = self.train_info.final[self.train_info.score]
        return math.nan if score is None else score


def write(result: Result, folder: Path) -> Path:
    """Write the result of a run into its folder."""
    return write_json({"format": FORMAT, **asdict(result)}, folder / FILE)


def write_json(data: Any, path: Path) -> Path:
    """Write plain data as JSON, atomically."""
    return write_file(json.dumps(_finite(data), indent=1) + "\n", path)


def write_file(content: str | bytes, path: Path) -> Path:
    """Write a file atomically: a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(draft, path)
    return path


def read(path: Path) -> Result:
    """Read one result file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ResultError(
                f"the result {path} was to be read.",
                f"It has format {data['format']!r}, this version of Segue reads {FORMAT}.",
                "read it with the version that wrote it.",
            )
        train = dict(data["train_info"])
        train["points"] = [Point(**_known(Point, point)) for point in train["points"]]
        return Result(
            run_info=RunInfo(**_known(RunInfo, data["run_info"])),
            train_info=TrainInfo(**_known(TrainInfo, train)),
            meta_info=data["meta_info"],
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ResultError):
            raise
        raise ResultError(
            f"the result {path} was to be read.",
            f"It is not a whole result of a run ({type(error).__name__}: {error}).",
            "delete it and run the experiment again; finished runs are skipped.",
        ) from None


def read_all(folder: Path) -> list[Result]:
    """Read every finished run below a folder, in the order of their names."""
    if not folder.is_dir():
        raise ResultError(
            f"the runs in {folder} were to be read.", "There is no such folder.", "give the folder that `segue grid` wrote to."
        )
    results = [read(path) for path in sorted(folder.glob(f"**/{FILE}"))]
    if not results:
        raise ResultError(
            f"the runs in {folder} were to be read.",
            f"No finished run lies there ({FILE} in a folder of its own).",
            "run `segue grid` first.",
        )
    return results


def meta_info_of(begun: datetime, processes: int) -> dict[str, Any]:
    """Say when, where and with which versions something was measured."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "versions": {"segue": segue.__version__, "python": platform.python_version(), **versions},
        "hardware": {
            "machine": platform.machine(),
            "system": platform.system(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "processes": processes,
        },
        "commit": commit(),
        "begun": begun.isoformat(timespec="seconds"),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """Return the commit of the checkout this code lies in, with '+' if files were changed; None outside of one."""
    place = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"], cwd=place, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def _finite(data: Any) -> Any:
    """Write what is inf or NaN as null: JSON knows neither."""
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _known(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in data.items() if name in names}

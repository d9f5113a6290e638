"""Records: one JSON file per finished run, and the reading of many.

runs/small/                          an experiment
    dcr_dfg-100%-seed0/              a run
        config.json                  the configuration
        metrics.jsonl                one line per evaluation
        begun.json, checkpoints/     while the run lasts; the first has what is known of the result
        result.json                  when it is finished: run_info, train_info, meta_info
experiments/small/results/
    results.jsonl                    all runs of an experiment, packed for the repository
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import segue
from segue.border import checked
from segue.core import files
from segue.errors import ResultError
from segue.reporting import packed

FORMAT = 1
FILE, BEGUN = "result.json", "begun.json"
RENAMED = {"teacher_look": "teacher_eval"}  # keys of version 0.1.0
PACKAGES = ("torch", "accelerate", "timm", "transformers", "torchvision", "numpy")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One evaluation during a handover; what a run does not measure stays empty."""

    step: int
    epoch: float
    seconds: float  # of training so far, without evaluations
    flops: float  # of training so far
    alpha: float  # mean over the sites
    alphas: dict[str, float] = field(default_factory=dict)  # by site
    loss: float | None = None  # of training, mean since the previous evaluation, guidance included
    losses: dict[str, float] = field(default_factory=dict)  # its parts: of the task, of guidance, of distillation
    lr: float | None = None  # of the next step, of new parameters
    weights: dict[str, float] = field(default_factory=dict)  # of each student, as gates drew them, mean likewise
    rises: dict[str, int] = field(default_factory=dict)  # in how many steps since then a site's alpha has risen
    blend: dict[str, float] = field(default_factory=dict)  # scores of the model as it trains, teachers included, by name
    students: dict[str, float] = field(default_factory=dict)  # scores of the students alone
    ema: dict[str, float] = field(default_factory=dict)  # and of their averaged weights
    cosine: dict[str, float] = field(default_factory=dict)  # interface cosine by site, on the students' own activations
    relative_error: dict[str, float] = field(default_factory=dict)  # by site, likewise
    gradient_norm: dict[str, float] = field(
        default_factory=dict
    )  # of each student, mean since the previous evaluation, before clipping
    drift_blend: dict[str, float] = field(default_factory=dict)  # relative squared distance after the block of each site
    drift_students: dict[str, float] = field(default_factory=dict)  # from the original model's residual stream
    gate_variance: dict[str, float] = field(default_factory=dict)  # of each student's gradient, caused by the gates
    gate_variance_error: dict[str, float] = field(default_factory=dict)  # its standard error; 0 where it is exact
    data_variance: dict[str, float] = field(default_factory=dict)  # of each student's gradient, over minibatches
    predicted_variance: dict[str, float] = field(default_factory=dict)  # the paper's formula for `gate_variance`
    curvature_bias: dict[str, float] = field(default_factory=dict)  # of the loss, by mixing at a site at random
    curvature_bound: dict[str, float] = field(default_factory=dict)  # the paper's bound on it
    path_rise: dict[str, float] = field(default_factory=dict)  # of the loss from a site's teacher to its student
    path_bound: dict[str, float] = field(default_factory=dict)  # the paper's bound on it
    events: list[dict[str, Any]] = field(default_factory=list)  # what the guard has undone since the previous evaluation


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The identity of a run."""

    experiment: str
    name: str  # of the run's folder
    method: str  # the line it belongs to in a figure
    label: str  # that line's name in legends
    group: str  # its setting, such as the data fraction or the depth; methods are compared within a group
    seed: int
    config: dict[str, Any]
    config_hash: str
    reference: str | None = None  # the method that its experiment compares the others with, named beforehand
    choice: dict[str, Any] | None = None  # how its settings were chosen (segue tune); None: by hand


@dataclass(frozen=True, kw_only=True)
class TrainInfo:
    """What a run measured."""

    score: str  # the name of the main score, higher is better
    total_steps: int
    steps_per_epoch: int
    sites: list[str]  # in the order of depth
    teacher: dict[str, float]  # the original model's scores, on the examples of `final`
    teacher_eval: dict[str, float]  # and on the examples of the points
    points: list[Point]  # the first is before any training
    final: dict[str, float]  # the students alone, on all held-out examples
    seconds: float  # of training, without evaluations
    flops: float
    step_flops: dict[str, float]  # of one step: students alone, the most expensive step of the plan, a full teacher pass
    peak_memory: int  # bytes: of the GPU, or of the process
    skipped_steps: int = 0
    stopped_at: int | None = None  # the step of early stopping
    best_step: int | None = None  # and of the best score until then
    cost: dict[str, Any] = field(default_factory=dict)  # of the plan by phase (segue.cost), for one micro-batch


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run."""

    run_info: RunInfo
    train_info: TrainInfo
    meta_info: dict[str, Any]  # versions, hardware, commit, when

    @property
    def final(self) -> float:
        """The main score of the students alone at the end; NaN if it is not finite."""
        score: float | None = self.train_info.final[self.train_info.score]
        return math.nan if score is None else score


def write(result: Result, folder: Path) -> Path:
    """Write the result of a run into its folder."""
    return write_json({"format": FORMAT, **asdict(result)}, folder / FILE)


def write_begun(result: Result, folder: Path) -> Path:
    """Write what is known of a result when its run begins."""
    return write_json({"format": FORMAT, **asdict(result)}, folder / BEGUN)


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


def read_json(path: Path, *names: str) -> dict[str, Any]:
    """Read a JSON file of Segue's own that has these names; a damaged one is refused."""
    try:
        data = json.loads(files.content(path))
        missing = [name for name in names if not isinstance(data, dict) or name not in data]
        if isinstance(data, dict) and not missing:
            return data
        reason = f"it has no {missing[0]!r}" if missing else "it is not an object"
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise ResultError(
        f"{path} cannot be read.", f"It is damaged ({reason}).", "bring it back from a copy, or start again in another folder."
    )


@contextmanager
def removed_on_failure(folder: Path, *names: str) -> Iterator[None]:
    """Remove files that a block makes in a locked folder, if it fails before there is a checkpoint."""
    new = [folder / name for name in names if not (folder / name).exists()]
    try:
        yield
    except Exception:
        if not any(folder.glob("checkpoints/[!.]*")):  # its lock is none
            for place in new:
                shutil.rmtree(place, ignore_errors=True) if place.is_dir() else place.unlink(missing_ok=True)
        raise


def read(path: Path) -> Result:
    """Read one result file."""
    with _complete(path):
        return _parse(json.loads(files.content(path)), path)


def read_begun(path: Path) -> Result:
    """Read a run that is under way from its begun.json and metrics.jsonl; its final score is that of the last evaluation."""
    with _complete(path):
        result = _parse(json.loads(files.content(path)), path)
        points = evaluations(path.with_name("metrics.jsonl"))
    if not points:
        return result
    end = points[-1]
    train = replace(result.train_info, points=points, final=end.students, seconds=end.seconds, flops=end.flops)
    return replace(result, train_info=train)


def evaluations(path: Path) -> list[Point]:
    """Read the evaluations of a metrics.jsonl; a line that is written just now, or that a kill has cut, is left out."""
    points = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError, TypeError):
            points.append(Point(**{"flops": 0.0} | _known(Point, json.loads(line))))
    return points


def pack(results: list[Result], folder: Path) -> Path:
    """Write many results as one compact text file, which `read_all` reads like the runs themselves."""
    data = [_finite({"format": FORMAT, **asdict(result)}) for result in results]
    return write_file(packed.pack(data), folder / packed.FILE)


def read_packed(path: Path) -> list[Result]:
    """Read the results of a packed file."""
    with _complete(path):
        return [_parse(data, path) for data in packed.unpack(files.content(path).decode())]


@checked
def read_all(folder: Path) -> list[Result]:
    """Read every finished run below a folder, also the packed ones, in the order of their names."""
    if not folder.is_dir():
        raise ResultError(
            f"{folder} is not a folder of runs.", "There is no such folder.", "name the folder that `segue grid` writes to."
        )
    results = [read(path) for path in sorted(folder.glob(f"**/{FILE}"))]
    results += [result for path in sorted(folder.glob(f"**/{packed.FILE}")) for result in read_packed(path)]
    if not results:
        raise ResultError(
            f"{folder} has no finished run.",
            f"A finished run is a folder with a {FILE}; packed runs are in {packed.FILE}.",
            "run `segue grid` first.",
        )
    return results


def _parse(data: dict[str, Any], path: Path) -> Result:
    if data["format"] != FORMAT:
        raise ResultError(
            f"the result {path} has a format that this version does not read.",
            f"Its format is {data['format']!r}, this version of Segue reads {FORMAT}.",
            "read it with the version that wrote it.",
        )
    train = dict(data["train_info"])
    train["points"] = [Point(**_known(Point, point)) for point in train["points"]]
    return Result(
        run_info=RunInfo(**_known(RunInfo, data["run_info"])),
        train_info=TrainInfo(**_known(TrainInfo, train)),
        meta_info=data["meta_info"],
    )


@contextmanager
def _complete(path: Path) -> Iterator[None]:
    """Refuse a file that cannot be read."""
    try:
        yield
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, ResultError):
            raise
        raise ResultError(
            f"{path} is not the complete result of a run.",
            f"Reading it ends with {type(error).__name__}: {error}.",
            "delete it and run the experiment again; finished runs are skipped.",
        ) from None


def meta_info_of(begun: datetime, processes: int) -> dict[str, Any]:
    """Return when, where and with which versions something was measured."""
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
        "command": command(),
        "begun": begun.isoformat(timespec="seconds"),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def command() -> str:
    """Return the command of this process, or of the grid that has started it, without the folder of its program."""
    place, *arguments = sys.argv or [""]
    program = "segue" if Path(place).name == "__main__.py" else Path(place).name
    return os.environ.get("SEGUE_COMMAND") or shlex.join([program, *arguments])


def commit() -> str | None:
    """Return the commit of the checkout that has this code, with '+' if files are changed; None outside of a checkout."""
    place = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"], cwd=place, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def _finite(data: Any) -> Any:
    """Replace inf and NaN, which JSON lacks, by None."""
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _known(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    renamed = {RENAMED.get(name, name): value for name, value in data.items()}
    return {name: value for name, value in renamed.items() if name in names}

"""Trainings for the tests of fit(), and processes to run, stop, kill and resume them in."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401 - loaded before the processes of the tests are forked
import torch
import torch._dynamo  # an optimizer's first step loads it
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import segue
from segue.checkpoint import folders as checkpoint_files
from segue.core.tensor_files import fingerprint
from segue.training.evaluation import Classification
from segue.training.fit import Fit
from tests.helpers.tiny import SITES, Net, batch, same_state

TOTAL = 9
VALIDATION = [batch(50, size=5), batch(51, size=3)]
METHODS = segue.methods


class CountedBatches:
    """Batches that depend on their place alone, without shuffling."""

    def __init__(self, count: int = 6, size: int = 4) -> None:
        self.batches = [batch(index, size=size) for index in range(count)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*batch(0, size=24)), batch_size=4, shuffle=True)


def noisy() -> DataLoader[Any]:
    """Shuffled batches with noise from torch's global generator, as augmentations have it."""

    def made(examples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = (torch.stack(parts) for parts in zip(*examples, strict=True))
        return x + 0.1 * torch.randn_like(x), y

    return DataLoader(TensorDataset(*batch(0, size=24)), batch_size=4, shuffle=True, collate_fn=made)


def endless() -> Any:
    return (batch(index, size=4) for index in range(1000))


def _case(
    plan: segue.Plan | None, batches: Callable[[], Any] = shuffled, dropout: float = 0.0, **recipe: Any
) -> dict[str, Any]:
    return {
        "plan": plan,
        "batches": batches,
        "dropout": dropout,
        "recipe": segue.Recipe(**{"steps": TOTAL, "lr": 1e-2, "warmup": 0.2, "seed": 4, **recipe}),
    }


LONG = segue.schedules.Linear(until=0.8)  # the handover lasts longer than any stop
CASES: dict[str, dict[str, Any]] = {
    "dcr_dfg": _case(METHODS.dcr_dfg(sites=SITES, schedule=LONG), dropout=0.2),
    "theseus": _case(METHODS.theseus(sites=SITES, schedule=LONG), noisy),
    "theseus_gumbel": _case(METHODS.theseus_gumbel(sites=SITES, schedule=LONG), dropout=0.2),
    "distillation": _case(METHODS.distillation(sites=SITES)),
    "everything trains": _case(METHODS.gumbel_dfg(sites=SITES, train="all", backbone="train", schedule=LONG), dropout=0.2),
    "released": _case(METHODS.dcr_dfg(sites=SITES, release=True)),
    "accumulated": _case(METHODS.dcr(sites=SITES, schedule=LONG), accumulate=2, dropout=0.2),
    "bf16": _case(METHODS.dcr_dfg(sites=SITES, schedule=LONG), precision="bf16"),
    "a generator": _case(METHODS.dcr(sites=SITES, schedule=LONG), endless),
    "a plain model": _case(None, dropout=0.2),
    "a plain model, accumulated": _case(None, noisy, accumulate=2),
}


class Stop(Classification):
    """A loss that sends a signal, or raises, at a certain step."""

    def __init__(self, how: str, step: int, accumulate: int = 1) -> None:
        super().__init__(label_smoothing=0.1)
        self.how = how
        self.left = step * accumulate + 1

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            if self.how == "error":
                raise RuntimeError("the power failed")
            os.kill(os.getpid(), getattr(signal, self.how))
        return super().__call__(model, batch)


def train(name: str, folder: Path | str, *, loss: Classification | None = None, **more: Any) -> Fit:
    """Train a case, or go on with it, and write down the fingerprint of the whole model."""
    case = CASES[name]
    settings = {"looks": (2, 5, 6), "checkpoint_every": 3, "resume": True, "progress": None, **more}
    fitted = segue.fit(
        Net(dropout=case["dropout"]),
        case["plan"],
        case["batches"](),
        loss or Classification(label_smoothing=0.1),
        recipe=case["recipe"],
        validation=VALIDATION,
        folder=folder,
        **settings,
    )
    (Path(folder) / "model.txt").write_text(fingerprint(fitted.model.state_dict()))
    return fitted


def train_all(places: dict[str, str]) -> None:
    """Train or resume many cases in one process."""
    torch.manual_seed(123)  # whatever was drawn before must not matter
    torch.rand(17)
    for folder, name in places.items():
        train(name, folder)


def train_and_die_writing(name: str, folder: str, number: int) -> None:
    """Train a case until the so-and-so-many-th move of writing checkpoints, and die there by kill -9."""
    left = itertools.count(number, -1)

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def move(*args: Any, **kwargs: Any) -> Any:
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return move

    checkpoint_files.tensor_files.write = deadly(checkpoint_files.tensor_files.write)
    checkpoint_files._flush = deadly(checkpoint_files._flush)
    checkpoint_files.os.replace = deadly(checkpoint_files.os.replace)
    checkpoint_files.shutil.rmtree = deadly(checkpoint_files.shutil.rmtree)
    train(name, folder)


def points(folder: Path | str) -> list[dict[str, Any]]:
    """Return what the looks saw, but for the time it took."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "seconds"} for line in lines]


def left_behind(folder: Path | str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return all that a finished training wrote but times: points, the last checkpoint's state and its tensors."""
    _, state, tensors = checkpoint_files.read(Path(folder) / "checkpoints")
    rest = [pair for pair in state["lr_scheduler"]["dict"] if pair[0] != "seconds"]
    assert len(rest) == len(state["lr_scheduler"]["dict"]) - 1
    model = (Path(folder) / "model.txt").read_text()
    return (points(folder), {**state, "lr_scheduler": rest}, model), tensors


def assert_alike(folder: Path | str, other: Path | str) -> None:
    """Compare two finished trainings bit for bit: weights, optimizer, random states, points."""
    (text, tensors), (other_text, other_tensors) = left_behind(folder), left_behind(other)
    assert text == other_text
    assert same_state(dict(sorted(tensors.items())), dict(sorted(other_tensors.items())))


def context() -> Any:
    """Return the start method of such processes, with their common origin running."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([__name__])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), before]))  # to find it
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return made


class Fresh:
    """A process forked from one that has loaded everything and computed nothing, so that it begins at once."""

    def __init__(self, target: Callable[..., None], *args: Any, words: Path) -> None:
        self.words = words
        self.process: BaseProcess = context().Process(target=_enter, args=(target, args, str(words)))
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def end(self) -> int:
        """Wait for the process and return its exit code, negative for the signal that killed it."""
        self.process.join(timeout=600)  # only for what hangs
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"the process did not end: {self.said}")
        return self.process.exitcode

    @property
    def said(self) -> str:
        return self.words.read_text() if self.words.exists() else ""

    def succeed(self) -> None:
        assert self.end() == 0, self.said


def _enter(target: Callable[..., None], args: tuple[Any, ...], words: str) -> None:
    torch.set_num_threads(1)
    try:
        target(*args)
    except BaseException:
        Path(words).write_text(traceback.format_exc())
        raise

"""Trainings for the tests of fit(): run, stopped, killed and resumed."""

from __future__ import annotations

import copy
import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import segue
from segue.checkpoint import folders as checkpoint_files
from segue.core.tensor_files import fingerprint
from segue.phases import Phase
from segue.training.fit import Fit
from segue.training.tasks import Classification
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


def fit(model: Any = None, plan: Any = None, batches: Any = None, loss: Any = None, **settings: Any) -> Fit:
    """Call segue.fit with small defaults."""
    recipe = settings.pop("recipe", None) or segue.Recipe(steps=settings.pop("steps", 6), lr=1e-2)
    return segue.fit(
        Net() if model is None else model,
        plan,
        CountedBatches() if batches is None else batches,
        loss or Classification(),
        recipe=recipe,
        **{"progress": None, **settings},
    )


def half_copied(teacher: nn.Module, site: Any) -> nn.Module:
    """Make a student whose projection is copied and whose other weights are new."""
    student = copy.deepcopy(teacher)
    student.qkv.reset_parameters()  # type: ignore[union-attr, operator]
    return student


LONG = segue.schedules.Linear(until=0.8)  # the handover lasts longer than any stop
PHASES = (
    segue.phases.Phase(name="local fit", length=0.4, local=True, lr=2e-2, warmup=0.5, weight_decay=0.0),
    segue.phases.Phase(name="handover", length=0.4, schedule=segue.schedules.Linear(), distill=0.5),
    segue.phases.Phase(name="after", lr=segue.phases.Rates(new=5e-3, copied=1e-3), guidance=0.05, task=0.5),
)
CASES: dict[str, dict[str, Any]] = {
    "phases": _case(METHODS.dcr_dfg(sites=SITES, distill=segue.losses.LogitDistillation(), phases=PHASES), dropout=0.2),
    "dcr_dfg": _case(METHODS.dcr_dfg(sites=SITES, schedule=LONG), dropout=0.2),
    "theseus": _case(METHODS.theseus(sites=SITES, schedule=LONG), noisy),
    "theseus_gumbel": _case(METHODS.theseus_gumbel(sites=SITES, schedule=LONG), dropout=0.2),
    "distillation": _case(METHODS.distillation(sites=SITES)),
    "everything trains": _case(METHODS.gumbel_dfg(sites=SITES, train="all", backbone="train", schedule=LONG), dropout=0.2),
    "adaptive": _case(
        METHODS.dcr_dfg(sites=SITES, schedule=segue.schedules.Adaptive(every=2, budget=0.8, until=0.9)), dropout=0.2
    ),
    "released": _case(METHODS.dcr_dfg(sites=SITES, release=True)),
    "accumulated": _case(METHODS.dcr(sites=SITES, schedule=LONG), accumulate=2, dropout=0.2),
    "bf16": _case(METHODS.dcr_dfg(sites=SITES, schedule=LONG), precision="bf16"),
    "a generator": _case(METHODS.dcr(sites=SITES, schedule=LONG), endless),
    "local fit": _case(
        segue.Plan(
            sites=SITES,
            guidance=segue.losses.FeatureGuidance(),
            phases=(
                Phase(name="local", length=0.8, local=True, split=2, reuse=2, lr=4e-2, weight_decay=0.0, tolerance=0.5),
                Phase(name="students alone"),
            ),
        ),
        dropout=0.2,
    ),
    "transfer": _case(
        METHODS.transfer(sites=SITES, student=half_copied, first="new", hold=0.5, split=1), noisy, dropout=0.2, accumulate=2
    ),
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
    """Train a case, or resume it, and write the fingerprint of the model."""
    case = CASES[name]
    settings = {"evaluations": (2, 5, 6), "checkpoint_every": 3, "resume": True, "progress": None, **more}
    model = settings.pop("model", None)
    fitted = segue.fit(
        Net(dropout=case["dropout"]) if model is None else model,
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
    """Train a case until a certain file operation of writing checkpoints, and die there by kill -9."""
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


def metrics(folder: Path | str) -> list[dict[str, Any]]:
    """Return the logged metrics of every evaluation, except times."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "seconds"} for line in lines]


def left_behind(folder: Path | str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return all that a finished training wrote except times: metrics, the last checkpoint's state and its tensors."""
    _, state, tensors = checkpoint_files.read(Path(folder) / "checkpoints")
    rest = [pair for pair in state["lr_scheduler"]["dict"] if pair[0] != "seconds"]
    assert len(rest) == len(state["lr_scheduler"]["dict"]) - 1
    model = (Path(folder) / "model.txt").read_text()
    return (metrics(folder), {**state, "lr_scheduler": rest}, model), tensors


def assert_alike(folder: Path | str, other: Path | str) -> None:
    """Compare two finished trainings bit for bit: weights, optimizer, random states, metrics."""
    (text, tensors), (other_text, other_tensors) = left_behind(folder), left_behind(other)
    assert text == other_text
    assert same_state(dict(sorted(tensors.items())), dict(sorted(other_tensors.items())))

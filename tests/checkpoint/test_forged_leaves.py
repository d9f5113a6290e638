"""Every value of a checkpoint, forged: it is refused and nothing changes, or it makes no difference to what is restored."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch

import segue
from segue.checkpoint import folders, optimizers
from segue.checkpoint import state as checkpoint
from segue.checkpoint.optimizers import KEPT
from segue.core import randomness
from segue.errors import CheckpointError
from tests.checkpoint.test_restoring import plain
from tests.helpers.tiny import SITES, Net, train

FORGED = [math.nan, math.inf, 1.5, -1, 10**39, "x", None, [], {}, True]
PLAN = segue.Plan(sites=SITES, gate=segue.gates.Bernoulli())
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "RMSprop": lambda parameters, lr: torch.optim.RMSprop(parameters, lr=lr, momentum=0.9, centered=True),
}


class Training:
    """All that a checkpoint is restored into: a handover of one site, its optimizer and torch's scheduler."""

    def __init__(self, name: str, steps: int) -> None:
        randomness.seed_all(7)
        self.handover = segue.replace_(Net(depth=1).train(), PLAN, total_steps=10)
        self.optimizer = OPTIMIZERS[name](self.handover.parameters(), lr=0.5)
        parts = [
            torch.optim.lr_scheduler.LinearLR(self.optimizer),
            torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10),
        ]
        self.scheduler: Any = torch.optim.lr_scheduler.SequentialLR(self.optimizer, parts, milestones=[2])
        for _ in range(steps):
            train(self.handover, self.optimizer, 1)
            self.scheduler.step()

    @property
    def parts(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "lr_scheduler": self.scheduler}

    def everything(self) -> Any:
        states = [part.state_dict() for part in (self.optimizer, self.scheduler, self.handover.model)]
        drawn = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().numpy().tobytes()
        return plain([*states, self.handover.describe(), self.handover.alphas]), drawn


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Find every value of a tree, leaves and what holds them; of a long list of numbers, and of many parameters, two."""
    inside = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    if len(inside) > 100 or path[-4:] == ("dict", 0, 1, "dict"):
        inside = [inside[0], inside[-1]]
    for key, value in inside:
        yield (*path, key), value
        yield from places(value, (*path, key))


@contextmanager
def forged(state: dict[str, Any], path: tuple[Any, ...], value: Any) -> Iterator[None]:
    *way, last = path
    parent: Any = state
    for key in way:
        parent = parent[key]
    was, parent[last] = parent[last], value
    yield
    parent[last] = was


def possible(path: tuple[Any, ...], value: Any, known: dict[str, Any]) -> bool:
    """Return whether the run itself could have had a value: then nobody can tell that it is forged."""
    named = known
    names = []
    for key in path:
        named = named[key]
        if isinstance(named, list) and len(named) == 2 and isinstance(named[0], str):
            names.append(named[0])
    rate = names[-1:] == ["lr"] or names[-1:] == ["initial_lr"] or "_last_lr" in names
    return value == 1.5 and (rate or (names[-1:] == ["python"] and path[-1] == 2))  # or a normal number, kept by random.gauss


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_forged_value_is_refused_or_makes_no_difference(name, tmp_path):
    def checkpoint_after(steps: int) -> folders.Checkpoint:
        training = Training(name, steps)
        segue.save(training.handover, tmp_path, **training.parts)
        return folders.read(tmp_path)

    def load(found: folders.Checkpoint) -> None:
        checkpoint.restore_handover_(target.handover, found._replace(tensors=dict(found.tensors)), **target.parts)

    saved, earlier, target, wrong = checkpoint_after(3), checkpoint_after(1), Training(name, 1), []
    load(saved)
    expected = target.everything()
    load(earlier)
    before, state = target.everything(), saved.state
    assert before != expected
    parts = ["optimizer", "lr_scheduler", "random", "segue"] if name == "AdamW" else ["optimizer"]
    found = [(path, value) for part in parts for path, value in places(state[part], (part,)) if "plan" not in path]
    for path, was in found:
        for value in FORGED[5:9] if isinstance(was, list | dict | str) else FORGED:
            right, lines = expected, 3
            with forged(state, path, value):
                try:
                    load(saved)
                except CheckpointError as error:
                    right, lines = before, len(str(error).splitlines())
            if lines != 3 or (target.everything() != right and not possible(path, value, state)):
                wrong.append(("refused" if right is before else "accepted", path, value))
            if right is expected:
                load(earlier)
    assert wrong == []


@pytest.mark.parametrize("name", KEPT)
def test_what_torchs_optimizers_keep_is_known(name):
    """The table names what they keep; a checkpoint with anything else is refused."""
    for options in ({}, {"momentum": 0.9}, {"centered": True}, {"amsgrad": True}):
        parameter = torch.nn.Parameter(torch.ones(2, 2))
        try:
            optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **options)
        except (TypeError, AttributeError):  # it has no such option, or this torch no such optimizer
            continue
        parameter.sum().backward()
        optimizer.step()
        (group,) = optimizer.param_groups
        kept = optimizer.state.get(parameter, {})
        assert set(kept) == optimizers._expected(optimizer, group)
        assert all(kept[key].shape == (() if key in optimizers.NUMBERS else (2, 2)) for key in kept)
        assert set(kept) <= {*optimizers.NUMBERS, *optimizers.SHAPED}


class Counting(torch.optim.SGD):
    """An optimizer of one's own, which keeps plain numbers."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                kept["step"] = kept.get("step", 0) + 1
                kept["scale"] = 0.5
        return super().step(closure)


@pytest.mark.parametrize(
    ("name", "value"),
    [("step", -1), ("step", 1.5), ("step", 10**39), ("step", "x"), ("step", math.nan), ("scale", math.nan), ("scale", True)],
)
def test_an_optimizer_of_ones_own_is_compared_with_itself(name, value, tmp_path):
    def started() -> tuple[segue.Handover, torch.optim.Optimizer]:
        handover = segue.replace_(Net(depth=1).train(), PLAN, total_steps=10)
        return handover, Counting(handover.parameters(), lr=0.1, momentum=0.9)

    handover, optimizer = started()
    train(handover, optimizer, 2)
    segue.save(handover, tmp_path, optimizer=optimizer)
    saved = folders.read(tmp_path)
    again, fresh = started()
    index = next(i for i, (key, _) in enumerate(saved.state["optimizer"]["dict"][0][1]["dict"][1][1]["dict"]) if key == name)
    path = ("optimizer", "dict", 0, 1, "dict", 1, 1, "dict", index, 1)
    with forged(saved.state, path, value), pytest.raises(CheckpointError, match=rf"{name}|steps"):
        checkpoint.restore_handover_(again, saved, optimizer=fresh)
    checkpoint.restore_handover_(again, saved, optimizer=fresh)
    assert plain(fresh.state_dict()) == plain(optimizer.state_dict())

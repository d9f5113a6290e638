"""Inf and NaN in many places: the error names the place, or the step is left out bit for bit; no checkpoint holds them."""

from __future__ import annotations

import dataclasses
import math
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import segue
from segue.checkpoint import folders
from segue.core.blending import padding_mask
from segue.errors import SegueError
from segue.training.tasks import Classification
from tests.helpers.tiny import SITES, Attention, Net, batch, same_state
from tests.torture.campaign import (
    ACCEPTED,
    CHANGED,
    FOREIGN,
    HUNG,
    LOST,
    SILENT,
    Attempt,
    Bench,
    Outcome,
    is_three_lines,
    one_line,
)
from tests.torture.watch import HungError, within
from tests.torture.wrong_calls import fingerprint

TOTAL = 6  # steps
SECONDS = 60
SITE = "blocks.1.attn"
NEVER = -2
# what the error must say, by the place
PLACES: dict[str, tuple[str, ...]] = {
    "input": ("batch",),
    "loss": ("loss",),
    "backbone": ("blocks.1.mlp",),
    "teacher": (SITE, "teacher"),
    "student": (SITE, "student"),
    "gradient of a student": ("gradient", SITE),
    "gradient of the loss": ("gradient",),
    "weight": ("weight", "blocks.1.mlp.0.weight"),
    "buffer": ("buffer", "blocks.1.mlp"),
    "moments": ("weight", "is inf or NaN after"),
    "gate": ("gate",),
    "schedule": ("schedule",),
}
WITHOUT_PLAN = ("input", "loss", "backbone", "gradient of the loss", "weight", "moments")
CANNOT_SKIP = ("weight", "buffer", "moments", "gate", "schedule")  # a later step would be as bad


class Clock:
    """Batches that say which of them is read, so that a fault repeats itself with its batch."""

    now = -1

    def __init__(self, count: int) -> None:
        self.batches = [batch(index, size=4) for index in range(count)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for Clock.now, one in enumerate(self.batches):
            yield one


@dataclass(frozen=True)
class Fault:
    """A value that appears somewhere while a certain batch is used."""

    place: str
    value: float
    batch: int

    def in_(self, x: torch.Tensor) -> torch.Tensor:
        """Put the value into one element."""
        if Clock.now != self.batch:
            return x
        spoilt = x.contiguous().clone()
        spoilt.view(-1)[0] = self.value
        return spoilt


class BadGradient(torch.autograd.Function):
    """The identity, with a gradient that is spoilt."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: Fault) -> torch.Tensor:
        ctx.fault = fault
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.fault.in_(gradients[0]), None


class Norm(nn.BatchNorm1d):
    """Batch norm over tokens: its statistics move with every forward of a training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Spoilt(nn.Module):
    """A module whose output, or the gradient that it passes back, is spoilt while a certain batch is used."""

    def __init__(self, inner: nn.Module, fault: Fault, *, backward: bool = False) -> None:
        super().__init__()
        self.inner, self.fault, self.backward_too = inner, fault, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return BadGradient.apply(y, self.fault) if self.backward_too else self.fault.in_(y)


class Loss(Classification):
    """Cross entropy that is spoilt while a certain batch is used."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def __call__(self, model: nn.Module, examples: Any) -> torch.Tensor:
        if self.fault.place == "gradient of the loss":
            return super().__call__(lambda x: BadGradient.apply(model(x), self.fault), examples)
        found = super().__call__(model, examples)
        return found * self.fault.in_(torch.ones(())) if self.fault.place == "loss" else found


def student_of(fault: Fault) -> Any:
    def student(teacher: nn.Module, site: segue.Site) -> nn.Module:
        torch.manual_seed(site.index)
        made: nn.Module = nn.Sequential(Attention(8), Norm(8))
        if site.name == SITE and fault.place in ("student", "gradient of a student"):
            return Spoilt(made, fault, backward=fault.place != "student")
        return made

    return student


def parts_of(fault: Fault, with_plan: bool, count: int) -> tuple[Net, segue.Plan | None, Clock, Loss]:
    """Build a training with a fault."""
    model, clock = Net(), Clock(count)
    if fault.place == "input" and fault.batch != NEVER:
        clock.batches[fault.batch][0].view(-1)[0] = fault.value
    if fault.place == "backbone":
        model.blocks[1].mlp = Spoilt(model.blocks[1].mlp, fault)
    if fault.place == "teacher":
        model.blocks[1].attn = Spoilt(model.blocks[1].attn, fault)
    if fault.place == "weight":
        model.blocks[1].mlp[0].weight.data.view(-1)[0] = fault.value
    if fault.place == "buffer":
        model.blocks[1].mlp[1] = Norm(8)
        model.blocks[1].mlp[1].running_mean[0] = fault.value
    gate: Any = (lambda alpha, noise: fault.value) if fault.place == "gate" else segue.gates.Blend()
    schedule: Any = segue.schedules.Linear(start=0.9, until=0.95)
    if fault.place == "schedule":
        schedule = lambda progress, site: fault.value if progress * count >= fault.batch else 0.5  # noqa: E731
    guidance = segue.losses.FeatureGuidance()
    plan = segue.Plan(sites=SITES, student=student_of(fault), gate=gate, schedule=schedule, guidance=guidance)
    return model, plan if with_plan else None, clock, Loss(fault)


def without_the_step(fault: Fault, with_plan: bool, recipe: segue.Recipe) -> dict[str, torch.Tensor]:
    """Train by hand, and leave the step of the fault out."""
    clean = dataclasses.replace(fault, batch=NEVER)
    model, plan, clock, loss_fn = parts_of(clean, with_plan, TOTAL * recipe.accumulate)
    handover = None if plan is None else segue.replace_(model, plan, total_steps=TOTAL)
    model.train()
    named = model.named_parameters() if handover is None else handover.named_parameters()
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    optimizer = recipe.optimizer(trained)
    parameters = [parameter for _, parameter in trained]
    for step in range(TOTAL):
        recipe.set_rate(optimizer, step, TOTAL)
        if step != fault.batch // recipe.accumulate:
            for examples in clock.batches[step * recipe.accumulate :][: recipe.accumulate]:
                loss = loss_fn(model, examples)
                loss = loss if handover is None else loss + handover.aux_loss(padding_mask(examples))
                (loss * (1.0 / recipe.accumulate)).backward()
            assert recipe.clip is not None
            nn.utils.clip_grads_with_norm_(parameters, recipe.clip, nn.utils.get_total_norm([p.grad for p in parameters]))
            optimizer.step()
            optimizer.zero_grad()
        if handover is not None:
            handover.step()
    return weights(model)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a model has learned, by names that do not depend on a wrapper of the campaign."""
    return {name.replace(".inner.", "."): value.clone() for name, value in model.state_dict().items()}


def finite(tensors: dict[str, torch.Tensor], but: tuple[str, ...] = ()) -> bool:
    return all(bool(torch.isfinite(x).all()) for name, x in tensors.items() if x.is_floating_point() and name not in but)


def attempt(fault: Fault, on_nan: str, with_plan: bool, accumulate: int, place: Path) -> Outcome:
    """Train with a fault, and judge."""
    case = f"{fault.value} in {fault.place}, batch {fault.batch}, on_nan={on_nan}, {'a plan' if with_plan else 'no plan'}"
    case += f", accumulate={accumulate}" if accumulate > 1 else ""
    recipe = segue.Recipe(steps=TOTAL, lr=1e-2, on_nan=on_nan, accumulate=accumulate)
    model, plan, clock, loss_fn = parts_of(fault, with_plan, TOTAL * accumulate)
    before, error, fitted = fingerprint(model), None, None
    settings = {"recipe": recipe, "folder": place / "run", "checkpoint_every": 1, "evaluations": 1, "progress": None}
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: spoil_moments(optimizer, fault))
    try:
        with within(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = segue.fit(model, plan, clock, loss_fn, **settings)
    except HungError:
        return Outcome(case, HUNG, f"more than {SECONDS} s")
    except Exception as caught:
        error = caught
    finally:
        handle.remove()
    if (place / "run" / "checkpoints" / "latest").exists():
        saved = folders.read(place / "run" / "checkpoints").tensors
        broken = [name for name in saved if not finite({name: saved[name]}) and fault.place not in ("weight", "buffer")]
        if broken:
            return Outcome(case, ACCEPTED, f"the last checkpoint is not finite: {broken[0]}")
    if error is not None:
        return judge_error(case, fault, on_nan, error, fingerprint(model) == before)
    if on_nan == "skip" and fault.place in ("weight", "buffer"):  # the user's own, before the training: every step is skipped
        whole = finite(weights(model), but=("blocks.1.mlp.0.weight", "blocks.1.mlp.1.running_mean"))
        return Outcome(case) if fitted.skipped == TOTAL and whole else Outcome(case, ACCEPTED, f"{fitted.skipped} skipped")
    if on_nan == "stop" or fault.place in CANNOT_SKIP:
        return Outcome(case, ACCEPTED, f"it ends as if all were well, {fitted.skipped} steps skipped")
    found, expected = weights(model), without_the_step(fault, with_plan, recipe)
    if not finite(found):
        return Outcome(case, ACCEPTED, "the finished model is not finite")
    if not same_state(found, expected):
        differ = [name for name in expected if not same_state({"": found[name]}, {"": expected[name]})]
        return Outcome(case, LOST, f"{len(differ)} tensors differ from a training without the step: {differ[:2]}")
    return Outcome(case)


def judge_error(case: str, fault: Fault, on_nan: str, error: Exception, unchanged: bool) -> Outcome:
    if not isinstance(error, SegueError):
        return Outcome(case, FOREIGN, one_line(error))
    if not unchanged:
        return Outcome(case, CHANGED, one_line(error))
    if on_nan == "skip" and fault.place not in CANNOT_SKIP:
        return Outcome(case, LOST, f"the step is not skipped: {one_line(error)}")
    missing = [word for word in PLACES[fault.place] if word not in str(error)]
    if missing or not is_three_lines(error):
        return Outcome(case, SILENT, f"it does not say {', '.join(missing) or 'three lines'}: {one_line(error)}")
    return Outcome(case)


def spoil_moments(optimizer: Any, fault: Fault) -> None:
    """Put the value into a moment of an optimizer, just before its step."""
    if fault.place == "moments" and Clock.now == fault.batch:
        states = [state for state in optimizer.state.values() if "exp_avg" in state]
        for state in states[:1]:
            state["exp_avg"].view(-1)[0] = fault.value


def attempts(bench: Bench) -> Iterator[Attempt]:
    for chance in bench.chances():
        yield _attempt(chance)


def _attempt(chance: random.Random) -> Attempt:
    place, value, on_nan = (
        chance.choice(list(PLACES)),
        chance.choice([math.nan, math.inf, -math.inf]),
        chance.choice(["stop", "skip"]),
    )
    accumulate = chance.choice([1, 1, 2])
    with_plan = place not in WITHOUT_PLAN or chance.random() < 0.6
    index = chance.randrange(TOTAL * accumulate)
    if place != "input":  # the last batch of a step: that one is read last, whichever forward is repeated to find the place
        first = 2 if place == "moments" else 1  # they exist after the first step
        index = max(first * accumulate, index + 1) // accumulate * accumulate - 1
    if place == "buffer" and not math.isnan(value):
        value = math.nan
    fault = Fault(place, value, index)
    return Attempt(str(fault), lambda folder: attempt(fault, on_nan, with_plan, accumulate, folder))

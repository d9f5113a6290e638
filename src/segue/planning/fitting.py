"""The local fit of all options: every teacher forward is shared by all sites and candidates, and its features are dropped."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from segue.checkpoint import folders, packing
from segue.core.backbone import evaluating
from segue.core.blending import call_arguments, calling, padding_mask
from segue.core.calibrate import calibrate
from segue.core.local_fit import Features
from segue.diagnostics.counting import flops
from segue.errors import DataError, StudentError
from segue.planning.candidates import Candidates, Option
from segue.planning.journal import Journal
from segue.students.least_squares import LeastSquares
from segue.training.progress import Progress
from segue.training.recipe import Recipe

SAVES = 10  # of the students, in the course of a fit


def fit_recipe(steps: int, lr: float) -> Recipe:
    """Return the recipe of a local fit."""
    return Recipe(steps=steps, lr=lr, weight_decay=0.0, warmup=0.1)


def fit_candidates(
    candidates: Candidates, batches: list[Any], recipe: Recipe, journal: Journal, *, closed_form: bool, shown: Progress
) -> dict[Option, float]:
    """Initialise every student in closed form where it has one, fit it for a few steps, and return the relative errors."""
    total = recipe.total_steps(len(batches))
    optimizers = {name: _optimizer(recipe, candidates.at(name)) for name in candidates.names}
    errors: dict[Option, float] = {}
    done = _resume(candidates, optimizers, errors, journal)
    if done is None:
        if closed_form:
            for name in candidates.names:
                _calibrate(candidates, name, batches)
        done = 0
    for step in range(done, total):
        features = _record(candidates, batches[step % len(batches)])
        for name, optimizer in optimizers.items():
            errors |= {
                (site, name): error for site, error in _update(candidates, name, optimizer, features, recipe, step, total)
            }
        if journal.folder is not None and ((step + 1) % max(1, total // SAVES) == 0 or step + 1 == total):
            _save(candidates, optimizers, errors, journal, step + 1)
        shown(step + 1, "local fit")
    return errors


def step_operations(candidates: Candidates, batch: Any) -> int:
    """Count the operations of one step of the local fit, without taking it."""

    def run() -> None:
        features = _record(candidates, batch)
        for name in candidates.names:
            trained = [p for student in candidates.at(name).values() for p in student.parameters() if p.requires_grad]
            loss = _features_of(candidates, name, features).loss(0, 1, measured=True)
            if trained:
                torch.autograd.grad(loss, trained, allow_unused=True)

    return flops(run)


def _optimizer(recipe: Recipe, students: dict[str, nn.Module]) -> Optimizer | None:
    trained = [(f"{site}.{key}", p) for site, one in students.items() for key, p in one.named_parameters() if p.requires_grad]
    return recipe.optimizer(trained) if trained else None


def _calibrate(candidates: Candidates, name: str, batches: list[Any]) -> None:
    """Fit the last linear map of each student of a candidate, where it has one that its output comes from."""
    for site in candidates.at(name):
        candidates.put((site, name))
    method, fits = LeastSquares(stream="teacher"), []  # as students are fitted afterwards: independent of each other
    for site, student in candidates.at(name).items():
        try:
            method.projection(student, candidates.handover.seams[site].site)
            fits.append(site)
        except StudentError:
            pass  # it starts from its own initialisation
    try:
        if fits:
            calibrate(candidates.handover, batches, method, padding_mask, fits)
    except (StudentError, DataError):
        pass  # something comes after the last linear map, or the tokens are too few; nothing was changed


def _record(candidates: Candidates, batch: Any) -> Features:
    args, kwargs = call_arguments(batch)
    with evaluating(candidates.model), candidates.handover.features(padding_mask(batch)) as features, calling("batch"):
        candidates.model(*args, **kwargs)
    return features


def _update(
    candidates: Candidates, name: str, optimizer: Optimizer | None, features: Features, recipe: Recipe, step: int, total: int
) -> list[tuple[str, float]]:
    """Take one step of a candidate at all of its sites, and return the relative error before it at each."""
    own = _features_of(candidates, name, features)
    if optimizer is None:
        with torch.no_grad():
            own.loss(0, 1, measured=True)
    else:
        recipe.set_rate(optimizer, step, total)
        own.loss(0, 1, measured=True).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return [(site, float(torch.stack(found).mean().sqrt())) for site, found in own.squares.items()]


def _features_of(candidates: Candidates, name: str, features: Features) -> Features:
    """Put the students of a candidate at their sites, and return the features that are theirs."""
    students = candidates.at(name)
    for site in students:
        candidates.put((site, name))
    return dataclasses.replace(features, calls={site: features.calls[site] for site in students}, squares={})


def _save(
    candidates: Candidates, optimizers: dict[str, Optimizer | None], errors: dict[Option, float], journal: Journal, step: int
) -> None:
    assert journal.folder is not None
    bag = packing.TensorBag({})
    held = {
        "students": [packing.tensor_state(student) for student in candidates.students.values()],
        "optimizers": [None if one is None else one.state_dict() for one in optimizers.values()],
        "errors": [errors[option] for option in candidates.options],
    }
    state = {"kind": "plan", "key": journal.key, "segue": {"step": step}, "fit": bag.pack(held, "fit")}
    packing.write(journal.folder / "fit", state, bag.tensors, keep=1)


def _resume(
    candidates: Candidates, optimizers: dict[str, Optimizer | None], errors: dict[Option, float], journal: Journal
) -> int | None:
    """Continue with the students of an earlier process, and return how many steps it has taken; None if there are none."""
    if journal.folder is None or not folders.exist(journal.folder / "fit"):
        return None
    saved = folders.read(journal.folder / "fit")
    if saved.state.get("key") != journal.key:
        return None
    held = packing.TensorBag(saved.tensors).unpack(saved.state["fit"], "fit")
    for student, state in zip(candidates.students.values(), held["students"], strict=True):
        student.load_state_dict(state)
    for optimizer, state in zip(optimizers.values(), held["optimizers"], strict=True):
        if optimizer is not None:
            optimizer.load_state_dict(state)
    errors |= dict(zip(candidates.options, held["errors"], strict=True))
    return int(saved.state["segue"]["step"])

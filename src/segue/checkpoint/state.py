"""What is saved of a handover, a finalized model or a plain training, and how it is restored."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from segue.checkpoint import folders, packing
from segue.checkpoint.packing import TensorBag
from segue.core import randomness, surgery, tensor_files
from segue.core.building import build_students
from segue.core.handover import Handover, replace_
from segue.core.transaction import all_or_nothing
from segue.errors import CheckpointError, SegueWarning
from segue.plan import Plan
from segue.settings import unsaved
from segue.sites import select


def save(
    target: Handover | nn.Module,
    folder: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
    keep: int = 2,
) -> Path:
    """Save a running handover, or a finalized model, and return the folder of this checkpoint.

    A handover is saved without its teachers: students, plan, step and random states, and the part of the backbone that trains.
    A finalized model is saved completely. The `keep` newest checkpoints stay; in a distributed run rank 0 writes.
    """
    state, tensors = _handover_state(target) if isinstance(target, Handover) else _model_state(target)
    bag = TensorBag(tensors)
    state |= _pack(bag, optimizer=optimizer, lr_scheduler=lr_scheduler)
    if isinstance(target, Handover):
        state["random"] = bag.pack(randomness.states_of_every_rank(), "random")
    if missing := unsaved(state["segue"]["plan"]):
        warnings.warn(
            f"the plan's {', '.join(missing)} is your own, so only its name is saved; pass it again to segue.load_(...).",
            SegueWarning,
            stacklevel=2,
        )
    return packing.write(Path(folder), state, bag.tensors, keep)


def load_(
    target: Handover | nn.Module,
    folder: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
    **given: Any,
) -> Any:
    """Resume from a checkpoint, in place.

    In a plain model, rebuild what was saved and return it: the running Handover, or the finalized model. A Handover is set
    to the saved step, with its optimizer and learning-rate scheduler, and returned. `given` supplies the parts of the plan
    that could not be saved (`student=my_factory`).
    """
    folder, state, tensors = folders.read(Path(folder))
    if isinstance(target, Handover):
        _require_kind(state, "handover", folder)
        _restore(target, state, tensors, optimizer, lr_scheduler)
        return target
    surgery.refuse_wrapped(target)
    if state["kind"] == "model":
        stored = {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")}
        return rebuild_(target, state["segue"], stored, given)
    plan = Plan.from_dict(state["segue"]["plan"], **given)
    if optimizer is not None or lr_scheduler is not None:
        raise CheckpointError(
            "an optimizer cannot be loaded together with a plain model.",
            "It cannot hold the students, which this call is about to make.",
            "first handover = segue.load_(model, folder); then build the optimizer from handover.parameters() and call "
            "segue.load_(handover, folder, optimizer=optimizer).",
        )
    teachers = {site.name: surgery.teacher_at(target, site).state_dict() for site in select(target, plan.sites)}
    _check_hashes({name: tensor_files.fingerprint(teacher) for name, teacher in teachers.items()}, state["segue"]["teachers"])
    handover = replace_(target, plan, total_steps=state["segue"]["total_steps"])
    try:
        _restore(handover, state, tensors, None, None)
    except BaseException:
        handover.cancel_()
        raise
    return handover


def save_training(
    model: nn.Module,
    step: int,
    folder: str | os.PathLike[str],
    *,
    optimizer: Optimizer,
    lr_scheduler: Any = None,
    keep: int = 2,
) -> Path:
    """Save a plain model in the middle of its training, with everything that a resume needs."""
    bag = TensorBag(_model_tensors(model))
    state = {"kind": "training", "segue": {"step": step}, **_pack(bag, optimizer=optimizer, lr_scheduler=lr_scheduler)}
    state["random"] = bag.pack(randomness.states_of_every_rank(), "random")
    return packing.write(Path(folder), state, bag.tensors, keep)


def load_training_(model: nn.Module, folder: str | os.PathLike[str], *, optimizer: Optimizer, lr_scheduler: Any = None) -> int:
    """Restore the training of a plain model, and return its step."""
    folder, state, tensors = folders.read(Path(folder))
    _require_kind(state, "training", folder)
    _restore_tensors(_model_tensors(model), "model/", state, tensors, optimizer=optimizer, lr_scheduler=lr_scheduler)
    randomness.restore_this_rank(TensorBag(tensors).unpack(state["random"]))
    return int(state["segue"]["step"])


def saved_step(folder: str | os.PathLike[str]) -> int:
    """Return the step of the latest checkpoint in a folder."""
    _, state, _ = folders.read(Path(folder))
    return int(state["segue"]["step"])


def _pack(bag: TensorBag, **parts: Any) -> dict[str, Any]:
    return {name: bag.pack(part.state_dict(), name) for name, part in parts.items() if part is not None}


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {f"model/{key}": value for key, value in packing.tensor_state(model).items()}


def _handover_tensors(handover: Handover) -> dict[str, Tensor]:
    """Return what of a handover changes: its students and the part of the backbone that trains."""
    states = {name: packing.tensor_state(seam.student) for name, seam in handover.seams.items()}
    tensors = {f"students/{name}/{key}": value for name, state in states.items() for key, value in state.items()}
    return tensors | {f"backbone/{name}": value for name, value in handover.backbone_that_changes().items()}


def _handover_state(handover: Handover) -> tuple[dict[str, Any], dict[str, Tensor]]:
    schedule = getattr(handover.plan.schedule, "state_dict", lambda: None)()
    state = {"kind": "handover", "segue": handover.describe(), "backbone": _backbone_hash(handover), "schedule": schedule}
    return state, _handover_tensors(handover)


def _model_state(model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    surgery.refuse_wrapped(model)
    record = getattr(model, "segue", None)
    if not isinstance(record, dict):
        raise CheckpointError(
            f"{type(model).__name__} is not a finalized model.",
            "It has no record of a replacement.",
            "save the handover while it runs, or the model after handover.finalize_().",
        )
    return {"kind": "model", "segue": record}, _model_tensors(model)


def _backbone_hash(handover: Handover) -> str:
    """Hash what was around the sites, so that students never resume inside another model."""
    if handover.backbone_hash is None:
        handover.backbone_hash = tensor_files.fingerprint(handover.original_backbone())
    return handover.backbone_hash


def _restore(
    handover: Handover, state: dict[str, Any], tensors: dict[str, Tensor], optimizer: Optimizer | None, lr_scheduler: Any
) -> None:
    _check_hashes(handover.teacher_hashes, state["segue"]["teachers"])
    if _backbone_hash(handover) != state["backbone"]:
        raise CheckpointError(
            f"this {type(handover.model).__name__} is not the model of the checkpoint.",
            "The weights around the sites differ from those it was trained with.",
            "load the same pretrained model first. Nothing was changed.",
        )
    prefixes = ("students/", "backbone/")
    _restore_tensors(_handover_tensors(handover), prefixes, state, tensors, optimizer=optimizer, lr_scheduler=lr_scheduler)
    if state["schedule"] is not None:
        handover.plan.schedule.load_state_dict(state["schedule"])  # type: ignore[attr-defined]
    if handover.total_steps is None and state["segue"]["total_steps"] is not None:
        handover.total_steps = state["segue"]["total_steps"]
    handover.resume_at(state["segue"]["step"])
    randomness.restore_this_rank(TensorBag(tensors).unpack(state["random"]))


def _restore_tensors(
    targets: dict[str, Tensor], prefixes: str | tuple[str, ...], state: dict[str, Any], tensors: dict[str, Tensor], **parts: Any
) -> None:
    """Copy the saved tensors into the model, and the saved state into the optimizer and the learning-rate scheduler."""
    stored = {name: value for name, value in tensors.items() if name.startswith(prefixes)}
    packing.require_same_shapes(targets, stored)
    for what, part in parts.items():
        if part is not None and state.get(what) is None:
            raise CheckpointError(
                f"the checkpoint has no state of the {what}.",
                f"It was saved without {what}=.",
                f"save it too: segue.save(handover, folder, {what}={what}). Nothing was changed.",
            )
    packing.copy_(targets, stored)
    for what, part in parts.items():
        if part is not None:
            saved = TensorBag(tensors).unpack(state[what])
            part.load_state_dict(packing.sharded_state(saved, part) if isinstance(part, Optimizer) else saved)


def rebuild_(model: nn.Module, record: dict[str, Any], stored: dict[str, Tensor], given: dict[str, Any]) -> nn.Module:
    """Put students into a fresh model of the same architecture and load every weight."""
    with all_or_nothing(model):
        for earlier in _in_order(record):
            plan = Plan.from_dict(earlier["plan"], **given)
            sites = select(model, plan.sites)
            students = {name: surgery.finished(s) for name, s in build_students(model, plan, sites).items()}
            for site in sites:
                teacher = surgery.teacher_at(model, site)
                students[site.name].train(model.get_submodule(site.name).training)
                surgery.put_in_place(model, site, students[site.name], teacher)
            surgery.shorten_(model, sites)
        targets = packing.tensor_state(model)
        stored = packing.with_shared(stored, targets)
        packing.require_same_shapes(targets, stored)
    packing.copy_(targets, stored)
    model.segue = record  # type: ignore[assignment]
    return model


def _in_order(record: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the replacements that a model went through, the first one first."""
    return [] if record is None else [*_in_order(record.get("earlier")), record]


def _check_hashes(found: dict[str, str], saved: dict[str, str]) -> None:
    different = [name for name in saved if found.get(name) != saved[name]] + [name for name in found if name not in saved]
    if different:
        raise CheckpointError(
            "this model is not the model of the checkpoint.",
            f"The teachers at {len(different)} sites differ from those it was trained with ({different[0]!r} first).",
            "load the same pretrained weights and use the same sites. Nothing was changed.",
        )


CONTENTS = {"handover": "a running handover", "model": "a finalized model", "training": "a plain model in training"}


def _require_kind(state: dict[str, Any], kind: str, folder: Path) -> None:
    if state["kind"] != kind:
        raise CheckpointError(
            f"{folder} does not hold {CONTENTS[kind]}.",
            f"It holds {CONTENTS.get(state['kind'], state['kind'])}.",
            "load it into a plain model: segue.load_(model, folder).",
        )

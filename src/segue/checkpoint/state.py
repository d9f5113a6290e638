"""Checkpoints: what is saved of a handover or a finalized model, and how it is put back; no pickle."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from segue.checkpoint import folders as checkpoint_files
from segue.core import randomness, surgery, tensor_files
from segue.core.building import build_students
from segue.core.handover import Handover, replace_
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

    A handover is saved without its teachers: students, plan, step and random states, and whatever of the backbone trains.
    A finalized model is saved whole. The `keep` newest checkpoints stay; in a distributed run rank 0 writes.
    """
    state, tensors = _handover_state(target) if isinstance(target, Handover) else _model_state(target)
    bag = _TensorBag(tensors)
    if optimizer is not None:
        state["optimizer"] = bag.pack(optimizer.state_dict(), "optimizer")
    if lr_scheduler is not None:
        state["lr_scheduler"] = bag.pack(lr_scheduler.state_dict(), "lr_scheduler")
    if isinstance(target, Handover):
        state["random"] = bag.pack(randomness.states_of_every_rank(), "random")
    if missing := unsaved(state["segue"]["plan"]):
        warnings.warn(
            f"the plan's {', '.join(missing)} cannot be saved by name; give it again to segue.load_(...).",
            SegueWarning,
            stacklevel=2,
        )
    return _write(Path(folder), state, bag.tensors, keep)


def load_(
    target: Handover | nn.Module,
    folder: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
    **given: Any,
) -> Any:
    """Continue from a checkpoint, in place.

    Given a plain model, rebuild what was saved in it: returns the running Handover, or the finalized model. Given the Handover
    of a new process, set it to the saved step, with its optimizer and learning-rate scheduler; returns it. `given` supplies
    parts of the plan that could not be saved (`student=my_factory`).
    """
    folder, state, tensors = checkpoint_files.read(Path(folder))
    if isinstance(target, Handover):
        _require_kind(state, "handover", folder)
        _restore(target, state, tensors, optimizer, lr_scheduler)
        return target
    surgery.refuse_wrapped(target)
    if state["kind"] == "model":
        return rebuild_(target, state["segue"], _without("model/", tensors), given)
    plan = Plan.from_dict(state["segue"]["plan"], **given)
    if optimizer is not None or lr_scheduler is not None:
        raise CheckpointError(
            "an optimizer was given together with a plain model.",
            "It cannot hold the students, which this call is about to make.",
            "first handover = segue.load_(model, folder); then build the optimizer from handover.parameters() and call "
            "segue.load_(handover, folder, optimizer=optimizer).",
        )
    _check_teachers(target, plan, state)
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
    bag = _TensorBag({f"model/{key}": value for key, value in _tensor_state(model).items()})
    state = {
        "kind": "training",
        "segue": {"step": step},
        "optimizer": bag.pack(optimizer.state_dict(), "optimizer"),
        "lr_scheduler": None if lr_scheduler is None else bag.pack(lr_scheduler.state_dict(), "lr_scheduler"),
        "random": bag.pack(randomness.states_of_every_rank(), "random"),
    }
    return _write(Path(folder), state, bag.tensors, keep)


def load_training_(model: nn.Module, folder: str | os.PathLike[str], *, optimizer: Optimizer, lr_scheduler: Any = None) -> int:
    """Put a plain model's training back where it was saved, and return its step."""
    folder, state, tensors = checkpoint_files.read(Path(folder))
    _require_kind(state, "training", folder)
    targets = _tensor_state(model)
    stored = _without("model/", tensors)
    _require_alike(targets, stored)
    _copy(targets, stored)
    bag = _TensorBag(tensors)
    optimizer.load_state_dict(_sharded_state(bag.unpack(state["optimizer"]), optimizer))
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(bag.unpack(state["lr_scheduler"]))
    randomness.restore_this_rank(bag.unpack(state["random"]))
    return int(state["segue"]["step"])


def saved_step(folder: str | os.PathLike[str]) -> int:
    """Return the step of the latest checkpoint in a folder."""
    _, state, _ = checkpoint_files.read(Path(folder))
    return int(state["segue"]["step"])


def _handover_state(handover: Handover) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = {
        f"students/{name}/{key}": value
        for name, seam in handover.seams.items()
        for key, value in _tensor_state(seam.student).items()
    }
    tensors |= {f"backbone/{name}": value for name, value in handover.backbone_that_changes().items()}
    schedule_state = getattr(handover.plan.schedule, "state_dict", None)
    state = {
        "kind": "handover",
        "segue": handover.describe(),
        "backbone": _backbone_hash(handover),
        "schedule": schedule_state() if schedule_state is not None else None,
    }
    return state, tensors


def _model_state(model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    surgery.refuse_wrapped(model)
    record = getattr(model, "segue", None)
    if not isinstance(record, dict):
        raise CheckpointError(
            f"{type(model).__name__} was to be saved as a finalized model.",
            "It carries no record of a replacement.",
            "save the handover while it runs, or the model after handover.finalize_().",
        )
    return {"kind": "model", "segue": record}, {f"model/{key}": value for key, value in _tensor_state(model).items()}


def _tensor_state(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{type(module).__name__} was to be saved as tensors.",
                f"Its state {name!r} is a {type(value).__name__}.",
                "keep extra state in tensors (register_buffer).",
            )
    return state


def _backbone_hash(handover: Handover) -> str:
    """Hash what lay around the sites, so that students never continue inside another model."""
    if handover.backbone_hash is None:
        handover.backbone_hash = tensor_files.fingerprint(handover.original_backbone())
    return handover.backbone_hash


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _restore(
    handover: Handover, state: dict[str, Any], tensors: dict[str, Tensor], optimizer: Optimizer | None, lr_scheduler: Any
) -> None:
    _check_hashes(handover.teacher_hashes, state["segue"]["teachers"])
    if _backbone_hash(handover) != state["backbone"]:
        raise CheckpointError(
            f"a checkpoint was to be continued in {type(handover.model).__name__}.",
            "The weights around the sites differ from those it was trained with.",
            "load the same pretrained model first. Nothing was changed.",
        )
    targets = {f"students/{name}/{k}": v for name, s in handover.seams.items() for k, v in _tensor_state(s.student).items()}
    targets |= {f"backbone/{name}": value for name, value in handover.backbone_that_changes().items()}
    stored = {k: v for k, v in tensors.items() if k.startswith(("students/", "backbone/"))}
    _require_alike(targets, stored)
    for what, part in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
        if part is not None and what not in state:
            raise CheckpointError(
                f"the state of the {what} was to be restored.",
                "The checkpoint holds none.",
                f"save it too: segue.save(handover, folder, {what}={what}). Nothing was changed.",
            )
    _copy(targets, stored)
    bag = _TensorBag(tensors)
    if optimizer is not None:
        optimizer.load_state_dict(_sharded_state(bag.unpack(state["optimizer"]), optimizer))
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(bag.unpack(state["lr_scheduler"]))
    if state["schedule"] is not None:
        handover.plan.schedule.load_state_dict(state["schedule"])  # type: ignore[attr-defined]
    if handover.total_steps is None and state["segue"]["total_steps"] is not None:
        handover.total_steps = state["segue"]["total_steps"]
    handover.resume_at(state["segue"]["step"])
    randomness.restore_this_rank(bag.unpack(state["random"]))


def _sharded_state(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Shard what an optimizer keeps for each parameter as the parameter is sharded."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for index, kept in state["state"].items():
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.shape == held[index].shape:
                kept[name] = tensor_files.sharded_like(value, held[index])
    return state


def rebuild_(model: nn.Module, record: dict[str, Any], stored: dict[str, Tensor], given: dict[str, Any]) -> nn.Module:
    """Put students into a fresh model of the same architecture and load every weight."""
    undo: list[Callable[[], None]] = []
    try:
        for earlier in _in_order(record):
            plan = Plan.from_dict(earlier["plan"], **given)
            sites = select(model, plan.sites)
            students = {name: surgery.finished(s) for name, s in build_students(model, plan, sites).items()}
            for site in sites:
                teacher = surgery.teacher_at(model, site)
                students[site.name].train(model.get_submodule(site.name).training)
                undo.append(partial(surgery.put_back, model, site, teacher))
                surgery.put_in_place(model, site, students[site.name], teacher)
            undo.append(surgery.shorten_(model, sites))
        targets = _tensor_state(model)
        stored = _with_shared(stored, targets)
        _require_alike(targets, stored)
    except BaseException:
        for step in reversed(undo):
            step()
        raise
    _copy(targets, stored)
    model.segue = record  # type: ignore[assignment]
    return model


def _with_shared(stored: dict[str, Tensor], targets: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name what is stored once by all the names it has in the model: Hugging Face leaves out shared weights."""
    places = {(t.data_ptr(), t.shape, t.stride()): name for name, t in targets.items() if name in stored and t.numel()}
    shared = {name: places.get((t.data_ptr(), t.shape, t.stride())) for name, t in targets.items() if name not in stored}
    return stored | {name: stored[place] for name, place in shared.items() if place is not None}


def _in_order(record: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the replacements that a model went through, the first one first."""
    return [] if record is None else [*_in_order(record.get("earlier")), record]


def _check_teachers(model: nn.Module, plan: Plan, state: dict[str, Any]) -> None:
    teachers = {site.name: surgery.teacher_at(model, site) for site in select(model, plan.sites)}
    hashes = {name: tensor_files.fingerprint(teacher.state_dict()) for name, teacher in teachers.items()}
    _check_hashes(hashes, state["segue"]["teachers"])


def _check_hashes(found: dict[str, str], saved: dict[str, str]) -> None:
    different = [name for name in saved if found.get(name) != saved[name]] + [name for name in found if name not in saved]
    if different:
        raise CheckpointError(
            "a checkpoint was to be continued in this model.",
            f"The teachers at {len(different)} sites differ from those it was trained with ({different[0]!r} first).",
            "load the same pretrained weights and use the same sites. Nothing was changed.",
        )


def _require_alike(targets: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    for name in sorted({*targets, *stored}):
        ours = tuple(targets[name].shape) if name in targets else "nothing"
        theirs = tuple(stored[name].shape) if name in stored else "nothing"
        if ours != theirs:
            raise CheckpointError(
                f"the tensor {name.partition('/')[2] or name!r} was to be restored.",
                f"The model has {ours} there, the checkpoint {theirs}.",
                "build the same model with the same plan first. Nothing was changed.",
            )


def _copy(targets: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensor_files.sharded_like(stored[name], target))


def _without(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


class _TensorBag:
    """Take the tensors out of nested plain data, and put them back."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def pack(self, value: Any, at: str) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            self.tensors[at] = value
            return {"tensor": at}
        if isinstance(value, dict):
            return {"dict": [[self.pack(k, at), self.pack(v, f"{at}/{k}")] for k, v in value.items()]}
        if isinstance(value, tuple | list):
            items = [self.pack(item, f"{at}/{i}") for i, item in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": items}
        raise CheckpointError(
            f"{at} was to be saved as plain data.",
            f"It is a {type(value).__name__}.",
            "keep numbers, strings and tensors in the state; leave this part out and rebuild it yourself.",
        )

    def unpack(self, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        ((kind, content),) = data.items()
        if kind == "tensor":
            return self.tensors[content].clone()
        if kind == "dict":
            return {self.unpack(key): self.unpack(value) for key, value in content}
        items = [self.unpack(item) for item in content]
        return tuple(items) if kind == "tuple" else items


def _write(folder: Path, state: dict[str, Any], tensors: dict[str, Tensor], keep: int) -> Path:
    """Write from rank 0 and tell every rank where."""
    unique, aliases = _without_aliases({name: tensor_files.full(value) for name, value in tensors.items()})
    if not _distributed():
        return checkpoint_files.write(folder, {**state, "aliases": aliases}, unique, keep)
    written: list[Any] = [None, None]
    failure: BaseException | None = None
    if torch.distributed.get_rank() == 0:
        try:
            written[0] = checkpoint_files.write(folder, {**state, "aliases": aliases}, unique, keep)
        except BaseException as error:  # told to the others first: they wait for it
            failure, written[1] = error, f"{type(error).__name__}: {error}"
    torch.distributed.broadcast_object_list(written)
    if failure is not None:
        raise failure
    if written[1] is not None:
        raise CheckpointError(
            f"a checkpoint was to be written to {folder}.", f"Rank 0 failed: {written[1]}", "see the error of rank 0."
        )
    return Path(written[0])


def _without_aliases(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Keep one of the tensors that share memory (tied weights); safetensors holds each once."""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
            continue
        seen[key] = name
        unique[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return unique, aliases


KINDS = {"handover": "a running handover", "model": "a finalized model", "training": "a plain model in training"}


def _require_kind(state: dict[str, Any], kind: str, folder: Path) -> None:
    if state["kind"] != kind:
        raise CheckpointError(
            f"{folder} was to be loaded into {KINDS[kind]}.",
            f"It holds {KINDS.get(state['kind'], state['kind'])}.",
            "load it into a plain model: segue.load_(model, folder).",
        )

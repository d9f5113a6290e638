"""What is saved of a handover, a finalized model or a plain training, and how it is restored."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from segue.border import PositiveInt, checked
from segue.checkpoint import changes, folders, optimizers, packing, precision, restoring, schedulers
from segue.checkpoint.folders import Checkpoint
from segue.checkpoint.packing import TensorBag
from segue.checkpoint.restoring import Undo
from segue.core import randomness, surgery, tensor_files
from segue.core.building import build_students
from segue.core.handover import Handover, replace_
from segue.core.raised import Raised
from segue.core.shortening import shorten_
from segue.core.transaction import all_or_nothing
from segue.errors import CheckpointError, PlanError, SegueWarning
from segue.plan import Plan, encode
from segue.schedules import Adaptive
from segue.settings import unsaved
from segue.sites import select

ADAPTIVE = encode(Adaptive())["kind"]
LOGGER = logging.getLogger(__name__)


class Stateful(Protocol):
    """What can be saved and restored besides a model and an optimizer, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@checked
def save(
    target: Handover | nn.Module,
    folder: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    lr_scheduler: Stateful | None = None,
    keep: PositiveInt = 2,
) -> Path:
    """Save a running handover, or a finalized model, and return the folder of this checkpoint.

    >>> import torch
    >>> import segue
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    >>> handover = segue.replace_(model, segue.methods.dcr_dfg("0"), total_steps=10)
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     segue.save(handover, folder).exists()
    True

    A handover is saved without its teachers: students, plan, step and random states, and the part of the backbone that trains.
    A finalized model is saved completely. In a distributed run rank 0 writes.

    Args:
        target: A running Handover, or a finalized model.
        folder: Where checkpoints go, one folder each.
        optimizer: Saved with a Handover.
        lr_scheduler: Saved with a Handover.
        keep: The number of newest checkpoints that stay.
    """
    model = target.model if isinstance(target, Handover) else target
    state, tensors = _handover_state(target) if isinstance(target, Handover) else _model_state(target)
    bag = TensorBag(tensors)
    state |= _pack(bag, model, optimizer=optimizer, lr_scheduler=lr_scheduler)
    if isinstance(target, Handover):
        state["random"] = bag.pack(randomness.states_of_every_rank(), "random")
    if missing := unsaved(state["segue"]["plan"]):
        warnings.warn(
            f"the plan's {', '.join(missing)} is your own, so only its name is saved; pass it again to segue.load_(...).",
            SegueWarning,
            stacklevel=2,
        )
    return packing.write(Path(folder), state, bag.tensors, keep)


@checked
def load_(
    target: Handover | nn.Module,
    folder: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    lr_scheduler: Stateful | None = None,
    allow_changes: Sequence[str] = (),
    **given: Any,
) -> Any:
    """Resume from a checkpoint, in place, and return the running Handover, or the finalized model.

    >>> import torch
    >>> import segue
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    >>> handover = segue.replace_(model, segue.methods.dcr_dfg("0"), total_steps=10)
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = segue.save(handover, folder)
    ...     original = handover.cancel_()
    ...     segue.load_(original, folder).steps_done
    0

    A model that had been cast is cast again. Everything is read and checked first: a call that fails changes nothing.

    Args:
        target: A plain model, in which what was saved is rebuilt, or a Handover, which is set to the saved step.
        folder: That of `segue.save`, or one checkpoint in it.
        optimizer: Restored with a Handover; build it from `handover.parameters()` first.
        lr_scheduler: Restored with a Handover.
        allow_changes: Settings that may differ from those saved, such as ("plan.schedule",); others are refused and listed.
        given: Parts of the plan that could not be saved, such as student=my_factory.
    """
    saved = folders.read(Path(folder))
    if isinstance(target, Handover):
        if given:
            raise PlanError(
                f"a running handover has its plan already, got {', '.join(given)}.",
                "Parts of a plan are for a plain model, in which its handover is rebuilt.",
                "leave them out, or give the plain model: segue.load_(model, folder, student=...). Nothing was changed.",
            )
        _require_known(saved, optimizer, lr_scheduler, allow_changes)
        restore_handover_(target, saved, allow_changes, optimizer=optimizer, lr_scheduler=lr_scheduler)
        return target
    surgery.refuse_wrapped(target)
    with folders.understood(saved.folder, given), restoring.undoing() as undo:
        restoring.keep_random_states(undo)  # a user's student may draw from any of them
        if saved.state["kind"] == "model":
            stored = {name.removeprefix("model/"): value for name, value in saved.tensors.items() if name.startswith("model/")}
            return rebuild_(target, saved.state["segue"], stored, given)
        require_kind(saved, "handover")
        plan = Plan.from_dict(saved.state["segue"]["plan"], **given)
        if optimizer is not None or lr_scheduler is not None:
            raise CheckpointError(
                "an optimizer cannot be loaded together with a plain model.",
                "It cannot hold the students, which this call is about to make.",
                "first handover = segue.load_(model, folder); then build the optimizer from handover.parameters() and call "
                "segue.load_(handover, folder, optimizer=optimizer).",
            )
        handover = _replace_as_saved_(target, plan, saved, undo)
        _require_known(saved, None, None, allow_changes)
        restore_handover_(handover, saved, allow_changes)
        return handover


def _require_known(saved: Checkpoint, optimizer: Optimizer | None, lr_scheduler: Any, allow_changes: Sequence[str]) -> None:
    options = {} if optimizer is None else changes.of_optimizer(optimizer.param_groups)
    if schedulers.is_known(lr_scheduler):
        options |= schedulers.settings_of(lr_scheduler.state_dict())
    with folders.understood(saved.folder):
        changes.require_known(allow_changes, [*settings_of(saved.state["segue"]), "total_steps", *options])


def settings_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return what shapes a handover, by name; a length that is not known yet is left out."""
    total = record["total_steps"]
    return changes.of_plan(record["plan"]) | ({} if total is None else {"total_steps": total})


def _replace_as_saved_(model: nn.Module, plan: Plan, saved: Checkpoint, undo: Undo) -> Handover:
    """Start the handover of a checkpoint; a model that was cast before it began, or while it ran, is cast here too."""
    record, sites = saved.state["segue"], select(model, plan.sites)
    dtype = precision.dtype_of({name: value for name, value in saved.tensors.items() if name.startswith("students/")})
    if precision.teacher_hashes(model, sites, dtype) == record["teachers"] != precision.teacher_hashes(model, sites):
        assert dtype is not None  # otherwise the two would be equal
        precision.cast_(model, dtype, undo)
    _check_hashes(precision.teacher_hashes(model, sites), record["teachers"])
    if record["total_steps"] is None and record["step"] > 0:
        raise ValueError(f"step {record['step']} of a run without a length")
    handover = replace_(model, plan, total_steps=record["total_steps"])
    undo.append(handover.cancel_)
    if dtype is not None and dtype != precision.dtype_of(_handover_tensors(handover)):
        precision.cast_(model, dtype, undo)
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
    state = {"kind": "training", "segue": {"step": step}, **_pack(bag, model, optimizer=optimizer, lr_scheduler=lr_scheduler)}
    state["random"] = bag.pack(randomness.states_of_every_rank(), "random")
    return packing.write(Path(folder), state, bag.tensors, keep)


def load_training_(model: nn.Module, folder: str | os.PathLike[str], *, optimizer: Optimizer, lr_scheduler: Any = None) -> int:
    """Restore the training of a plain model, and return its step; a call that fails changes nothing."""
    return restore_training_(model, folders.read(Path(folder)), optimizer=optimizer, lr_scheduler=lr_scheduler)


def saved_step(folder: str | os.PathLike[str]) -> int:
    """Return the step of the latest checkpoint in a folder."""
    return step_of(folders.read(Path(folder)))


def step_of(saved: Checkpoint) -> int:
    """Return the step of a checkpoint."""
    with folders.understood(saved.folder):
        step = saved.state["segue"]["step"]
        if type(step) is not int or step != folders.step_in(saved.folder.name):
            raise ValueError(f"its step is {step!r:.40}, that of its folder {saved.folder.name}")
        return step


def _pack(bag: TensorBag, model: nn.Module, **parts: Any) -> dict[str, Any]:
    packed = {name: bag.pack(part.state_dict(), name) for name, part in parts.items() if part is not None}
    if isinstance(optimizer := parts.get("optimizer"), Optimizer):
        packed["parameters"] = optimizers.parameters_of(optimizer, model)
    return packed


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {f"model/{key}": value for key, value in packing.tensor_state(model).items()}


def _handover_tensors(handover: Handover) -> dict[str, Tensor]:
    """Return what of a handover changes: its students and the part of the backbone that trains."""
    states = {name: packing.tensor_state(seam.student) for name, seam in handover.seams.items()}
    tensors = {f"students/{name}/{key}": value for name, state in states.items() for key, value in state.items()}
    return tensors | {f"backbone/{name}": value for name, value in handover.backbone_that_changes().items()}


def _handover_state(handover: Handover) -> tuple[dict[str, Any], dict[str, Tensor]]:
    keeper = handover.stateful_schedule
    schedule = None if keeper is None else keeper.state_dict()
    state = {"kind": "handover", "segue": handover.describe(), "backbone": _backbone_hash(handover), "schedule": schedule}
    if handover.raised:
        state["raised"] = {name: raised.to_list() for name, raised in handover.raised.items()}
    return state | {"local_fit": handover.local.state_dict()}, _handover_tensors(handover)


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


def restore_handover_(handover: Handover, saved: Checkpoint, allow_changes: Sequence[str] = (), **parts: Any) -> None:
    """Set a handover, and its optimizer and learning-rate scheduler, to what a checkpoint holds."""
    require_kind(saved, "handover")
    state = saved.state
    with folders.understood(saved.folder):
        targets, teachers = _handover_tensors(handover), state["segue"]["teachers"]
        place = "first" if handover.teacher_hashes == teachers else "the model before segue.replace_"
        precision.require_same(targets, saved.tensors, place)
        _check_hashes(handover.teacher_hashes, teachers)
        if _backbone_hash(handover) != state["backbone"]:
            raise CheckpointError(
                f"this {type(handover.model).__name__} is not the model of the checkpoint.",
                "The weights around the sites differ from those it was trained with.",
                "load the same pretrained model first. Nothing was changed.",
            )
        changes.require_same(settings_of(state["segue"]), settings_of(handover.describe()), allow_changes)
        raised = {name: Raised.from_list(data) for name, data in state.get("raised", {}).items()}
        if not raised.keys() <= handover.seams.keys():
            raise ValueError(f"alpha is raised at {sorted(raised)!r:.80}")
    with _restoring(handover.model, targets, saved, allow_changes, **parts) as undo:
        restore_schedule_(handover, state["segue"], state["schedule"], undo)
        restoring.load_part(handover.local, "local fit", state.get("local_fit", {}), undo)  # 0.1.0 had none
        total = state["segue"]["total_steps"] if handover.total_steps is None else None
        handover.resume_at(step_of(saved), total, raised)


def restore_schedule_(handover: Handover, record: dict[str, Any], saved: Any, undo: Undo) -> None:
    """Give the schedule of a handover its saved state; one that has taken the place of another starts without."""
    schedule = handover.stateful_schedule
    was, now = ((plan["schedule"], plan.get("phases")) for plan in (record["plan"], handover.describe()["plan"]))
    adaptive = bool(handover.closed_loop.sites)
    alike = _names_adaptive(was) == adaptive  # the state of a closed loop means nothing to a schedule of one's own
    if schedule is not None and ((saved is not None and alike) or (was == now and adaptive)):
        restoring.load_part(schedule, "schedule", saved, undo)


def _names_adaptive(plain: Any) -> bool:
    """Return whether schedules, as plain data, are or contain an Adaptive."""
    if isinstance(plain, dict):
        inner = {} if "unsaved" in plain else plain  # one of the user's own decides by itself
        return inner.get("kind") == ADAPTIVE or any(_names_adaptive(each) for each in inner.values())
    return isinstance(plain, list | tuple) and any(_names_adaptive(inner) for inner in plain)


def restore_training_(model: nn.Module, saved: Checkpoint, allow_changes: Sequence[str] = (), **parts: Any) -> int:
    """Set the training of a plain model to what a checkpoint holds, and return its step."""
    require_kind(saved, "training")
    step, targets = step_of(saved), _model_tensors(model)
    precision.require_same(targets, saved.tensors, "first")
    with _restoring(model, targets, saved, allow_changes, **parts):
        return step


@contextmanager
def _restoring(
    model: nn.Module, targets: dict[str, Tensor], saved: Checkpoint, allow_changes: Sequence[str], **parts: Any
) -> Iterator[Undo]:
    """Check all of a checkpoint, then write tensors, parts and random states, and let a `with` block write the rest."""
    _, state, tensors = saved
    with folders.understood(saved.folder), restoring.undoing() as undo:
        stored = {name: value for name, value in tensors.items() if name.startswith(("students/", "backbone/", "model/"))}
        packing.require_same_shapes(targets, stored)
        given = {what: part for what, part in parts.items() if part is not None}
        states = {what: restoring.state_of(part, what, saved, model, allow_changes) for what, part in given.items()}
        random = restoring.random_states(state, tensors)
        for what, part in given.items():
            restoring.load_part(part, what, states[what], undo)
        restoring.keep_random_states(undo)
        randomness.restore_this_rank(random)
        packing.copy_(targets, stored, undo)
        yield undo
    LOGGER.info("%s: restored %d tensors, %s", saved.folder, len(targets), ", ".join([*given, "the random states"]))


def rebuild_(model: nn.Module, record: dict[str, Any], stored: dict[str, Tensor], given: dict[str, Any]) -> nn.Module:
    """Put students into a fresh model of the same architecture and load every weight."""
    with all_or_nothing(model), restoring.undoing() as undo:
        for earlier in _in_order(record):
            plan = Plan.from_dict(earlier["plan"], **given)
            sites = select(model, plan.sites)
            students = {name: surgery.finished(s) for name, s in build_students(model, plan, sites).items()}
            for site in sites:
                students[site.name].train(model.get_submodule(site.name).training)
                surgery.put_at(model, site, students[site.name])
            shorten_(model, sites)
        targets = packing.tensor_state(model)
        stored = packing.with_shared(stored, targets)
        packing.require_same_shapes(targets, stored)
        packing.copy_(targets, stored, undo)
        model.segue = record  # type: ignore[assignment]
    LOGGER.info("%s: rebuilt with %d tensors of a finalized model", type(model).__name__, len(stored))
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


def require_kind(saved: Checkpoint, kind: str) -> None:
    """Refuse a checkpoint of something else."""
    found = str(saved.state.get("kind"))
    if found != kind:
        raise CheckpointError(
            f"{saved.folder} does not hold {CONTENTS[kind]}.",
            f"It holds {CONTENTS.get(found, found)}.",
            "load it into a plain model: segue.load_(model, folder).",
        )

"""All or nothing: a checkpoint is read and checked completely before anything is written, and what fails is undone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from segue.checkpoint import changes, packing
from segue.checkpoint.folders import Checkpoint
from segue.checkpoint.packing import TensorBag
from segue.core import randomness
from segue.errors import CheckpointError

Undo = list[Callable[[], Any]]

# The state that torch's optimizers keep in the shape of the parameter, under the names that they give it.
MOMENTS = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "exp_inf",
    "prev",
)


@contextmanager
def undoing() -> Iterator[Undo]:
    """Undo, in reverse order, what a `with` block has noted if the block fails; each of it, whatever fails again."""
    undo: Undo = []
    try:
        yield undo
    except BaseException:
        for step in reversed(undo):
            with suppress(BaseException):
                step()
        raise


def parameters_of(optimizer: Optimizer, model: nn.Module) -> list[list[Any]]:
    """Return the name in the model, if it has one, and the shape of every parameter in an optimizer, group by group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[[names.get(id(p)), list(p.shape)] for p in group["params"]] for group in optimizer.param_groups]


def state_of(part: Any, what: str, checkpoint: Checkpoint, model: nn.Module, allow_changes: Sequence[str]) -> Any:
    """Return the saved state of an optimizer or a learning-rate scheduler, after checking that it fits."""
    _, state, tensors = checkpoint
    if state.get(what) is None:
        raise CheckpointError(
            f"the checkpoint has no state of the {what}.",
            f"It was saved without {what}=.",
            f"save it too: segue.save(handover, folder, {what}={what}). Nothing was changed.",
        )
    saved = TensorBag(tensors).unpack(state[what])
    if isinstance(part, Optimizer):
        _require_same_parameters(part, model, saved, state.get("parameters"))
        groups = saved["param_groups"]
        changes.require_same(changes.of_optimizer(groups), changes.of_optimizer(part.param_groups), allow_changes)
        changes.keep_allowed(groups, part, allow_changes)
        saved = packing.sharded_state(saved, part)
    return saved


def _require_same_parameters(
    optimizer: Optimizer, model: nn.Module, saved: dict[str, Any], known: list[list[Any]] | None
) -> None:
    held = parameters_of(optimizer, model)
    sizes, before = [len(group) for group in held], [len(group["params"]) for group in saved["param_groups"]]
    if sizes != before:
        raise _other_parameters(f"It has groups of {sizes} parameters, the checkpoint of {before}.")
    if known is not None:  # version 0.1.0 saved no names
        for number, (ours, theirs) in enumerate(zip(held, known, strict=True)):
            for index, (here, there) in enumerate(zip(ours, theirs, strict=True)):
                if here != there:
                    raise _other_parameters(f"Parameter {index} of group {number} is {_named(here)}, was {_named(there)}.")
    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, moments in saved["state"].items():
        for name in MOMENTS:
            moment = moments.get(name)
            if isinstance(moment, Tensor) and moment.shape != flat[index].shape:
                shapes = f"{tuple(flat[index].shape)}, its {name} in the checkpoint {tuple(moment.shape)}"
                raise _other_parameters(f"Parameter {index} has the shape {shapes}.")
            if isinstance(moment, Tensor) and packing.kind(moment) != packing.kind(flat[index]):
                raise _other_parameters(f"Parameter {index} is {flat[index].dtype}, its {name} {moment.dtype}.")
        step = moments.get("step")
        if isinstance(step, Tensor) and not (step.dim() == 0 and step.is_floating_point() and step >= 0):
            raise _other_parameters(f"The number of steps of parameter {index} is {step.dtype} {tuple(step.shape)}.")


def _named(parameter: list[Any]) -> str:
    name, shape = parameter
    return f"{name or 'one outside the model'} {tuple(shape)}"


def _other_parameters(found: str) -> CheckpointError:
    return CheckpointError(
        "the optimizer does not hold the parameters of the checkpoint in their order.",
        found,
        "build it as before: of handover.parameters(), in the same groups. Nothing was changed.",
    )


def load_part(part: Any, what: str, saved: Any, undo: Undo) -> None:
    """Give an optimizer, a learning-rate scheduler or a schedule its saved state."""
    undo.append(_undo_of(part))
    try:
        part.load_state_dict(saved)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the {what} does not take the state of the checkpoint.",
            f"{type(part).__name__}.load_state_dict raises {type(error).__name__}: {error}.",
            f"give a {what} of the class and the settings that were saved. Nothing was changed.",
        ) from error


def _undo_of(part: Any) -> Callable[[], None]:
    fields, before = dict(vars(part)), copy.deepcopy(part.state_dict())

    def undo() -> None:
        try:
            part.load_state_dict(before)  # what is inside its fields
        finally:  # also of an object that takes no state at all
            vars(part).clear()
            vars(part).update(fields)

    return undo


def random_states(state: dict[str, Any], tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return the saved random states of every rank."""
    found = TensorBag(tensors).unpack(state["random"])
    if not (isinstance(found, list) and found):
        raise ValueError("there are no random states in it")
    return found


def keep_random_states(undo: Undo) -> None:
    """Bring back the random states of this process if what follows fails."""
    undo.append(partial(randomness.restore, randomness.states()))

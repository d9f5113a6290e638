"""All or nothing: a checkpoint is read and checked completely before anything is written, and what fails is undone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from segue.checkpoint import optimizers, schedulers
from segue.checkpoint.folders import Checkpoint
from segue.checkpoint.packing import TensorBag
from segue.core import randomness
from segue.errors import CheckpointError

Undo = list[Callable[[], Any]]


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


def state_of(part: Any, what: str, checkpoint: Checkpoint, model: nn.Module, allow_changes: Sequence[str]) -> Any:
    """Return the saved state of an optimizer or a learning-rate scheduler, after checking that it fits."""
    _, state, tensors = checkpoint
    if state.get(what) is None:
        raise CheckpointError(
            f"the checkpoint has no state of the {what}.",
            f"It was saved without {what}=.",
            f"save it too: segue.save(handover, folder, {what}={what}). Nothing was changed.",
        )
    saved = TensorBag(tensors).unpack(state[what], what)
    if isinstance(part, Optimizer):
        return optimizers.fitting(saved, state.get("parameters"), part, model, allow_changes)
    if schedulers.is_known(part):
        return schedulers.fitting(saved, part.state_dict(), allow_changes)
    return saved


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
    """Return the saved random states of every rank, after checking each number of them."""
    found = TensorBag(tensors).unpack(state["random"], "random")
    if not (isinstance(found, list) and found):
        raise ValueError("there are no random states in it")
    for rank in found:
        randomness.require_valid(rank)
    return found


def keep_random_states(undo: Undo) -> None:
    """Bring back the random states of this process if what follows fails."""
    undo.append(partial(randomness.restore, randomness.states()))

"""The processes of a distributed run: one of them works, all of them know how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from segue.errors import CheckpointError


def on_rank_0(work: Callable[[], Any], failed: str) -> Any:
    """Let rank 0 work and return its result on every rank; where it fails, every rank fails."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return work()
    outcome: list[Any] = [None, None]
    failure: BaseException | None = None
    if torch.distributed.get_rank() == 0:
        try:
            outcome[0] = work()
        except BaseException as error:  # sent to the other ranks first: they wait for it
            failure, outcome[1] = error, f"{type(error).__name__}: {error}"
    torch.distributed.broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise CheckpointError(failed, f"Rank 0 failed: {outcome[1]}", "see the error of rank 0.")
    return outcome[0]

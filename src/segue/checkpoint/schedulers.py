"""The saved state of one of torch's learning-rate schedulers: its settings are compared, its progress is taken over."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from segue.checkpoint import changes

COUNTED = ("last_epoch", "_step_count", "num_bad_epochs", "cooldown_counter")
MOVED = (*COUNTED, "_last_lr", "best", "T_cur", "T_i")  # while it runs
OWN = ("_get_lr_called_within_step", "_is_initial", "verbose")  # of this process, or without an effect


def is_known(part: Any) -> bool:
    """Return whether it is one of torch's own, whose settings and progress are known by their names."""
    return isinstance(part, LRScheduler) and type(part).__module__ == "torch.optim.lr_scheduler"


def settings_of(state: dict[str, Any], at: str = "lr_scheduler") -> dict[str, Any]:
    """Name the settings in the state of a scheduler, and of those inside it."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if name == "_schedulers":
            for index, inner in enumerate(value):
                found |= settings_of(inner, f"{at}.{index}")
        elif name not in (*MOVED, *OWN, "lr_lambdas"):
            found[f"{at}.{name}"] = changes.plain(value)
    return found


def fitting(saved: Any, own: dict[str, Any], allow_changes: Collection[str]) -> dict[str, Any]:
    """Return the state that a scheduler takes over, after checking all of it."""
    taken = _taken(saved, own)
    changes.require_same(settings_of(saved), settings_of(own), allow_changes)
    return taken


def _taken(saved: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Take the progress from a checkpoint, and everything else from the scheduler itself."""
    taken = dict(own)
    for name in [name for name in own if name in MOVED]:
        waits = name == "last_epoch" and saved[name] == -1 and saved["_step_count"] <= 1  # in another one, for its turn
        if not (waits or _plausible(name, saved[name], own[name])):
            raise ValueError(f"{name} of the learning-rate scheduler is {saved[name]!r:.40}")
        taken[name] = saved[name]
    if "lr_lambdas" in own:  # the fields of a user's callable objects
        taken["lr_lambdas"] = saved["lr_lambdas"]
        if [type(each) for each in saved["lr_lambdas"]] != [type(each) for each in own["lr_lambdas"]]:
            raise ValueError("the learning-rate scheduler has other functions")
    if "_schedulers" in own:
        taken["_schedulers"] = [_taken(*pair) for pair in zip(saved["_schedulers"], own["_schedulers"], strict=True)]
    return taken


def _plausible(name: str, value: Any, own: Any) -> bool:
    if name == "_last_lr":
        return isinstance(value, list) and changes.plausible(name, tuple(value), tuple(own))
    if name in COUNTED:
        return type(value) is int and 0 <= value <= changes.LARGEST
    return type(value) in (int, float) and not math.isnan(value) and (name == "best" or 0 <= value <= changes.LARGEST)

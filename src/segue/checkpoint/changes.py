"""The settings that shape a run, compared with those of its checkpoint; a difference is refused unless it is allowed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from segue.errors import CheckpointError, ConfigError, SegueError, nearest
from segue.plan import decode, encode

PLAN_FREE = ("format", "release", "unreached")  # of a plan: they do not change what is learned
COMPUTED = ("foreach", "fused", "capturable", "differentiable")  # how an optimizer computes here: never taken from a file
OPTIMIZER_FREE = ("params", "param_names", "initial_lr", *COMPUTED)
SCHEDULED = ("lr", "betas", "momentum", "max_lr", "min_lr", "max_momentum", "base_momentum")  # by torch's schedulers
LARGEST = 2**53  # number of a scheduler; a float counts to here
LONGEST = 80  # characters of a value in an error


def of_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Name the settings of a saved plan that shape a run, each as this version of Segue writes it."""
    return {f"plan.{name}": _today(value) for name, value in plan.items() if name not in PLAN_FREE}


def of_optimizer(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Name the options of an optimizer that shape a run, group by group; those that a scheduler moves are its own."""
    moved = SCHEDULED if any("initial_lr" in group for group in groups) else ()
    names = {name: None for group in groups for name in group if name not in (*OPTIMIZER_FREE, *moved)}
    values = {name: [plain(group.get(name)) for group in groups] for name in names}
    return {f"optimizer.{name}": each[0] if len(each) == 1 else each for name, each in values.items()}


def plain(option: Any) -> Any:
    """Return an option as it is compared."""
    return option.tolist() if isinstance(option, Tensor) else encode(option)


def taken_options(
    saved: list[dict[str, Any]], own: list[dict[str, Any]], allow_changes: Collection[str]
) -> list[dict[str, Any]]:
    """Return the groups that an optimizer continues with: its own, and from the checkpoint only what a scheduler has moved."""
    moved = ("initial_lr", *SCHEDULED) if any("initial_lr" in group for group in (*saved, *own)) else ()
    taken = []
    for before, now in zip(saved, own, strict=True):
        names = [name for name in moved if name in before and not allows(allow_changes, f"optimizer.{name}")]
        for name in names:
            if not plausible(name, before[name], now.get(name)):
                raise ValueError(f"the option {name} of the optimizer is {before[name]!r:.40}")
        if missing := [name for name in SCHEDULED if moved and name in now and name not in before]:
            raise ValueError(f"the optimizer has no {missing[0]}")
        taken.append({**now, **{name: before[name] for name in names}})
    return taken


def plausible(name: str, value: Any, own: Any) -> bool:
    """Return whether a scheduler can have given an option this value: of the same form, not negative, and finite."""
    if own is not None and _form(value) != _form(own):
        return False
    most = 1 if name == "betas" or "momentum" in name else LARGEST
    numbers = value if isinstance(value, tuple) else (value,)
    numbers = tuple(number.item() if isinstance(number, Tensor) and number.dim() == 0 else number for number in numbers)
    return all(type(number) in (int, float) and 0 <= number <= most for number in numbers)


def same_form(value: Any, own: Any) -> bool:
    """Return whether a value of a checkpoint has the type of a running one, and is finite where it is a number."""
    if own is not None and _form(value) != _form(own):
        return False
    return not isinstance(value, float) or math.isfinite(value)


def _form(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_form(number) for number in value]
    return int if type(value) in (int, float) else type(value)


def allows(allow_changes: Collection[str], name: str) -> bool:
    """Return whether a setting may change: it is named by its path, the beginning of it, or its last part.

    >>> [allows(("lr", "plan"), name) for name in ("recipe.lr", "plan.gate", "recipe.seed")]
    [True, True, False]
    """
    return any(name == part or name.startswith(f"{part}.") or name.endswith(f".{part}") for part in allow_changes)


def require_known(allow_changes: Collection[str], names: Collection[str]) -> None:
    """Refuse a permission that names no setting."""
    for part in allow_changes:
        if not any(allows((part,), name) for name in names):
            raise ConfigError(
                f"allow_changes has {part!r}, which is not a setting of this run.",
                nearest(part, sorted(names)),
                f"the settings are {', '.join(sorted(names))}. Nothing was changed.",
            )


def require_same(saved: Mapping[str, Any], given: Mapping[str, Any], allow_changes: Collection[str]) -> None:
    """Refuse settings that differ from those of a checkpoint; what one of the two does not know is not compared."""
    both = [name for name in given if name in saved and not allows(allow_changes, name)]
    if not (different := [name for name in both if saved[name] != given[name]]):
        return
    listed = "; ".join(text for name in different for text in _differences(name, saved[name], given[name]))
    names = ", ".join(map(repr, different)) + ("," if len(different) == 1 else "")
    options = " ".join(f"--allow-changes {name}" for name in different)
    raise CheckpointError(
        "the run of the checkpoint has other settings.",
        f"Saved -> given: {listed}.",
        f"give the saved ones, or allow it: allow_changes=({names}), or segue resume DIR {options}. Nothing was changed.",
    )


def _today(value: Any) -> Any:
    """Write a part of a saved plan as it is written today; of a user's own part, the name without where it was defined."""
    try:
        return encode(decode(value, "plan"))
    except SegueError:
        return _own_names(value)


def _own_names(value: Any) -> Any:
    if isinstance(value, list):
        return [_own_names(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {name: _own_names(item) for name, item in value.items()}
    if isinstance(name := value.get("unsaved"), str):
        found["unsaved"] = name.rpartition("<locals>.")[2]
    return found


def _differences(name: str, saved: Any, given: Any) -> list[str]:
    """Describe how a setting differs; where that is beyond what is shown, as of phases, by the parts that do."""
    if saved == given:
        return []
    alike = _shown(saved) == _shown(given)
    parts: list[tuple[str, Any, Any]] = []
    if alike and isinstance(saved, list) and isinstance(given, list) and len(saved) == len(given):
        parts = [(str(index), *pair) for index, pair in enumerate(zip(saved, given, strict=True))]
    elif alike and isinstance(saved, dict) and isinstance(given, dict) and saved.keys() == given.keys():
        parts = [(key, saved[key], given[key]) for key in saved]
    if not parts:
        return [f"{name}: {_shown(saved)} -> {_shown(given)}"]
    return [text for key, before, now in parts for text in _differences(f"{name}.{key}", before, now)]


def _shown(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if not isinstance(value, dict):
        return repr(value)
    if "unsaved" in value:
        return f"your own {value['unsaved']}"
    inside = value.get("mapping", value)
    fields = ", ".join(f"{name}={_text(item)}" for name, item in inside.items() if name != "kind")
    return f"{str(value.get('kind', '')).rpartition('.')[2]}({fields})"

"""The saved state of an optimizer, compared with the running one: parameters, options, and what it keeps of each parameter."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from segue.checkpoint import changes, packing
from segue.errors import CheckpointError

# What torch's optimizers keep in the shape of the parameter, and as one number, under the names that they give it.
SHAPED = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"),
    *("sum", "ax", "prev", "step_size"),
)
NUMBERS = ("step", "mu_product", "eta", "mu")
KEPT = {
    "Adadelta": {"step", "square_avg", "acc_delta"},
    "Adagrad": {"step", "sum"},
    "Adam": {"step", "exp_avg", "exp_avg_sq"},
    "AdamW": {"step", "exp_avg", "exp_avg_sq"},
    "Adamax": {"step", "exp_avg", "exp_inf"},
    "ASGD": {"step", "eta", "mu", "ax"},
    "Muon": {"momentum_buffer"},
    "NAdam": {"step", "mu_product", "exp_avg", "exp_avg_sq"},
    "RAdam": {"step", "exp_avg", "exp_avg_sq"},
    "RMSprop": {"step", "square_avg"},
    "Rprop": {"step", "prev", "step_size"},
    "SGD": set[str](),
}
KEPT_BY_OPTION = {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum", "grad_avg": "centered"}
MOST_STEPS = 2**53  # beyond which a float does not count


def parameters_of(optimizer: Optimizer, model: nn.Module) -> list[list[Any]]:
    """Return the name in the model, if it has one, and the shape of every parameter in an optimizer, group by group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[[names.get(id(p)), list(p.shape)] for p in group["params"]] for group in optimizer.param_groups]


def fitting(
    saved: dict[str, Any], known: list[list[Any]] | None, optimizer: Optimizer, model: nn.Module, allow_changes: Collection[str]
) -> dict[str, Any]:
    """Return the state that an optimizer takes over, after checking all of it; what must be equal is its own."""
    own = optimizer.state_dict()["param_groups"]
    _require_same_parameters(optimizer, model, own, saved["param_groups"], known)
    progress = _progress(optimizer)
    before, now = ([_without(group, progress) for group in groups] for groups in (saved["param_groups"], own))
    changes.require_same(changes.of_optimizer(before), changes.of_optimizer(now), allow_changes)
    groups = changes.taken_options(saved["param_groups"], own, allow_changes)
    groups = [group | _moved(old, group, progress) for old, group in zip(saved["param_groups"], groups, strict=True)]
    _require_kept(optimizer, groups, saved["state"])
    return packing.sharded_state({"state": saved["state"], "param_groups": groups}, optimizer)


def _progress(optimizer: Optimizer) -> set[str]:
    """Return the entries of groups in which an optimizer that is not torch's keeps its own progress, and no setting of a user.

    Those are entries that its constructor does not take: the step and sums of schedule-free optimizers, Prodigy's estimates.
    """
    if _expected(optimizer, {}) is not None:
        return set()
    taken = inspect.signature(type(optimizer)).parameters
    free = {"params", *changes.OPTIMIZER_FREE}
    return {name for group in optimizer.param_groups for name in group if name not in taken and name not in free}


def _without(group: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in names}


def _moved(saved: dict[str, Any], own: dict[str, Any], progress: set[str]) -> dict[str, Any]:
    """Return an optimizer's progress in a checkpoint; it has the form of its own, and is finite."""
    for name in progress:
        if name not in saved or not changes.same_form(saved[name], own[name]):
            raise ValueError(f"the {name} of the optimizer is {saved.get(name)!r:.40}")
    return {name: saved[name] for name in progress}


def _require_same_parameters(
    optimizer: Optimizer, model: nn.Module, own: list[Any], groups: list[Any], known: list[list[Any]] | None
) -> None:
    held = parameters_of(optimizer, model)
    sizes, before = [len(group) for group in held], [len(group["params"]) for group in groups]
    if sizes != before:
        raise _other_parameters(f"It has groups of {sizes} parameters, the checkpoint of {before}.")
    if known is not None:  # version 0.1.0 saved no names
        for number, (ours, theirs) in enumerate(zip(held, known, strict=True)):
            for index, (here, there) in enumerate(zip(ours, theirs, strict=True)):
                if here != there:
                    raise _other_parameters(f"Parameter {index} of group {number} is {_named(here)}, was {_named(there)}.")
    for number, (ours, theirs) in enumerate(zip(own, groups, strict=True)):
        if list(theirs["params"]) != ours["params"]:
            raise ValueError(f"the parameters of group {number} are numbered {theirs['params']!r:.80}")


def _require_kept(optimizer: Optimizer, groups: list[dict[str, Any]], state: dict[Any, dict[str, Any]]) -> None:
    """Refuse what an optimizer cannot have kept: torch's own are known, of others each parameter is compared with the rest."""
    held = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    group_of = {index: group for group in groups for index in group["params"]}
    if strange := [index for index in state if index not in held]:
        raise ValueError(f"it has the state of a parameter {strange[0]!r:.40}, of {len(held)}")
    types: dict[str, type] = {}
    for index, kept in state.items():
        expected = _expected(optimizer, group_of[index])
        if kept and expected is not None and kept.keys() != expected:
            found = f"parameter {index} has {sorted(kept)!s:.200}, {type(optimizer).__name__} keeps {sorted(expected)}"
            raise ValueError(found)
        for name, value in kept.items():
            if expected is not None and not isinstance(value, Tensor):
                raise ValueError(f"the {name} of parameter {index} is {value!r:.40}")
            _require_plausible(index, held[index], name, value)
            if value is not None and types.setdefault(name, type(value)) is not type(value):
                raise ValueError(f"the {name} of parameter {index} is {value!r:.40}, that of others a {types[name].__name__}")


def _expected(optimizer: Optimizer, group: dict[str, Any]) -> set[str] | None:
    """Return the names of what one of torch's own optimizers keeps of a parameter, None for any other."""
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind or kind.__name__ not in KEPT:
        return None
    return KEPT[kind.__name__] | {name for name, option in KEPT_BY_OPTION.items() if group.get(option)}


def _require_plausible(index: int, parameter: Tensor, name: str, value: Any) -> None:
    if isinstance(value, Tensor) and name in SHAPED:
        if value.shape != parameter.shape:
            shapes = f"{tuple(parameter.shape)}, its {name} in the checkpoint {tuple(value.shape)}"
            raise _other_parameters(f"Parameter {index} has the shape {shapes}.")
        if packing.kind(value) != packing.kind(parameter):
            raise _other_parameters(f"Parameter {index} is {parameter.dtype}, its {name} {value.dtype}.")
    elif isinstance(value, Tensor) and name in NUMBERS:
        if not (value.dim() == 0 and value.is_floating_point() and 0 <= value < math.inf):
            raise _other_parameters(f"The {name} of parameter {index} is {value.dtype} {tuple(value.shape)}.")
    elif isinstance(value, float) and math.isnan(value):
        raise ValueError(f"the {name} of parameter {index} is nan")
    elif name == "step" and isinstance(value, int | float) and not 0 <= value < MOST_STEPS:
        raise ValueError(f"the number of steps of parameter {index} is {value!r:.40}")


def _named(parameter: list[Any]) -> str:
    name, shape = parameter
    return f"{name or 'one outside the model'} {tuple(shape)}"


def _other_parameters(found: str) -> CheckpointError:
    return CheckpointError(
        "the optimizer does not hold the parameters of the checkpoint in their order.",
        found,
        "build it as before: of handover.parameters(), in the same groups. Nothing was changed.",
    )

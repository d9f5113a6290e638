"""Rebuilding: make an empty twin of a model from its configuration, and describe what its constructor has set."""

from __future__ import annotations

import copy
import inspect
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SMALL = 20_000_000  # parameters of a twin that may be made in memory where its constructor cannot make one without weights
NOT_BUILT = ("training", "gradient_checkpointing")  # settings of modules that change after they are built


@dataclass(frozen=True)
class Recipe:
    """How a model is made from plain data, and how changed data is written into its configurations."""

    model: nn.Module
    data: dict[str, Any]  # the configuration, as it is saved
    make: Callable[[dict[str, Any]], nn.Module]

    def twin(self, data: dict[str, Any]) -> nn.Module | None:
        """Build the model that this data describes, without weights if possible; None if its constructor refuses."""
        small = sum(p.numel() for p in self.model.parameters()) < SMALL
        for device in ("meta", "cpu") if small else ("meta",):
            try:
                with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.device(device):
                    warnings.simplefilter("ignore")
                    return self.make(copy.deepcopy(data))
            except Exception:  # whatever a user's or a library's constructor raises
                continue
        return None

    def write_(self, before: nn.Module, after: nn.Module) -> None:
        """Write into the configurations of the model what differs between those of two twins."""
        old, new = dict(before.named_modules()), dict(after.named_modules())
        for name, module in self.model.named_modules():
            parts = [getattr(found, "config", None) for found in (module, old.get(name), new.get(name))]
            if not any(part is None for part in parts):
                _write_differences(module, *parts)


def recipe_for(model: nn.Module) -> Recipe | None:
    """Find out how a model is made: from a configuration of transformers or diffusers, or from one such as nanoGPT's."""
    config: Any = getattr(model, "config", None)
    kind: Any = type(model)
    if any(base.__name__ == "FSDPModule" for base in kind.__mro__):
        kind = kind.__bases__[-1]
    if hasattr(config, "to_json_string") and hasattr(type(config), "from_dict"):

        def saved(data: dict[str, Any]) -> nn.Module:
            read = type(config).from_dict
            return kind(read(json.loads(read(data).to_json_string())))  # type: ignore[no-any-return]

        return Recipe(model, config.to_dict(), saved)
    if hasattr(model, "register_to_config") and hasattr(kind, "from_config"):
        data = {key: value for key, value in dict(config).items() if not key.startswith("_")}
        return Recipe(model, data, kind.from_config)
    if hasattr(config, "__dict__") and not isinstance(config, nn.Module) and _takes_one_argument(kind):

        def plain(data: dict[str, Any]) -> nn.Module:
            changed = copy.copy(config)
            vars(changed).update(data)
            return kind(changed)  # type: ignore[no-any-return]

        return Recipe(model, copy.deepcopy(vars(config)), plain)
    return None


def _takes_one_argument(kind: type[nn.Module]) -> bool:
    needed = [
        p for p in inspect.signature(kind).parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    return len(needed) == 1


def entries(module: nn.Module) -> dict[str, Any]:
    """Describe what a constructor sets: the classes of modules, their plain attributes, the shapes of what is saved."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        place = f"{name}." if name else ""
        found[f"{place}(class)"] = type(part).__name__
        found |= {f"{place}{key}": value for key, value in vars(part).items() if key not in NOT_BUILT and _is_plain(key, value)}
        saved = {key: b for key, b in part._buffers.items() if key not in part._non_persistent_buffers_set}
        for key, tensor in (*part._parameters.items(), *saved.items()):
            if tensor is not None:
                found[f"{place}{key} (shape)"] = tuple(tensor.shape)
    return found


def _is_plain(key: str, value: object) -> bool:
    if isinstance(value, list | tuple):
        return not key.startswith("_") and all(_is_plain("", one) for one in value)
    return not key.startswith("_") and isinstance(value, bool | int | float | str | None)


def _write_differences(module: Any, config: Any, before: Any, after: Any) -> None:
    if hasattr(module, "register_to_config"):
        changed = {key: value for key, value in dict(after).items() if dict(before).get(key) != value and key[0] != "_"}
        if changed:
            module.register_to_config(**changed)
        return
    if not all(hasattr(one, "__dict__") for one in (config, before, after)):
        return
    for key, value in vars(after).items():
        old = vars(before).get(key)
        if hasattr(value, "to_dict") and hasattr(vars(config).get(key), "__dict__"):
            _write_differences(nn.Module(), vars(config)[key], old, value)
        elif old != value:
            vars(config)[key] = copy.deepcopy(value)

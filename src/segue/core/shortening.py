"""Shortening: what a model needs when several of its layers have become one: a shorter list, new numbers, an honest config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from segue.sites import Site


def shorten_(model: nn.Module, sites: list[Site]) -> Callable[[], None]:
    """Take the layers that spans passed by out of their lists, and return what undoes it."""
    undo: list[Callable[[], None]] = []
    gone: dict[str, set[str]] = {}
    for site in sites:
        for name in site.members[1:]:
            layers, _, number = name.rpartition(".")
            gone.setdefault(layers, set()).add(number)
    for layers, numbers in gone.items():
        undo.append(_shorten(model, layers, numbers))

    def undo_all() -> None:
        for step in reversed(undo):
            step()

    return undo_all


def finished_name(name: str, sites: list[Site]) -> str:
    """Return the name that a parameter will have when the passed layers are gone.

    >>> span = Site("layers.0", members=("layers.0", "layers.1"))
    >>> finished_name("layers.2.weight", [span])
    'layers.1.weight'
    """
    gone = [member.rpartition(".") for site in sites for member in site.members[1:]]
    for layers in {layers for layers, _, _ in gone}:
        if name.startswith(f"{layers}."):
            number, dot, rest = name.removeprefix(f"{layers}.").partition(".")
            earlier = sum(place == layers and int(passed) < int(number) for place, _, passed in gone)
            return f"{layers}.{int(number) - earlier}{dot}{rest}"
    return name


def _shorten(model: nn.Module, layers: str, numbers: set[str]) -> Callable[[], None]:
    container = model.get_submodule(layers)
    before = dict(container._modules)
    kept = {number: module for number, module in before.items() if number not in numbers}
    container._modules.clear()
    container._modules.update({str(i): module for i, module in enumerate(kept.values())})

    changes: list[tuple[Any, str, Any]] = []

    def change(target: Any, attribute: str, value: Any) -> None:
        changes.append((target, attribute, getattr(target, attribute)))
        setattr(target, attribute, value)

    for new, module in enumerate(kept.values()):
        for part in module.modules() if module is not None else ():
            if isinstance(getattr(part, "layer_idx", None), int):
                change(part, "layer_idx", new)
    for config in _configurations(model, layers):
        if getattr(config, "num_hidden_layers", None) == len(before):
            kinds = getattr(config, "layer_types", None)
            if isinstance(kinds, list) and len(kinds) == len(before):
                change(config, "layer_types", [kind for i, kind in enumerate(kinds) if str(i) not in numbers])
            change(config, "num_hidden_layers", len(kept))
    features = getattr(model, "feature_info", None)  # timm's list of what each block returns
    if isinstance(features, list) and len(features) == len(before):
        change(model, "feature_info", features[: len(kept)])

    def undo() -> None:
        for target, attribute, value in reversed(changes):
            setattr(target, attribute, value)
        container._modules.clear()
        container._modules.update(before)

    return undo


def _configurations(model: nn.Module, layers: str) -> list[Any]:
    """Find the configurations of what contains the list, and of what it contains, each once."""
    parts = layers.split(".")
    around = [model.get_submodule(".".join(parts[:cut])) for cut in range(len(parts) + 1)]
    inside = model.get_submodule(layers).modules()
    found = {id(m.config): m.config for m in (*around, *inside) if hasattr(m, "config") and not isinstance(m.config, nn.Module)}
    return list(found.values())

"""Surgery: put modules in place and back, shorten lists of layers, and free what has left the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from segue.errors import HandoverError, SiteError
from segue.sites import Site, is_seam
from segue.students.layers import Chain, Passthrough


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Place a module at a dotted name."""
    parent, _, leaf = name.rpartition(".")
    place = model.get_submodule(parent)
    getattr(place, "_orig_mod", place).register_module(leaf, module)  # torch.compile(part) wraps it


def put_at(model: nn.Module, site: Site, module: nn.Module) -> None:
    """Place a module at a site, under all its names."""
    for name in site.names:
        put(model, name, module)


def teacher_at(model: nn.Module, site: Site) -> nn.Module:
    """Return the original at a site: its module, or the chain of a span's layers."""
    if not site.is_span:
        return model.get_submodule(site.name)
    return Chain([model.get_submodule(name) for name in site.members])


def put_in_place(model: nn.Module, site: Site, module: nn.Module, teacher: nn.Module) -> None:
    """Place a module at a site; the other layers of a span return their input."""
    put_at(model, site, module)
    if isinstance(teacher, Chain):
        for name in site.members[1:]:
            put(model, name, Passthrough(teacher.in_tuples))


def put_back(model: nn.Module, site: Site, teacher: nn.Module) -> None:
    """Place the original at its site again."""
    put_at(model, site, teacher)
    if isinstance(teacher, Chain):
        for name, layer in zip(site.members, teacher.layers, strict=True):
            put(model, name, layer)


@contextmanager
def in_place_of_seams(model: nn.Module, modules: dict[Site, nn.Module]) -> Iterator[None]:
    """Put plain modules in place of the seams while a `with` block runs."""
    seams = {site: model.get_submodule(site.name) for site in modules}
    try:
        for site, module in modules.items():
            put_at(model, site, module)
        yield
    finally:
        for site, seam in seams.items():
            put_at(model, site, seam)


def finished(student: nn.Module) -> nn.Module:
    """Return what stays of a student when the handover ends: itself, unless it says otherwise (adapters fold)."""
    finish = getattr(student, "finished", None)
    left = finish() if callable(finish) else student
    assert isinstance(left, nn.Module)
    return left.train(student.training)


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse what is not the model itself: the wrapper would keep the old parameters or graphs."""
    kinds = {cls.__name__ for cls in type(model).__mro__}
    wrappers = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "OptimizedModule")
    wrapper = next((name for name in wrappers if name in kinds), None)
    if wrapper is not None:
        raise HandoverError(
            f"the model is wrapped by {wrapper}.",
            "The wrapper keeps the parameters that are about to be replaced.",
            "call replace_ on the plain model first, then wrap, shard or compile it. Nothing was changed.",
        )


def refuse_running(model: nn.Module) -> None:
    """Refuse a second handover in one model: it would freeze the students of the first."""
    running = next((name for name, module in model.named_modules() if is_seam(module)), None)
    if running is not None:
        raise HandoverError(
            "a model can have one handover at a time.",
            f"Another one is running in this model; it has a seam at {running!r}.",
            "put all sites in one plan (PerSite gives them schedules of their own), or finish the first.",
        )


def refuse_tied(model: nn.Module, sites: list[Site]) -> None:
    """Refuse a site that shares a parameter with another site or with the model around it: its student will not."""
    owners = {name: site.name for site in sites for name in (*site.names, *site.members)}
    found: dict[int, tuple[str, str | None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        around = (".".join(parts[:cut]) for cut in range(1, len(parts)))
        owner = next((owners[place] for place in around if place in owners), None)
        # two parameters on one memory are tied too; quantised and sharded kinds have no plain memory
        key = (parameter.data_ptr() if type(parameter) is nn.Parameter else 0) or id(parameter)
        other, others_owner = found.setdefault(key, (name, owner))
        if owner != others_owner:
            mine, theirs = (name, other) if owner is not None else (other, name)
            place, _, attribute = mine.rpartition(".")
            raise SiteError(
                f"site {owner or others_owner!r} shares the parameter {mine!r} with another part of the model.",
                f"It is also {theirs!r}. A student has parameters of its own, so the finished model would not be tied.",
                "choose one site that contains both, or untie them before: with module = "
                f"model.get_submodule({place!r}), module.{attribute} = nn.Parameter(module.{attribute}.detach().clone()). "
                "Nothing was changed.",
            )


def unreached(name: str) -> HandoverError:
    """Return the error for a site that a forward does not call."""
    return HandoverError(
        f"the model does not call site {name!r}.",
        "Its module is unused, or another path of the code computes its work.",
        "choose sites that every forward calls, or plan with unreached='ignore' for experts and skipped layers.",
    )


def is_compiled(model: nn.Module, name: str) -> bool:
    """Return whether a module runs in compiled code, which does not report its calls."""
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:cut])) for cut in range(len(parts) + 1)]
    return any(module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in around)


def free(modules: list[nn.Module], model: nn.Module) -> None:
    """Free the parameters of modules that have left the model, where a distributed wrapper keeps them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    in_use = {id(parameter) for parameter in model.parameters()}
    for module in modules:
        for parameter in module.parameters():
            if id(parameter) in in_use:
                continue
            if hasattr(parameter, "to_local"):
                parameter.to_local().untyped_storage().resize_(0)  # FSDP has other tensors on this storage
            else:
                parameter.data = parameter.data.new_empty(0)  # other tensors on its storage, as in a user's state_dict, stay


def shorten_(model: nn.Module, sites: list[Site]) -> None:
    """Take the layers that a span no longer needs out of their lists, with new numbers and counts."""
    gone: dict[str, set[str]] = {}
    for site in sites:
        for name in site.members[1:]:
            layers, _, number = name.rpartition(".")
            gone.setdefault(layers, set()).add(number)
    for layers, numbers in gone.items():
        _shorten(model, layers, numbers)


def finished_name(name: str, sites: list[Site]) -> str:
    """Return the name that a parameter has when the layers that spans no longer need are gone.

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


def _shorten(model: nn.Module, layers: str, numbers: set[str]) -> None:
    container = model.get_submodule(layers)
    before = len(container._modules)
    kept = [module for number, module in container._modules.items() if number not in numbers]
    container._modules.clear()
    container._modules.update({str(i): module for i, module in enumerate(kept)})
    for new, module in enumerate(kept):
        for part in module.modules() if module is not None else ():
            if isinstance(getattr(part, "layer_idx", None), int):
                part.layer_idx = new  # type: ignore[assignment]
    for config in _configurations(model, layers):
        if getattr(config, "num_hidden_layers", None) == before:
            kinds = getattr(config, "layer_types", None)
            if isinstance(kinds, list) and len(kinds) == before:
                config.layer_types = [kind for i, kind in enumerate(kinds) if str(i) not in numbers]
            config.num_hidden_layers = len(kept)
    features = getattr(model, "feature_info", None)  # timm's list of what each block returns
    if isinstance(features, list) and len(features) == before:
        model.feature_info = features[: len(kept)]  # type: ignore[assignment]


def _configurations(model: nn.Module, layers: str) -> list[Any]:
    """Find the configurations of what contains the list, and of what it contains, each once."""
    parts = layers.split(".")
    around = [model.get_submodule(".".join(parts[:cut])) for cut in range(len(parts) + 1)]
    inside = model.get_submodule(layers).modules()
    found = {id(m.config): m.config for m in (*around, *inside) if hasattr(m, "config") and not isinstance(m.config, nn.Module)}
    return list(found.values())

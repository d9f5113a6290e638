"""Surgery: put modules in place and back, and free what has left the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from segue.core.seam import Seam
from segue.core.shortening import shorten_
from segue.core.span import SpanLayer, SpanSeam
from segue.core.transaction import restored
from segue.errors import HandoverError, SiteError
from segue.sites import Site, is_seam
from segue.students.layers import Chain, layers_of


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


def seam_at(model: nn.Module, site: Site, student: nn.Module) -> Seam:
    """Make the seam for a site; nothing changes yet."""
    kind = SpanSeam if site.is_span else Seam
    return kind(teacher_at(model, site), student, site)


def put_in_place(model: nn.Module, seam: Seam) -> None:
    """Place a seam at its site, and what belongs to it at the other layers of a span."""
    put_at(model, seam.site, seam)
    if isinstance(seam, SpanSeam):
        for place, name in enumerate(seam.site.members[1:], start=1):
            put(model, name, SpanLayer(seam, place))


def put_back(model: nn.Module, site: Site, teacher: nn.Module) -> None:
    """Place the original at its site again: all layers of a span."""
    first, *others = layers_of(teacher)
    put_at(model, site, first)
    for name, layer in zip(site.members[1:], others, strict=True):
        put(model, name, layer)


@contextmanager
def original_in_place(model: nn.Module, seams: Iterable[Seam]) -> Iterator[None]:
    """Put the teachers in place of the seams while a `with` block runs."""
    seams = list(seams)
    try:
        for seam in seams:
            put_back(model, seam.site, seam.require_teacher())
        yield
    finally:
        for seam in seams:
            put_in_place(model, seam)


@contextmanager
def finished_in_place(model: nn.Module, sites: list[Site], students: dict[str, nn.Module]) -> Iterator[None]:
    """Put the students in place, and take the layers that spans no longer need out, while a `with` block runs."""
    with restored(model, *(part for student in students.values() for part in student.modules())):
        for site in sites:
            put_at(model, site, students[site.name])
        shorten_(model, sites)
        yield


def finished(student: nn.Module) -> nn.Module:
    """Return what stays of a student when the handover ends: itself, unless it says otherwise (adapters fold)."""
    finish = getattr(student, "finished", None)
    left = finish() if callable(finish) else student
    assert isinstance(left, nn.Module)
    left.train(student.training)  # which need not return the module: timm's LeViT does not
    return left


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

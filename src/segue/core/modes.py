"""Modes: which modules are in training and which parameters train, and how they were before the surgery."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from segue.core.tensor_files import sharded_like
from segue.sites import Site


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode while a `with` block runs, and restore each one's own mode."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode


@contextmanager
def plain_attention() -> Iterator[None]:
    """Switch torch's fused encoder path off, which computes attention without calling the attention module."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


class PinnedModes:
    """Replace `model.train` so that a frozen backbone stays in evaluation while its students train.

    Modules that contain a site follow the mode, because frameworks ask them for it (gradient checkpointing does).
    """

    def __init__(self, model: nn.Module, pinned: list[nn.Module]) -> None:
        self.model = model
        self.pinned = pinned

    def __call__(self, mode: bool = True) -> nn.Module:
        type(self.model).train(self.model, mode)
        for module in self.pinned:
            module.training = False
        return self.model


def pinned_modules(model: nn.Module, sites: list[Site]) -> list[nn.Module]:
    """Return the modules that stay in evaluation: all but the seams and what contains them."""
    names = [name for site in sites for name in site.names]
    follow = {id(module) for name in names for module in model.get_submodule(name).modules()}
    for name in names:
        parts = name.split(".")
        follow |= {id(model.get_submodule(".".join(parts[:cut]))) for cut in range(len(parts))}
    return [module for module in model.modules() if id(module) not in follow]


class Snapshot:
    """What a handover changes besides the modules: which parameters train, each module's mode, a backbone that trains."""

    def __init__(self, model: nn.Module) -> None:
        self.gradients = [(p, p.requires_grad) for p in model.parameters()]
        self.modes = [(m, m.training) for m in model.modules()]
        self.mode = model.training
        self.tensors: dict[str, Tensor] = {}

    def keep_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Copy values that training will change, to main memory."""
        self.tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def forget(self, module: nn.Module) -> None:
        """Drop a module that will not come back, so that its memory can be freed."""
        gone = {id(x) for x in (*module.parameters(), *module.modules())}
        self.gradients = [(p, flag) for p, flag in self.gradients if id(p) not in gone]
        self.modes = [(m, mode) for m, mode in self.modes if id(m) not in gone]

    def restore(self, model: nn.Module) -> None:
        for parameter, flag in self.gradients:
            parameter.requires_grad_(flag)
        if model.training == self.mode:
            for module, mode in self.modes:
                module.training = mode
        else:
            model.train(model.training)

    def restore_tensors(self, model: nn.Module) -> None:
        state = model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, value in self.tensors.items():
                state[name].copy_(sharded_like(value, state[name]))

"""Modes: which modules are in training, which parameters train, and how that was before the handover."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from segue.core.tensor_files import sharded_like
from segue.plan import Plan
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


class Backbone:
    """The model around the sites: which parameters train, which modules are pinned, and how all of it was before."""

    def __init__(self, model: nn.Module, plan: Plan, sites: list[Site]) -> None:
        self.model, self.plan, self.sites = model, plan, sites
        self._flags = [(p, p.requires_grad) for p in model.parameters()]
        self._modes = [(m, m.training) for m in model.modules()]
        self._mode = model.training
        self._tensors: dict[str, Tensor] = {}

    def freeze(self) -> None:
        """Freeze what the plan does not train, and copy what training will change to main memory."""
        if self.plan.train == "students":
            for _, parameter in self._around(self.model.named_parameters()):
                parameter.requires_grad_(False)
        self._tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.changing().items()}
        if pinned := self._pinned():
            self.model.train = PinnedModes(self.model, pinned)  # type: ignore[method-assign]
            self.model.train(self.model.training)

    def changing(self) -> dict[str, Tensor]:
        """Return what training changes around the sites, by name."""
        state = self.model.state_dict(keep_vars=True).items()
        if self.plan.train == "all":
            frozen = {name for name, p in self.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
            return {name: x for name, x in self._around(state) if name not in frozen}
        if self.plan.backbone == "train":
            buffers = {name for name, _ in self.model.named_buffers()}
            return {name: x for name, x in self._around(state) if name in buffers}
        return {}

    def original(self) -> dict[str, Tensor]:
        """Return what is around the sites as it was before, by name."""
        return {**dict(self._around(self.model.state_dict().items())), **self._tensors}

    def forget(self, module: nn.Module) -> None:
        """Drop a module that will not come back, so that its memory can be freed."""
        gone = {id(x) for x in (*module.parameters(), *module.modules())}
        self._flags = [(p, flag) for p, flag in self._flags if id(p) not in gone]
        self._modes = [(m, mode) for m, mode in self._modes if id(m) not in gone]

    def restore(self) -> None:
        """Unfreeze and unpin; a model whose mode has changed meanwhile keeps its new one."""
        if isinstance(self.model.__dict__.get("train"), PinnedModes):
            del self.model.__dict__["train"]
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)
        if self.model.training == self._mode:
            for module, mode in self._modes:
                module.training = mode
        else:
            self.model.train(self.model.training)

    def restore_tensors(self) -> None:
        """Bring back the values that training has changed; if that fails or is interrupted, none of them."""
        state = self.model.state_dict(keep_vars=True)
        changes = [(state[name], sharded_like(value, state[name])) for name, value in self._tensors.items()]
        trained = [tensor.detach().to("cpu", copy=True) for tensor, _ in changes]
        try:
            with torch.no_grad():
                for tensor, value in changes:
                    tensor.copy_(value)
        except BaseException:
            with torch.no_grad():
                for (tensor, _), value in zip(changes, trained, strict=True):
                    tensor.copy_(value)
            raise

    def _around(self, named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        inside = tuple(f"{name}." for site in self.sites for name in site.names)
        return ((name, value) for name, value in named if not name.startswith(inside))

    def _pinned(self) -> list[nn.Module]:
        """Return the modules that stay in evaluation: all but the seams and what contains them."""
        if self.plan.train == "all" or self.plan.backbone == "train":
            return []
        names = [name for site in self.sites for name in site.names]
        follow = {id(module) for name in names for module in self.model.get_submodule(name).modules()}
        for name in names:
            parts = name.split(".")
            follow |= {id(self.model.get_submodule(".".join(parts[:cut]))) for cut in range(len(parts))}
        return [module for module in self.model.modules() if id(module) not in follow]

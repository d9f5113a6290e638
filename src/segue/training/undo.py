"""Undo: a training that fails or is stopped leaves the model as it was before."""

from __future__ import annotations

import copy
import shutil
import signal
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from segue.core import tensor_files
from segue.core.handover import Handover
from segue.core.tensor_files import same_bits
from segue.errors import SegueWarning

PREFIX = ".released-"  # of the folders in which released teachers wait for the end of a training


class Undo:
    """Restore a model when the `with` block of its training fails.

    What training changes of a plain model is copied to main memory (a handover copies what it trains of the backbone itself),
    as are all buffers. Teachers that a plan releases wait in a file. A model that FSDP2 has sharded stays as it is.
    """

    def __init__(self, model: nn.Module, *, copies_weights: bool, folder: Path | None, sharded: bool) -> None:
        self.model, self.sharded = model, sharded
        self.handover: Handover | None = None
        self.released = Released(model, folder)
        self._original = Original(model, copies_weights=copies_weights and not sharded)

    def follow(self, handover: Handover) -> None:
        """Undo this handover too."""
        self.handover = handover
        if not self.sharded:
            handover.on_release = self.released.keep

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is not None and self.sharded:
                if hasattr(error, "add_note"):  # from Python 3.11 on
                    error.add_note("The model stays sharded over the processes, as the training left it: build it again.")
            elif error is not None:
                with _uninterrupted():
                    self._restore()
        finally:
            self.released.close()
            if self.handover is not None:
                self.handover.on_release = None

    def _restore(self) -> None:
        if self.handover is not None:
            for name, seam in self.handover.seams.items():
                if seam.teacher is None:
                    seam.teacher = self.released.teacher(name)
            self.handover.cancel_()
        self._original.restore()


class Original:
    """What a model is like before a training: the values of what may change, and all modes and flags, by name."""

    def __init__(self, model: nn.Module, *, copies_weights: bool) -> None:
        self.model = model
        self._modes = {name: module.training for name, module in model.named_modules()}
        parameters = dict(model.named_parameters())
        self._flags = {name: (p.requires_grad, p.device, p.grad) for name, p in parameters.items()}
        trained = {name: p for name, p in parameters.items() if copies_weights and p.requires_grad}
        self._values = {name: p.detach().to("cpu", copy=True) for name, p in trained.items()}
        self._buffers = {
            name: {key: None if b is None else (b.device, b.detach().to("cpu", copy=True)) for key, b in m._buffers.items()}
            for name, m in model.named_modules()
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Give everything back."""
        modules = dict(self.model.named_modules())  # from which the model's own code may have removed some
        for name in self._modes.keys() & modules.keys():
            modules[name].training = self._modes[name]
        for name, parameter in self.model.named_parameters():
            if name not in self._flags:  # the model's own code has added it
                continue
            flag, device, gradient = self._flags[name]
            if parameter.device != device:
                parameter.data = parameter.data.to(device)
            if name in self._values:
                parameter.copy_(self._values[name])
            parameter.requires_grad_(flag)
            parameter.grad = gradient
        for name in self._buffers.keys() & modules.keys():
            buffers = self._buffers[name]
            for key in [key for key in modules[name]._buffers if key not in buffers]:
                delattr(modules[name], key)
            for key, kept in buffers.items():
                modules[name]._buffers[key] = None if kept is None else _with_values(modules[name]._buffers.get(key), *kept)


def _with_values(now: Tensor | None, device: torch.device, values: Tensor) -> Tensor:
    """Return the tensor itself where it can take the values or has them, else another one."""
    if now is None or (now.device, now.dtype, now.shape) != (device, values.dtype, values.shape):
        return values.to(device)
    if not same_bits(now.cpu(), values):
        now.copy_(values)
    return now


@dataclass(frozen=True)
class Waiting:
    """A released teacher: itself while others hold it, else its modules without weights, which are in a file."""

    module: weakref.ref[nn.Module]
    shell: nn.Module
    tensors: dict[str, tuple[weakref.ref[Tensor], Tensor]]  # the original, and the empty one that stands for it in the shell
    path: Path


class Released:
    """Teachers that leave the memory at takeover, kept in a file until the training ends."""

    def __init__(self, model: nn.Module, folder: Path | None) -> None:
        self.model, self.parent = model, folder
        self.folder: Path | None = None
        self._waiting: dict[str, Waiting | nn.Module] = {}

    def keep(self, name: str, teacher: nn.Module) -> None:
        """Write a teacher that is about to be released; where that is impossible, keep it in memory and say so."""
        try:
            self._waiting[name] = self._written(name, teacher)
        except Exception as error:  # of a full disk, or of a module that cannot be copied
            self._waiting[name] = teacher
            warnings.warn(
                f"the teacher at site {name!r} stays in memory until the training ends, because it cannot be written to a "
                f"temporary file ({type(error).__name__}: {error}). A failed training needs it to restore the model.",
                SegueWarning,
                stacklevel=2,
            )

    def _written(self, name: str, teacher: nn.Module) -> Waiting:
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self.parent))
        inside = {id(module) for module in teacher.modules()}
        tensors = _tensors(teacher)
        empty = {key: _empty_like(tensor) for key, tensor in tensors.items()}
        memo: dict[int, Any] = {id(m): m for m in self.model.modules() if id(m) not in inside}  # what is around is not copied
        outside = [
            t for m in self.model.modules() if id(m) not in inside for t in (*m._parameters.values(), *m._buffers.values())
        ]
        memo |= {id(tensor): empty[key] for key, tensor in tensors.items()}
        memo |= {id(tensor): tensor for tensor in outside if tensor is not None}
        path = self.folder / f"{len(self._waiting)}.safetensors"
        tensor_files.write(path, {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
        pairs = {key: (weakref.ref(tensor), empty[key]) for key, tensor in tensors.items()}
        return Waiting(weakref.ref(teacher), copy.deepcopy(teacher, memo), pairs, path)

    def teacher(self, name: str) -> nn.Module:
        """Return a released teacher with its weights."""
        waiting = self._waiting[name]
        if isinstance(waiting, nn.Module):
            return waiting
        values = tensor_files.read(waiting.path)
        found: dict[int, Tensor] = {}  # what stands for the empty tensors
        for key, (original, empty) in waiting.tensors.items():
            alive = original()
            found[id(empty)] = tensor = empty if alive is None else alive
            if tensor.shape != values[key].shape:  # freed with a distributed wrapper, or empty
                tensor.data = values[key].to(tensor.device)
        if (teacher := waiting.module()) is not None:
            return teacher
        for module in waiting.shell.modules():
            for registered in (module._parameters, module._buffers):
                registered.update({key: found[id(x)] for key, x in registered.items() if id(x) in found})  # type: ignore[misc]
        return waiting.shell

    def close(self) -> None:
        """Forget the teachers, and remove their files."""
        self._waiting.clear()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def remove_released(folder: Path | None) -> None:
    """Remove what a killed training has left of its released teachers."""
    for left in () if folder is None else folder.glob(f"{PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _empty_like(tensor: Tensor) -> Tensor:
    empty = tensor.detach().new_empty(0)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore a second Ctrl-C until the model is restored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""The buffers of a step: what a forward has already changed (batch-norm statistics) when its step is skipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from segue.core.tensor_files import same_bits
from segue.sites import is_seam


@dataclass(frozen=True)
class Kept:
    """A buffer before a step: the tensor itself, how often it had been written to, and its values."""

    tensor: Tensor
    version: int
    values: Tensor


class StepBuffers:
    """Keep the buffers of modules from before a step, and give them back when it is skipped.

    Every buffer is copied once. After that, only modules that update theirs are copied, before each step. They show by
    another tensor, by its version or by its values: kernels such as batch norm's, and code that writes through `.data`, count
    no version, so values are compared too, after 1, 2, 4, 8, ... steps. DDP writes to all buffers, so all of them are copied.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self.roots = list(roots)
        self.copied = 0  # bytes, before the latest step
        self._steps = 0
        self._kept: WeakKeyDictionary[nn.Module, dict[str, Kept | None]] = WeakKeyDictionary()  # teachers may be released
        self._updating: WeakSet[nn.Module] = WeakSet()
        self._saved: dict[str, Tensor] | None = None  # by an earlier process

    @torch.no_grad()
    def keep(self) -> None:
        """Copy what has changed since the last step."""
        self._saved = None
        compare = self._steps & (self._steps - 1) == 0
        self.copied = 0
        for module in self._modules():
            before = self._kept.get(module)
            if before is not None and (module in self._updating or self._has_changed(module, before, compare=compare)):
                self._updating.add(module)
            elif before is not None:
                continue
            self._kept[module] = {name: self._copy(tensor) for name, tensor in module._buffers.items()}
        self._steps += 1

    @torch.no_grad()
    def restore(self) -> None:
        """Give every buffer the values, and every module the tensors, from before the step."""
        self._take_saved()
        for module in self._modules():
            kept = self._kept.get(module, {})
            for name in [name for name in module._buffers if name not in kept]:
                delattr(module, name)
            for name, buffer in kept.items():
                module._buffers[name] = None if buffer is None else buffer.tensor
                if buffer is not None and not same_bits(buffer.tensor, buffer.values):
                    buffer.tensor.copy_(buffer.values)

    def state_dict(self) -> dict[str, Any]:
        """Return the kept values of the buffers that modules update, by name."""
        self._take_saved()
        found: dict[str, Tensor] = {}
        for name, module in self._named():
            kept = self._kept.get(module, {})
            if kept and (module in self._updating or self._has_changed(module, kept, compare=True)):
                found |= {f"{name}/{key}": buffer.values for key, buffer in kept.items() if buffer is not None}
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the values of an earlier process, as soon as they are needed: the model gets its own after this."""
        if not all(isinstance(values, Tensor) for values in state.values()):
            raise ValueError(f"the buffers {list(state)!r:.60} are no tensors")
        self._saved = dict(state)

    def _take_saved(self) -> None:
        if (saved := self._saved) is None:
            return
        self.keep()
        for name, module in self._named():
            for key, now in self._kept[module].items():
                if now is not None and (values := saved.get(f"{name}/{key}")) is not None:
                    self._updating.add(module)
                    values = values.to(now.tensor.device)
                    fits = (values.shape, values.dtype) == (now.tensor.shape, now.tensor.dtype)
                    self._kept[module][key] = Kept(now.tensor if fits else values.clone(), now.version, values)

    def _named(self) -> Iterator[tuple[str, nn.Module]]:
        for place, root in enumerate(self.roots):
            named = root.named_modules()
            yield from ((f"{place}/{name}", module) for name, module in named if module._buffers and not is_seam(module))

    def _modules(self) -> Iterator[nn.Module]:
        """Yield the modules with buffers, except seams, whose weights the handover sets."""
        for root in self.roots:
            yield from (module for module in root.modules() if module._buffers and not is_seam(module))

    def _copy(self, tensor: Tensor | None) -> Kept | None:
        if tensor is None:
            return None
        self.copied += tensor.numel() * tensor.element_size()
        return Kept(tensor, _version(tensor), tensor.detach().clone())

    @staticmethod
    def _has_changed(module: nn.Module, before: dict[str, Kept | None], *, compare: bool) -> bool:
        if list(before) != list(module._buffers):
            return True
        for now, kept in zip(module._buffers.values(), before.values(), strict=True):
            if now is None or kept is None:
                changed = (now is None) != (kept is None)
            else:
                changed = now is not kept.tensor or _version(now) != kept.version
                changed = changed or (compare and not same_bits(now, kept.values))
            if changed:
                return True
        return False


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version

"""Nested state and tensors: taken apart for a file, and put back.

A checkpoint is one JSON tree and one flat table of tensors; where a tensor was, the tree has its name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from segue.checkpoint import folders
from segue.checkpoint.ranks import on_rank_0
from segue.core import tensor_files
from segue.errors import CheckpointError


class TensorBag:
    """Take the tensors out of nested plain data, and put them back."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def pack(self, value: Any, at: str) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            self.tensors[at] = value
            return {"tensor": at}
        if isinstance(value, dict):
            return {"dict": [[self.pack(k, at), self.pack(v, f"{at}/{k}")] for k, v in value.items()]}
        if isinstance(value, tuple | list):
            items = [self.pack(item, f"{at}/{i}") for i, item in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": items}
        raise CheckpointError(
            f"{at} cannot be saved as plain data.",
            f"It is a {type(value).__name__}.",
            "keep numbers, strings and tensors in the state; leave this part out and rebuild it yourself.",
        )

    def unpack(self, data: Any, at: str) -> Any:
        """Put back what was packed under a name; each tensor is at the place that its name says, and none is left over."""
        used: set[str] = set()
        found = self._unpack(data, at, used)
        if left := sorted(name for name in self.tensors if name.startswith(f"{at}/") and name not in used):
            raise ValueError(f"its tensor {left[0]} is in no place")
        return found

    def _unpack(self, data: Any, at: str, used: set[str]) -> Any:
        if not isinstance(data, dict):
            return data
        ((kind, content),) = data.items()
        if kind == "tensor":
            if content != at:
                raise ValueError(f"it has {content!r:.80} at the place of the tensor {at}")
            used.add(at)
            return self.tensors[at].clone()
        if kind not in ("dict", "list", "tuple"):
            raise ValueError(f"it has a part of the unknown kind {kind!r}")
        if not isinstance(content, list):
            raise ValueError(f"{at} has a {kind} of {content!r:.40}")
        if kind == "dict":
            keys = [self._unpack(key, at, used) for key, _ in content]
            if len(set(keys)) < len(keys):
                raise ValueError(f"{at} has the same name twice")
            return {key: self._unpack(value, f"{at}/{key}", used) for key, (_, value) in zip(keys, content, strict=True)}
        items = [self._unpack(item, f"{at}/{index}", used) for index, item in enumerate(content)]
        return tuple(items) if kind == "tuple" else items


def tensor_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state, which must be tensors."""
    state = module.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{type(module).__name__} cannot be saved as tensors.",
                f"Its state {name!r} is a {type(value).__name__}.",
                "keep extra state in tensors (register_buffer).",
            )
    return state


def require_same_shapes(targets: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    """Refuse stored tensors whose shape or kind of number is not that of a model's, before the first is copied."""
    for name in sorted({*targets, *stored}):
        ours: Any = tuple(targets[name].shape) if name in targets else "nothing"
        theirs: Any = tuple(stored[name].shape) if name in stored else "nothing"
        if ours == theirs and kind(targets[name]) != kind(stored[name]):  # a copy would round them in silence
            ours, theirs = targets[name].dtype, stored[name].dtype
        if ours != theirs:
            raise CheckpointError(
                f"the tensor {name.partition('/')[2] or name} of the checkpoint does not fit the model.",
                f"The model has {ours} there, the checkpoint has {theirs}.",
                "build the same model with the same plan first. Nothing was changed.",
            )


def kind(tensor: Tensor) -> str:
    """Return the kind of number that a tensor holds, whatever its precision."""
    if tensor.is_floating_point():
        return "floating"
    return "complex" if tensor.is_complex() else "boolean" if tensor.dtype == torch.bool else "integer"


def copy_(targets: dict[str, Tensor], stored: dict[str, Tensor], undo: list[Callable[[], Any]]) -> None:
    """Move stored tensors into a model's, and note how to bring back what they held; memory holds no third copy for long."""
    for name, target in targets.items():
        here = target.to_local() if hasattr(target, "to_local") else target  # this rank's part of a sharded tensor
        if not here.is_meta:
            undo.append(partial(_overwrite, here.detach(), here.detach().to("cpu", copy=True)))
        _overwrite(target, tensor_files.sharded_like(stored.pop(name), target))


@torch.no_grad()
def _overwrite(target: Tensor, value: Tensor) -> None:
    target.copy_(value)


def with_shared(stored: dict[str, Tensor], targets: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the other names of weights that are stored once: Hugging Face leaves out shared weights."""
    places = {(t.data_ptr(), t.shape, t.stride()): name for name, t in targets.items() if name in stored and t.numel()}
    shared = {name: places.get((t.data_ptr(), t.shape, t.stride())) for name, t in targets.items() if name not in stored}
    return stored | {name: stored[place] for name, place in shared.items() if place is not None}


def sharded_state(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Shard the state of each parameter in an optimizer like the parameter."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for index, kept in state["state"].items():
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.shape == held[index].shape:
                kept[name] = tensor_files.sharded_like(value, held[index])
    return state


def write(folder: Path, state: dict[str, Any], tensors: dict[str, Tensor], keep: int) -> Path:
    """Write from rank 0 and return on every rank where."""
    unique, aliases = _without_aliases({name: tensor_files.full(value) for name, value in tensors.items()})
    state = {**state, "aliases": aliases}
    failed = f"no checkpoint is written to {folder}."
    return Path(on_rank_0(lambda: folders.write(folder, state, unique, keep), failed))


def _without_aliases(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Keep one of the tensors that share memory (tied weights): safetensors stores each once."""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
            continue
        seen[key] = name
        unique[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return unique, aliases

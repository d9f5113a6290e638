"""The dtype of a checkpoint and that of a model: compared, and made the same where a cast is all that differs."""

from __future__ import annotations

from torch import Tensor, dtype, nn

from segue.checkpoint.restoring import Undo
from segue.core import surgery, tensor_files
from segue.errors import CheckpointError
from segue.sites import Site


def dtype_of(tensors: dict[str, Tensor]) -> dtype | None:
    """Return the one floating dtype of tensors, or None if there are several or none."""
    found = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    return found.pop() if len(found) == 1 else None


def teacher_hashes(model: nn.Module, sites: list[Site], cast: dtype | None = None) -> dict[str, str]:
    """Hash the teachers of a plain model, as they are or as they would be after a cast."""
    states = {site.name: surgery.teacher_at(model, site).state_dict() for site in sites}
    if cast is not None:
        states = {name: {key: _cast(value, cast) for key, value in state.items()} for name, state in states.items()}
    return {name: tensor_files.fingerprint(state) for name, state in states.items()}


def _cast(tensor: Tensor, to: dtype) -> Tensor:
    return tensor.to(to) if tensor.is_floating_point() else tensor


def cast_(model: nn.Module, to: dtype, undo: Undo) -> None:
    """Cast a model, and note how to bring back what a cast loses."""
    values = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]

    def back() -> None:
        for parameter, value in values:
            parameter.data = value
        for module, held in buffers:
            module._buffers.update(held)

    undo.append(back)
    model.to(to)


def require_same(targets: dict[str, Tensor], stored: dict[str, Tensor], where: str) -> None:
    """Refuse a checkpoint of another dtype than the model, with the call that makes them the same."""
    for name, target in targets.items():
        if name in stored and stored[name].dtype != target.dtype:
            raise CheckpointError(
                f"the checkpoint is {stored[name].dtype}, the model {target.dtype}.",
                f"They differ first at {name.partition('/')[2] or name}; a copy would round, or not resume bit for bit.",
                f"cast {where}: model.to({stored[name].dtype}). Nothing was changed.",
            )

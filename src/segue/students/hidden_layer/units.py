"""Hidden units: where they lie in the tensors of an MLP, and the same MLP with other units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from segue.students.attention.spec import Projection, projection
from segue.students.initialisation import is_pointwise
from segue.students.layers import clone
from segue.students.low_rank import is_linear

SIZES = (  # attributes that modules keep of their hidden size
    *("intermediate_size", "intermediate_dim", "intermediate_features", "hidden_features", "mlp_dim", "inner_dim"),
    *("ffn_dim", "ffn_hidden_size", "ffn_size", "expert_dim", "moe_intermediate_size", "dim_feedforward"),
)


class Axis(NamedTuple):
    """The dimension of one parameter or buffer along which the hidden units lie."""

    name: str
    dim: int
    rows: int = 1  # of a unit: 2 where one tensor computes gate and value
    interleaved: bool = False  # the two take turns, instead of half and half

    def rows_of(self, units: Tensor, size: int) -> Tensor:
        if self.interleaved:
            return (units[:, None] * self.rows + torch.arange(self.rows, device=units.device)).flatten()
        return torch.cat([units + block * size for block in range(self.rows)])


@dataclass(frozen=True)
class Hidden:
    """The hidden layer of an MLP, by the names of the layers around it (of experts: of their stacked weights)."""

    entering: tuple[str, ...]
    leaving: str
    size: int
    axes: tuple[Axis, ...]  # every tensor that holds hidden units; the last one is the weight that leaves them
    experts: int = 0  # 0: not a stack of experts

    @property
    def blocks(self) -> int:
        """2 where one entering layer computes gate and value."""
        return self.axes[0].rows

    @property
    def gated(self) -> bool:
        return len(self.entering) * self.blocks == 2

    @property
    def maps(self) -> tuple[str, ...]:
        return (*self.entering, self.leaving)

    @property
    def weights(self) -> tuple[Axis, ...]:
        """The weights of the layers around it; the last one is that which leaves."""
        names = self.maps if self.experts else [join(name, "weight") for name in self.maps]
        return tuple(axis for axis in self.axes if axis.name in names)

    @property
    def inner(self) -> tuple[str, ...]:
        """The modules between those layers that hold one number or more for each unit, such as a norm."""
        owners = [axis.name.rpartition(".")[0] for axis in self.axes]
        return () if self.experts else tuple(name for name in owners if name not in self.maps)

    def holds(self, module: str) -> bool:
        """Say whether a module itself has tensors with hidden units."""
        return any(axis.name.rpartition(".")[0] == module for axis in self.axes)

    def __str__(self) -> str:
        return f"{' and '.join(self.entering)} -> {self.leaving}"


def is_map(module: nn.Module) -> bool:
    """Recognise a layer that maps features one token or pixel at a time: linear, GPT-2's Conv1D, a 1x1 convolution."""
    return is_linear(module) or is_pointwise(module)


def matrix(module: nn.Module) -> Projection:
    """Read such a layer as (out, in) weight and bias."""
    if is_pointwise(module):
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        return Projection(weight.flatten(1), bias)
    return projection(module)


@torch.no_grad()
def with_units(module: nn.Module, hidden: Hidden, units: Tensor) -> nn.Module:
    """Copy an MLP with these of its hidden units; (experts, units) where each expert has its own.

    The copies of a unit that is named more than once share its outgoing weights, so that the function stays the same.
    """
    copied = clone(module)
    for axis in hidden.axes:
        owner, key = owner_of(copied, axis.name)
        old = getattr(owner, key)
        new = _selected(old, axis, units.to(old.device), hidden.size)
        if axis is hidden.axes[-1]:
            counts = units.bincount() if units.dim() == 1 else torch.ones(1)
            if counts.max() > 1:
                shape = [-1 if dim == axis.dim else 1 for dim in range(new.dim())]
                new = new / counts[units].to(new).reshape(shape)
        setattr(owner, key, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)
        _resize_(owner, axis is hidden.axes[-1], new.shape[axis.dim])
    for name in {axis.name.rpartition(".")[0] for axis in hidden.axes}:
        parts = name.split(".")
        for owner in (copied.get_submodule(".".join(parts[:end])) for end in range(len(parts) + 1)):
            for size in SIZES:
                for rows in {1, hidden.blocks}:
                    if getattr(owner, size, None) == rows * hidden.size:
                        setattr(owner, size, rows * units.shape[-1])
                        break
    return copied


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    place, _, key = name.rpartition(".")
    return module.get_submodule(place), key


def _selected(tensor: Tensor, axis: Axis, units: Tensor, size: int) -> Tensor:
    if units.dim() == 1:
        return tensor.index_select(axis.dim, axis.rows_of(units, size))
    rows = [part.index_select(axis.dim - 1, axis.rows_of(some, size)) for part, some in zip(tensor, units, strict=True)]
    return torch.stack(rows)


def _resize_(owner: nn.Module, leaving: bool, size: int) -> None:
    """Let a layer say the size that it now has."""
    if isinstance(owner, nn.Conv1d | nn.Conv2d) and owner.groups > 1:  # depthwise
        owner.groups = owner.in_channels = owner.out_channels = size
        return
    of_maps = ("in_features", "in_channels", "nx") if leaving else ("out_features", "out_channels", "nf")
    for name in of_maps if is_map(owner) else ("num_features", "num_channels", "normalized_shape"):
        if hasattr(owner, name):
            setattr(owner, name, (size,) if name == "normalized_shape" else size)


def join(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key

"""What the shapes of an MLP's tensors propose: which layers enter a hidden layer, which one leaves it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from segue.students.attention.spec import is_transposed_linear
from segue.students.hidden_layer.units import Axis, Hidden, is_map, join, matrix


def complete(module: nn.Module, names: list[str]) -> Iterator[Hidden]:
    """Propose an MLP that is made of all these layers: one in and one out, or two in where it is gated."""
    shapes = {name: matrix(module.get_submodule(name)).weight.shape for name in names}
    for leaving in reversed(names):
        size = shapes[leaving][1]
        entering = tuple(name for name in names if name != leaving)
        outs, ins = {shapes[name][0] for name in entering}, {shapes[name][1] for name in entering}
        if len(ins) == 1 and outs == {size}:
            yield _between(module, entering, leaving, size)
        elif len(entering) == 1 and outs == {2 * size}:
            yield _between(module, entering, leaving, size, rows=2)
            yield _between(module, entering, leaving, size, rows=2, interleaved=True)


def parts(module: nn.Module, names: list[str]) -> Iterator[Hidden]:
    """Propose MLPs made of neighbouring layers, in a module that has others too."""
    for count in (3, 2):
        for begin in range(len(names) - count + 1):
            yield from complete(module, names[begin : begin + count])
    if len(names) == 3:  # neighbours without the one between them
        yield from complete(module, [names[0], names[2]])


def _between(module: nn.Module, entering: tuple[str, ...], leaving: str, size: int, **layout: Any) -> Hidden:
    """Collect the tensors that hold hidden units: of the layers around them and of what stands between, such as a norm."""
    axes = []
    for name in entering:
        part = module.get_submodule(name)
        axes.append(Axis(join(name, "weight"), 1 if is_transposed_linear(part) else 0, **layout))
        if part.bias is not None:
            axes.append(Axis(join(name, "bias"), 0, **layout))
    last = module.get_submodule(leaving)
    width = matrix(module.get_submodule(entering[0])).weight.shape[1]
    clear = size not in (width, matrix(last).weight.shape[0])  # or else only the order tells whose units a tensor holds
    names = [name for name, _ in module.named_modules()]
    between = names[names.index(entering[0]) : max(names.index(name) for name in (*entering, leaving))]
    for name, part in module.named_modules():
        if name in (*entering, leaving) or is_map(part) or not (clear or name in between):
            continue
        own = {**dict(part.named_parameters(recurse=False)), **dict(part.named_buffers(recurse=False))}
        for key, tensor in own.items():
            for length, how in ((size, {}), (size * layout.get("rows", 1), layout)):
                if length in tensor.shape and _holds_units(part, tensor, length):
                    axes.append(Axis(join(name, key), list(tensor.shape).index(length), **how))
                    break
    return Hidden(entering, leaving, size, (*axes, Axis(join(leaving, "weight"), 0 if is_transposed_linear(last) else 1)))


def _holds_units(part: nn.Module, tensor: Tensor, size: int) -> bool:
    """Recognise one number for each hidden unit, or one filter of a depthwise convolution."""
    depthwise = isinstance(part, nn.Conv1d | nn.Conv2d) and part.groups == part.out_channels == size
    return tensor.numel() == size or depthwise


def stacked(module: nn.Module) -> Iterator[Hidden]:
    """Propose the hidden layer of experts whose weights are stacked: (experts, out, in) or (experts, in, out)."""
    stacks = {name: value for name, value in module.named_parameters() if value.dim() == 3 and value.shape[0] > 1}
    if len(stacks) not in (2, 3) or len({value.shape[0] for value in stacks.values()}) != 1:
        return
    experts = next(iter(stacks.values())).shape[0]
    for leaving in reversed(stacks):
        entering = [name for name in stacks if name != leaving]
        for dim in (2, 1):
            size, width = stacks[leaving].shape[dim], stacks[leaving].shape[3 - dim]
            for across in (3 - dim, dim):
                layouts = {(stacks[name].shape[across], stacks[name].shape[3 - across]) for name in entering}
                if layouts == {(size, width)}:
                    yield _stack(module, entering, leaving, size, experts, across, dim)
                elif len(entering) == 1 and layouts == {(2 * size, width)}:
                    for interleaved in (False, True):
                        yield _stack(module, entering, leaving, size, experts, across, dim, rows=2, interleaved=interleaved)


def _stack(
    module: nn.Module, entering: list[str], leaving: str, size: int, experts: int, across: int, dim: int, **layout: Any
) -> Hidden:
    axes = [Axis(name, across, **layout) for name in entering]
    biases = {name: value for name, value in module.named_parameters() if value.dim() == 2 and "bias" in name}
    for name, value in biases.items():
        own = any(name.startswith(first.removesuffix("weight")) for first in entering)
        if own and value.shape == (experts, size * layout.get("rows", 1)):
            axes.append(Axis(name, 1, **layout))
    return Hidden(tuple(entering), leaving, size, (*axes, Axis(leaving, dim)), experts)

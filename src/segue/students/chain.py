"""The chain of layers that stands at a span while its teacher and student share the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class Chain(nn.Module):
    """Layers one after another, called as each of them is called: the first argument runs through, the rest goes to all."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.in_tuples = InTuples()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for layer in self.layers:
            output = layer(*args, **kwargs)
            wrapped = isinstance(output, tuple)
            if wrapped != self.in_tuples.value:
                self.in_tuples.value = wrapped
            x = output[0] if wrapped else output
            args, kwargs = ((x, *args[1:]), kwargs) if args else ((), {**kwargs, next(iter(kwargs)): x})
        return output


class InTuples:
    """Whether layers return their output in a tuple; a chain finds out, and what stands behind it follows."""

    value = False


class Passed(nn.Module):
    """Stand where a layer was whose work the seam before it does: hand on what comes."""

    def __init__(self, in_tuples: InTuples) -> None:
        super().__init__()
        self.in_tuples = in_tuples

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        return (x,) if self.in_tuples.value else x

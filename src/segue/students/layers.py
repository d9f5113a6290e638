"""Students made of the teacher's own layers: the same module with new weights, and one layer for several."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from segue.border import checked
from segue.errors import StudentError
from segue.sites import Site
from segue.students.initialisation import Kaiming

__all__ = ["OneLayer", "Reinit"]


@dataclass(frozen=True, kw_only=True)
class Reinit:
    """Copy the teacher, or the first layer of a span, and initialise its weights again, as `Kaiming` does.

    >>> import torch
    >>> student = Reinit()(torch.nn.Linear(4, 4), Site("layer"))
    >>> student.bias.abs().sum().item()
    0.0
    """

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        student = clone(teacher.layers[0] if isinstance(teacher, Chain) else teacher)
        Kaiming()(student, {})
        return student


@checked
@dataclass(frozen=True, kw_only=True)
class OneLayer:
    """Copy one layer of a span with its weights, by default the first, as BERT-of-Theseus does.

    `Reinit()` does the same with new weights.
    """

    which: int = 0

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        if not isinstance(teacher, Chain) or not -len(teacher.layers) <= self.which < len(teacher.layers):
            found = f"a span of {len(teacher.layers)} layers" if isinstance(teacher, Chain) else type(teacher).__name__
            raise StudentError(
                f"OneLayer(which={self.which}) cannot replace the module at site {site.name!r}.",
                f"It is {found}.",
                "select layers by segue.Span('encoder.layer', every=2). Nothing was changed.",
            )
        return clone(teacher.layers[self.which])


def clone(teacher: nn.Module) -> nn.Module:
    """Copy a module. The copy shares its Hugging Face configuration with the model, so that later changes to it reach both."""
    shared = {id(m.config): m.config for m in teacher.modules() if "config" in vars(m)}
    return copy.deepcopy(teacher, memo=shared).requires_grad_(True)


class Chain(nn.Module):
    """The layers of a span, called one after another: the first argument passes through, all layers get the others."""

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
    """Whether the layers of a span return their output in a tuple; the chain finds out, and its passthroughs do the same."""

    value = False


class Passthrough(nn.Module):
    """Return the input, in place of a layer that an earlier seam computes."""

    def __init__(self, in_tuples: InTuples) -> None:
        super().__init__()
        self.in_tuples = in_tuples

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        return (x,) if self.in_tuples.value else x

"""Students made of the teacher's own layers: the same module with new weights, and one layer for several."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

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
        first, chosen = _kind(teacher.layers[0]), _kind(teacher.layers[self.which])
        other = next((key for key in first if key in chosen and first[key] != chosen[key]), None)
        if other is not None:
            raise StudentError(
                f"OneLayer(which={self.which}) copies another kind of layer than the first at site {site.name!r}.",
                f"Its {other!r} is {chosen[other]}, not {first[other]}, and the student is called as the first layer is.",
                "copy a layer of the same kind (which=0), or let spans begin with such a layer (first=). Nothing was changed.",
            )
        return clone(teacher.layers[self.which])


def _kind(layer: nn.Module) -> dict[str, object]:
    """Return the settings by which layers of several kinds differ: texts, and whether a number is set."""
    return {
        f"{name}.{key}".lstrip("."): value if isinstance(value, str) else "None" if value is None else "set"
        for name, part in layer.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, str | int | float | None) and not key.startswith("_")
    }


def clone(teacher: nn.Module) -> nn.Module:
    """Copy a module. The copy shares its Hugging Face configuration with the model, so that later changes to it reach both."""
    shared = {id(m.config): m.config for m in teacher.modules() if "config" in vars(m)}
    return copy.deepcopy(teacher, memo=shared).requires_grad_(True)


class Chain(nn.Module):
    """The layers of a span. The model calls each in its own place, so the chain itself is never called."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


def layers_of(teacher: nn.Module) -> Sequence[nn.Module]:
    """Return the modules that a teacher consists of, in the order of their calls: the layers of a span, or itself."""
    return list(teacher.layers) if isinstance(teacher, Chain) else [teacher]

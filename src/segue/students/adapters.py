"""Adapters: learned projections around a student of another width, folded into the student at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from segue.border import PositiveInt, checked
from segue.errors import HandoverError, StudentError
from segue.sites import Site
from segue.students.attention.spec import is_transposed_linear, projection
from segue.students.layers import clone

__all__ = ["Adapter"]


@checked
@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Fit a student of another width to a site: project its input and its output, as FitNets' regressors do.

    `inside` is the student's width. The teacher's is found by calling it, or read from its linear layers; give `outside` where
    that is wrong. Where the two are equal nothing is added. `finalize_()` folds the projections into the student's first and
    last layers if these are linear, and keeps them otherwise.
    """

    inside: PositiveInt
    outside: PositiveInt | None = None

    def __call__(self, student: nn.Module, teacher: nn.Module, site: Site) -> nn.Module:
        first, last = (self.outside,) * 2 if self.outside is not None else _widths(teacher, site)
        assert first is not None
        assert last is not None
        if first == last == self.inside:
            return student
        like = next(teacher.parameters())
        return Adapted(student, first, self.inside, last).to(device=like.device, dtype=like.dtype)


class Adapted(nn.Module):
    """A student with a projection before and after it."""

    def __init__(self, student: nn.Module, first: int, inside: int, last: int) -> None:
        super().__init__()
        self.before = nn.Linear(first, inside)
        self.student = student
        self.after = nn.Linear(inside, last)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with an orthogonal projection and its transpose."""
        nn.init.orthogonal_(self.before.weight)
        if self.before.weight.T.shape == self.after.weight.shape:
            self.after.weight.copy_(self.before.weight.T)
        else:
            nn.init.orthogonal_(self.after.weight)
        self.before.bias.zero_()
        self.after.bias.zero_()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self.student(self.before(x), *args, **kwargs)
        if isinstance(output, tuple):
            return (self.after(output[0]), *output[1:])
        return self.after(output)

    @property
    def output_projection(self) -> nn.Linear:
        return self.after

    def finished(self) -> nn.Module:
        """Return the student with the projections folded in, or itself where its first or last layer is not linear."""
        ends = _ends(self.student)
        if ends is None:
            return self
        if any(hasattr(p, "full_tensor") for p in self.parameters()):
            raise HandoverError(
                "an adapter cannot be folded into its student.",
                "Their weights are sharded over processes.",
                "save the handover, load it in one process (segue.load_), and finalize it there.",
            )
        first, last = ends
        if first is last:
            return _composed(_composed(self.before, first), self.after)
        layers = list(self.student.children())
        layers[0], layers[-1] = _composed(self.before, first), _composed(last, self.after)
        return nn.Sequential(*layers)


def _ends(student: nn.Module) -> tuple[nn.Linear, nn.Linear] | None:
    if isinstance(student, nn.Linear):
        return student, student
    if type(student) is nn.Sequential and len(student) > 1:
        first, last = student[0], student[-1]
        if isinstance(first, nn.Linear) and isinstance(last, nn.Linear):
            return first, last
    return None


@torch.no_grad()
def _composed(first: nn.Linear, second: nn.Linear) -> nn.Linear:
    """Return one linear layer that computes `first`, then `second`."""
    made = nn.Linear(first.in_features, second.out_features, device=first.weight.device, dtype=first.weight.dtype)
    made.weight.copy_(second.weight @ first.weight)
    made.bias.copy_(second.weight @ first.bias + (0.0 if second.bias is None else second.bias))
    return made


@torch.no_grad()
def _widths(teacher: nn.Module, site: Site) -> tuple[int, int]:
    """Find the widths of input and output by a call on three tokens, else read them from the linear layers."""
    layers = [
        projection(part).weight for part in teacher.modules() if isinstance(part, nn.Linear) or is_transposed_linear(part)
    ]
    if not layers:
        raise StudentError(
            f"Adapter() cannot read the width of the module at site {site.name!r}.",
            f"It is {type(teacher).__name__}, which has no linear layer.",
            "give the width: Adapter(inside=..., outside=...). Nothing was changed.",
        )
    called = clone(teacher)
    called.eval()
    for width in dict.fromkeys(weight.shape[1] for weight in layers):
        try:
            output = called(torch.zeros(1, 3, width, device=layers[0].device, dtype=layers[0].dtype))
        except Exception:  # another width, or a module of more arguments
            continue
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, Tensor):
            return width, output.shape[-1]
    return layers[0].shape[1], layers[-1].shape[0]

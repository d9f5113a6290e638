"""Initialisation: where a student's weights come from; an axis of its own beside what the student is.

An initialisation is a function (student, originals), where originals maps names of the student's submodules to what the teacher
has in their place: a `Projection` for a linear map, a module for a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from segue.errors import StudentError
from segue.students.geometry import Projection, is_transposed_linear

LINEAR_MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

Original: TypeAlias = "Projection | nn.Module"
Initialisation: TypeAlias = Callable[[nn.Module, Mapping[str, Original]], None]


@dataclass(frozen=True, kw_only=True)
class Kaiming:
    """Draw everything anew, as in the paper: nothing of the teacher is kept.

    >>> student = nn.Linear(4, 4)
    >>> Kaiming()(student, {})
    >>> student.bias.abs().sum().item()
    0.0

    The rule, module by module: linear maps and convolutions get `kaiming_normal_` (fan in) and zero biases; norms get ones,
    zeros and fresh statistics; other modules with `reset_parameters` are reset by it. Parameters that a module holds itself
    are drawn by `kaiming_normal_` when they have two dimensions or more and set to zero when their name says bias. Anything
    else is an error, because no rule would be right for it.
    """

    @torch.no_grad()
    def __call__(self, student: nn.Module, originals: Mapping[str, Original]) -> None:
        for name, module in student.named_modules():
            _reinitialise(module, name or type(module).__name__)


@dataclass(frozen=True, kw_only=True)
class CopyMatching:
    """Copy what has a counterpart in the teacher (projections, norms); draw the rest as `Kaiming` does."""

    @torch.no_grad()
    def __call__(self, student: nn.Module, originals: Mapping[str, Original]) -> None:
        Kaiming()(student, {})
        for name, original in originals.items():
            place = student.get_submodule(name)
            if isinstance(original, Projection):
                own = place.get_parameter("weight") if "weight" in dict(place.named_parameters(recurse=False)) else None
                if own is None or own.shape != original.weight.shape:
                    raise _no_match(name, place, original)
                own.copy_(original.weight)
                bias = dict(place.named_parameters(recurse=False)).get("bias")
                if bias is not None and original.bias is not None:
                    bias.copy_(original.bias)
            else:
                place.load_state_dict(original.state_dict())


def _no_match(name: str, place: nn.Module, original: Projection) -> StudentError:
    found = next((tuple(p.shape) for p in place.parameters()), "nothing")
    return StudentError(
        f"CopyMatching() was asked to copy the teacher's weights to {name!r}.",
        f"The teacher's are {tuple(original.weight.shape)}, the student's {type(place).__name__} begins with {found}.",
        "use init=TruncatedSvd() for low-rank students, or init=Kaiming().",
    )


def _reinitialise(module: nn.Module, name: str) -> None:
    own = dict(module.named_parameters(recurse=False))
    if isinstance(module, LINEAR_MAPS):
        _draw(module.weight)
        _zero(module.bias)
    elif is_transposed_linear(module):
        _draw(own["weight"].T)  # stored as (in, out), and a view writes through
        _zero(own.get("bias"))
    elif isinstance(module, nn.LayerNorm) or _is_norm(module, own):
        for key, parameter in own.items():
            parameter.fill_(0.0 if "bias" in key else 1.0)
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.reset_running_stats()
    elif callable(reset := getattr(module, "reset_parameters", None)):
        reset()
    else:
        for key, parameter in own.items():
            if parameter.dim() >= 2:
                _draw(parameter)
            elif "bias" in key:
                _zero(parameter)
            else:
                raise StudentError(
                    f"Kaiming() was asked to draw {name}.{key} anew.",
                    f"It is a raw parameter of shape {tuple(parameter.shape)} in {type(module).__name__}, which has no "
                    "reset_parameters().",
                    "give the module a reset_parameters() method, or write your own student: fn(teacher, site) -> module.",
                )


def _is_norm(module: nn.Module, own: dict[str, nn.Parameter]) -> bool:
    return "norm" in type(module).__name__.lower() and all(parameter.dim() == 1 for parameter in own.values())


def _draw(weight: Tensor) -> None:
    nn.init.kaiming_normal_(weight, mode="fan_in")


def _zero(bias: Tensor | None) -> None:
    if bias is not None:
        bias.zero_()

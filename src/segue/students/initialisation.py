"""Initialisation: where a student's weights come from; an axis of its own beside what the student is.

An initialisation is a function (student, originals), where originals maps names of the student's submodules to what the teacher
has in their place: a `Projection` for a linear map, a module for a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from segue.errors import StudentError
from segue.students.attention.spec import Projection, is_transposed_linear

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
                weight, bias = _weights(place)
                if weight is None or weight.shape != original.weight.shape:
                    raise _no_match(name, place, original)
                weight.copy_(original.weight)
                if bias is not None and original.bias is not None:
                    bias.copy_(original.bias)
            else:
                place.load_state_dict(original.state_dict())


@dataclass(frozen=True, kw_only=True)
class TruncatedSvd:
    """Fill low-rank maps with the best approximations of their originals; what has no original stays as it is.

    With W = U S V' the factors are U_r sqrt(S_r) and sqrt(S_r) V_r', so that no matrix of that rank comes nearer to W (Eckart
    and Young) and both learn at the same pace. Biases are copied. Where W has fewer directions than the rank, the first factor
    keeps the unused ones and the second is zero there, so that they can still be learned.
    """

    @torch.no_grad()
    def __call__(self, student: nn.Module, originals: Mapping[str, Original]) -> None:
        for name, original in originals.items():
            place = student.get_submodule(name)
            own = dict(place.named_parameters(recurse=False))
            if not isinstance(original, Projection) or not {"down", "up"} <= own.keys():
                raise StudentError(
                    f"TruncatedSvd() was asked to fill {name!r}.",
                    f"It is {type(place).__name__}, not a low-rank map.",
                    "use it with LowRankMlp(rank=...); other students take CopyMatching(), Net2Net() or Kaiming().",
                )
            rank = own["down"].shape[0]
            weight = original.weight.to(torch.promote_types(original.weight.dtype, torch.float32))
            u, s, vh = torch.linalg.svd(weight, full_matrices=False)
            used = s > s[0] * torch.finfo(s.dtype).eps * max(weight.shape)
            root = s.sqrt()
            own["down"].copy_((torch.where(used, root, 1.0)[:, None] * vh)[:rank])
            own["up"].copy_((u * torch.where(used, root, 0.0))[:, :rank])
            if "bias" in own and original.bias is not None:
                own["bias"].copy_(original.bias)


@dataclass(frozen=True, kw_only=True)
class Net2Net:
    """Widen without changing the function: repeat hidden units, and share what leaves them among the copies.

    Copies begin equal and would stay equal; `noise` adds that share of the spread of the weights to those that enter the hidden
    layer, after which the function is kept only nearly.
    """

    noise: float = 0.0

    @torch.no_grad()
    def __call__(self, student: nn.Module, originals: Mapping[str, Original]) -> None:
        maps = {name: original for name, original in originals.items() if isinstance(original, Projection)}
        places = {name: _weights(student.get_submodule(name)) for name in maps}
        for name, original in maps.items():
            weight = places[name][0]
            if weight is None or any(new < old for new, old in zip(weight.shape, original.weight.shape, strict=True)):
                raise _no_match(name, student.get_submodule(name), original, "Net2Net()")
        leaving = [name for name, original in maps.items() if places[name][0].shape[1] != original.weight.shape[1]]
        units = maps[leaving[0]].weight.shape[1] if leaving else None
        for name, other in originals.items():
            if not isinstance(other, Projection):
                student.get_submodule(name).load_state_dict(other.state_dict())
        for name, original in maps.items():
            weight, bias = places[name]
            rows = _repeated(original.weight.shape[0], weight.shape[0], units).to(weight.device)
            columns = _repeated(original.weight.shape[1], weight.shape[1], units).to(weight.device)
            weight.copy_(original.weight[rows][:, columns] / columns.bincount()[columns])
            if bias is not None and original.bias is not None:
                bias.copy_(original.bias[rows])
            if self.noise and len(rows) > original.weight.shape[0]:
                weight.add_(torch.randn_like(weight), alpha=self.noise * original.weight.std().item())


def _repeated(old: int, new: int, units: int | None) -> Tensor:
    """Say which old unit each new one copies; a map to gate and value at once repeats each of its halves."""
    blocks = old // units if units is not None and new != old else 1
    within = torch.arange(new // blocks) % (old // blocks)
    return torch.cat([within + block * (old // blocks) for block in range(blocks)])


def _weights(place: nn.Module) -> tuple[Any, Any]:
    """Return a linear map's own weight as (out, in) and its bias, to be written to; None where it has none."""
    own = dict(place.named_parameters(recurse=False))
    weight = own.get("weight")
    return (weight.T if weight is not None and is_transposed_linear(place) else weight), own.get("bias")


def _no_match(name: str, place: nn.Module, original: Projection, init: str = "CopyMatching()") -> StudentError:
    found = next((tuple(p.shape) for p in place.parameters()), "nothing")
    return StudentError(
        f"{init} was asked to copy the teacher's weights to {name!r}.",
        f"The teacher's are {tuple(original.weight.shape)}, the student's {type(place).__name__} begins with {found}.",
        "use init=TruncatedSvd() for low-rank students, Net2Net() for wider ones, or init=Kaiming().",
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

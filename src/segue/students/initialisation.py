"""Initialisation: where a student's weights come from, independent of what the student is.

An initialisation is a function (student, originals), where originals maps names of the student's submodules to their
counterparts in the teacher: a `Projection` for a linear layer, a module for a norm. What needs data instead is a method of
`handover.calibrate`, such as `LeastSquares`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from segue.border import NotNegative, checked
from segue.errors import StudentError
from segue.students.attention.spec import Projection, is_transposed_linear

__all__ = ["CopyMatching", "Kaiming", "Net2Net", "TruncatedSvd"]

LINEAR_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

Original: TypeAlias = Projection | nn.Module
Initialisation: TypeAlias = Callable[[nn.Module, Mapping[str, Original]], None]


@dataclass(frozen=True, kw_only=True)
class Kaiming:
    """Initialise all weights at random, as in the paper: nothing of the teacher is kept.

    >>> student = nn.Linear(4, 4)
    >>> Kaiming()(student, {})
    >>> student.bias.abs().sum().item()
    0.0

    The rule, module by module: linear layers and convolutions get `kaiming_normal_` (fan in) and zero biases; norms get ones,
    zeros and new statistics; other modules with `reset_parameters` are reset by it. Parameters that a module holds directly
    are drawn by `kaiming_normal_` if they have two dimensions or more and set to zero if "bias" is in their name; the stacked
    weights of experts are drawn expert by expert. Any other parameter is an error, because no rule fits it.
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
        for name, module in student.named_modules():
            if not isinstance(originals.get(name), nn.Module):  # a copy needs no rule for how to draw it
                _reinitialise(module, name or type(module).__name__)
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
    """Fill low-rank layers with the best approximations of their originals; other weights stay as they are.

    With W = U S V' the factors are U_r sqrt(S_r) and sqrt(S_r) V_r', so that no matrix of that rank is closer to W (Eckart
    and Young) and both factors have the same scale. Biases are copied. Where the rank of W is lower, the first factor keeps
    the unused directions and the second is zero there, so that they can still be learned.
    """

    @torch.no_grad()
    def __call__(self, student: nn.Module, originals: Mapping[str, Original]) -> None:
        for name, original in originals.items():
            place = student.get_submodule(name)
            own = dict(place.named_parameters(recurse=False))
            if not isinstance(original, Projection) or not {"down", "up"} <= own.keys():
                raise StudentError(
                    f"TruncatedSvd() cannot fill {name!r}.",
                    f"It is {type(place).__name__}, not a low-rank layer.",
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


@checked
@dataclass(frozen=True, kw_only=True)
class Net2Net:
    """Widen without changing the function: repeat hidden units, and divide their outgoing weights among the copies.

    Copies start equal and would stay equal. `noise`, relative to the standard deviation of the weights, is added to those that
    enter the hidden layer; the function is then preserved only approximately.
    """

    noise: NotNegative = 0.0

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
    """Return which old unit each new one copies; a fused projection to gate and value repeats each of its halves."""
    blocks = old // units if units is not None and new != old else 1
    within = torch.arange(new // blocks) % (old // blocks)
    return torch.cat([within + block * (old // blocks) for block in range(blocks)])


def _weights(place: nn.Module) -> tuple[Any, Any]:
    """Return a linear layer's own weight as (out, in) and its bias, both writable; None where it has none."""
    own = dict(place.named_parameters(recurse=False))
    weight: Any = own.get("weight")
    if weight is not None and is_transposed_linear(place):
        weight = weight.T
    elif weight is not None and is_pointwise(place):
        weight = weight.flatten(1)
    return weight, own.get("bias")


def is_pointwise(module: nn.Module) -> bool:
    """Recognise a 1x1 convolution, which is a linear layer for each pixel."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d):
        return False
    return module.groups == 1 and {*module.kernel_size, *module.stride, *module.dilation} == {1} and set(module.padding) == {0}


def _no_match(name: str, place: nn.Module, original: Projection, init: str = "CopyMatching()") -> StudentError:
    found = next((tuple(p.shape) for p in place.parameters()), "nothing")
    return StudentError(
        f"{init} cannot copy the teacher's weights to {name!r}.",
        f"The teacher's have shape {tuple(original.weight.shape)}, those of the student's {type(place).__name__} {found}.",
        "use init=TruncatedSvd() for low-rank students, Net2Net() for wider ones, or init=Kaiming().",
    )


def _reinitialise(module: nn.Module, name: str) -> None:
    own = dict(module.named_parameters(recurse=False))
    if isinstance(module, LINEAR_LAYERS):
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
        experts = getattr(module, "num_experts", None)
        for key, parameter in own.items():
            if parameter.dim() in (2, 3) and parameter.shape[0] == experts:
                _reinitialise_experts(parameter, "bias" in key, getattr(module, "is_transposed", False))
            elif parameter.dim() >= 2:
                _draw(parameter)
            elif "bias" in key:
                _zero(parameter)
            else:
                raise StudentError(
                    f"Kaiming() has no rule for {name}.{key}.",
                    f"It is a raw parameter of shape {tuple(parameter.shape)} in {type(module).__name__}, which has no "
                    "reset_parameters().",
                    "give the module a reset_parameters() method, or write your own student: fn(teacher, site) -> module.",
                )


def _reinitialise_experts(parameter: nn.Parameter, is_bias: bool, transposed: bool) -> None:
    """Draw the weights (experts, out, in), or transposed, or the biases (experts, out) of a stack of experts."""
    if parameter.dim() == 2 and is_bias:
        _zero(parameter)
        return
    for weight in parameter if parameter.dim() == 3 else [parameter]:
        _draw(weight.T if transposed and parameter.dim() == 3 else weight)


def _is_norm(module: nn.Module, own: dict[str, nn.Parameter]) -> bool:
    return "norm" in type(module).__name__.lower() and all(parameter.dim() == 1 for parameter in own.values())


def _draw(weight: Tensor) -> None:
    nn.init.kaiming_normal_(weight, mode="fan_in")


def _zero(bias: Tensor | None) -> None:
    if bias is not None:
        bias.zero_()

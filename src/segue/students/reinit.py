"""Re-initialisation: the same module with fresh weights, the paper's controlled setting."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from segue.errors import StudentError
from segue.sites import Site

LINEAR_MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, kw_only=True)
class Reinit:
    """Copy the teacher and draw its weights anew.

    >>> import torch
    >>> student = Reinit()(torch.nn.Linear(4, 4), Site("layer"))
    >>> student.bias.abs().sum().item()
    0.0

    The rule, module by module: linear maps and convolutions get `kaiming_normal_` (fan in) and zero biases; norms get ones,
    zeros and fresh statistics; other modules with `reset_parameters` are reset by it. Parameters that a module holds itself
    are drawn by `kaiming_normal_` when they have two dimensions or more and set to zero when their name says bias. Anything
    else is an error, because no rule would be right for it.
    """

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        # a Hugging Face configuration stays the model's own, so that later changes to it reach the student
        shared = {id(m.config): m.config for m in teacher.modules() if "config" in vars(m)}
        student = copy.deepcopy(teacher, memo=shared).requires_grad_(True)
        with torch.no_grad():
            for name, module in student.named_modules():
                _reinitialise(module, name or type(module).__name__, site)
        return student


def _reinitialise(module: nn.Module, name: str, site: Site) -> None:
    own = dict(module.named_parameters(recurse=False))
    if isinstance(module, LINEAR_MAPS):
        _draw(module.weight)
        _zero(module.bias)
    elif _is_transposed_linear(module):
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
                    f"Reinit was asked to draw {name}.{key} at site {site.name!r} anew.",
                    f"It is a raw parameter of shape {tuple(parameter.shape)} in {type(module).__name__}, which has no "
                    "reset_parameters().",
                    "give the module a reset_parameters() method, or write your own student: fn(teacher, site) -> module.",
                )


def _is_transposed_linear(module: nn.Module) -> bool:
    """Recognise the Conv1D of GPT-2, which is a linear map stored the other way round."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _is_norm(module: nn.Module, own: dict[str, nn.Parameter]) -> bool:
    return "norm" in type(module).__name__.lower() and all(parameter.dim() == 1 for parameter in own.values())


def _draw(weight: Tensor) -> None:
    nn.init.kaiming_normal_(weight, mode="fan_in")


def _zero(bias: Tensor | None) -> None:
    if bias is not None:
        bias.zero_()

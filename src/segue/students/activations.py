"""Activation students: another activation function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.border import checked
from segue.errors import PlanError, StudentError, nearest
from segue.sites import Site
from segue.students.layers import clone

__all__ = ["ActivationSwap"]


class SquaredRelu(nn.Module):
    """max(x, 0) squared."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "hard_swish": nn.Hardswish,
    "identity": nn.Identity,
    "leaky_relu": nn.LeakyReLU,
    "mish": nn.Mish,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "squared_relu": SquaredRelu,
    "tanh": nn.Tanh,
}


@checked
@dataclass(frozen=True, kw_only=True)
class ActivationSwap:
    """Another activation, by name or by a function that builds it, in place of an activation module.

    >>> ActivationSwap(to="relu")(nn.GELU(), Site("mlp.act"))
    ReLU()

    Most have no parameters, so the model around them must adapt: plan with train="all".
    """

    to: str | Callable[[], nn.Module] = "relu"

    def __post_init__(self) -> None:
        if isinstance(self.to, str) and self.to not in ACTIVATIONS:
            raise PlanError(
                f"ActivationSwap(to={self.to!r}) does not name an activation.",
                nearest(self.to, list(ACTIVATIONS)),
                "give the name of an activation, or a function that builds a module: to=lambda: nn.Hardtanh(-2, 2).",
            )

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        if not is_activation(teacher):
            raise StudentError(
                f"ActivationSwap() cannot replace the module at site {site.name!r}.",
                f"It is {type(teacher).__name__}, which is not an elementwise function.",
                "choose activation modules, such as 'blocks.*.mlp.act' or '**.intermediate_act_fn'. Nothing was changed.",
            )
        student = ACTIVATIONS[self.to]() if isinstance(self.to, str) else self.to()
        if isinstance(student, nn.Module):
            student.train(teacher.training)
        return student


@torch.no_grad()
def is_activation(module: nn.Module) -> bool:
    """Return whether a module is an elementwise function of a tensor of any shape."""
    like = next(module.parameters(), torch.empty(0))
    x = torch.linspace(-3.0, 3.0, 24, device=like.device, dtype=like.dtype)
    probe = clone(module)
    probe.eval()
    try:
        alone, among = probe(x.clone()), probe(x.clone().view(2, 3, 4))
    except Exception:  # whatever it raises, it does not take any shape
        return False
    return isinstance(among, Tensor) and among.shape == (2, 3, 4) and torch.allclose(alone, among.flatten(), equal_nan=True)

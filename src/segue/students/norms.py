"""Norm students: layer normalisation without its mean."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.border import checked
from segue.errors import StudentError
from segue.sites import Site
from segue.students.attention.families.multihead import NotFused
from segue.students.initialisation import CopyMatching, Initialisation, Original

__all__ = ["RmsNorm"]


@checked
@dataclass(frozen=True, kw_only=True)
class RmsNorm:
    """An nn.RMSNorm in place of an nn.LayerNorm: x / sqrt(mean(x^2) + eps) * weight.

    >>> RmsNorm()(nn.LayerNorm(8, eps=1e-6), Site("norm"))
    RootMeanSquare((8,), eps=1e-06, elementwise_affine=True)

    The weight is copied; the bias has no counterpart and is dropped.
    """

    init: Initialisation = field(default_factory=CopyMatching)

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        if not isinstance(teacher, nn.LayerNorm):
            raise self._refusal(teacher, site, "which is not an nn.LayerNorm")
        if not _is_plain(teacher):
            raise self._refusal(teacher, site, "which does more than normalise the last dimensions")
        shape, eps, weight = teacher.normalized_shape, teacher.eps, teacher.weight
        where = {} if weight is None else {"device": weight.device, "dtype": weight.dtype}
        student = RootMeanSquare(list(shape), eps, elementwise_affine=weight is not None, **where)
        originals: dict[str, Original] = {}
        if weight is not None:
            original = nn.RMSNorm(list(shape), eps, device="meta")
            original.weight = weight
            originals = {"": original}
        self.init(student, originals)
        student.train(teacher.training)
        return student

    def _refusal(self, teacher: nn.Module, site: Site, found: str) -> StudentError:
        return StudentError(
            f"RmsNorm() cannot replace the module at site {site.name!r}.",
            f"It is {type(teacher).__name__}, {found}.",
            "choose layer norms over the last dimension, such as 'blocks.*.norm1' or '**.LayerNorm'. Nothing was changed.",
        )


class RootMeanSquare(nn.RMSNorm):
    """nn.RMSNorm that accepts half-precision input with float32 weights, as under autocast, without a warning."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # with a tensor here, nn.TransformerEncoder's fast path would compute a layer norm itself
        self.bias: Any = NotFused()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x if self.weight is None else x.to(torch.promote_types(x.dtype, self.weight.dtype)))
        return y.to(x.dtype)


@torch.no_grad()
def _is_plain(teacher: nn.LayerNorm) -> bool:
    """Tell a faster implementation from a module that computes something else, such as a norm over channels."""
    if type(teacher).forward is nn.LayerNorm.forward:
        return True
    like = torch.empty(0) if teacher.weight is None else teacher.weight
    x = torch.linspace(-1.0, 2.0, 2 * math.prod(teacher.normalized_shape), device=like.device) ** 3
    x = x.to(like.dtype).view(1, 2, *teacher.normalized_shape)
    try:
        theirs = teacher(x)
    except Exception:  # whatever it raises, it does not take what a layer norm takes
        return False
    ours = F.layer_norm(x, teacher.normalized_shape, teacher.weight, teacher.bias, teacher.eps)
    return theirs.shape == ours.shape and torch.allclose(theirs.float(), ours.float(), rtol=1e-2, atol=1e-2)

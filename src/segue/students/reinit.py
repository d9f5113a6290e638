"""Re-initialisation: the same module with fresh weights, the paper's controlled setting."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn

from segue.sites import Site
from segue.students.chain import Chain
from segue.students.initialisation import Kaiming


@dataclass(frozen=True, kw_only=True)
class Reinit:
    """Copy the teacher, or the first layer of a span, and draw its weights anew, as `Kaiming` does.

    >>> import torch
    >>> student = Reinit()(torch.nn.Linear(4, 4), Site("layer"))
    >>> student.bias.abs().sum().item()
    0.0
    """

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        chain = teacher.layers if isinstance(teacher, Chain) else [teacher]
        student = copied(chain[0])
        Kaiming()(student, {})
        return student


def copied(teacher: nn.Module) -> nn.Module:
    """Copy a module; a Hugging Face configuration stays the model's own, so that later changes to it reach the student."""
    shared = {id(m.config): m.config for m in teacher.modules() if "config" in vars(m)}
    return copy.deepcopy(teacher, memo=shared).requires_grad_(True)

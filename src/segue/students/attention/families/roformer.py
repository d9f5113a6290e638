"""RoFormer, whose call brings sines and cosines in one tensor, for neighbouring features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from segue.students.attention.families.by_name import ByName
from segue.students.attention.families.names import parameters_of
from segue.students.attention.families.rotations import turn
from segue.students.attention.spec import AttentionCall, AttentionSpec


class RoFormer(ByName):
    """Attention with `sinusoidal_pos`, (1, 1, tokens, head size): sines, then cosines."""

    name = "RoFormer's attention"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return "sinusoidal_pos" in parameters_of(module) and super().matches(module)

    @classmethod
    def choices(cls, module: nn.Module) -> dict[str, tuple[Any, ...]]:
        return {**super().choices(module), "rotation": ("neighbours",)}

    def unpack(self, *args: Any, **kwargs: Any) -> AttentionCall:
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        positions = given.pop("sinusoidal_pos", None)
        call = super().unpack(**given)
        return call if positions is None or call.cross else replace(call, rotary=positions)

    def rotate(self, q: Tensor, k: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        sin, cos = rotary[0, 0].float().chunk(2, dim=-1)
        by = torch.complex(cos, sin)
        return turn(q, by), turn(k, by)

    def probes(self, module: nn.Module, spec: AttentionSpec, x: Tensor) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        angles = torch.linspace(0.0, 3.0, x.shape[1] * (spec.head_size // 2), device=x.device).view(1, 1, x.shape[1], -1)
        positions = torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype)
        for args, kwargs in super().probes(module, spec, x):
            yield args, {**kwargs, "sinusoidal_pos": positions}

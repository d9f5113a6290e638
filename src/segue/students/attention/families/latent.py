"""Multi-head latent attention (DeepSeek): queries, and keys and values, are made of short vectors; heads share rotated keys."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from segue.students.attention.families.by_name import ByName, rows_of
from segue.students.attention.families.names import find_part, find_whole
from segue.students.attention.spec import AttentionSpec, Projection, projection


class LatentVectors(nn.Module):
    """Return what queries are made of, what keys and values are made of, and the keys that all heads share."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.down: nn.Module = module.kv_a_proj_with_mqa
        self.norm: nn.Module = module.kv_a_layernorm
        self.rank = int(module.kv_lora_rank)
        of_queries = getattr(module, "q_a_proj", None)
        self.query_down: nn.Module | None = of_queries
        self.query_norm: nn.Module | None = None if of_queries is None else module.q_a_layernorm

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        both = self.down(x)
        for_queries = x if self.query_down is None or self.query_norm is None else self.query_norm(self.query_down(x))
        return for_queries, self.norm(both[..., : self.rank]), both[..., self.rank :]


class Latent(ByName):
    """Read the projections from latent vectors; only the last features of each head are rotated."""

    name = "multi-head latent attention"

    def __init__(self, module: nn.Module, **reading: Any) -> None:
        super().__init__(module, **reading)
        self.rotated = find_whole(module, "qk_rope_head_dim") or 0
        of_file = sys.modules.get(type(module).__module__)
        self.own_interleaved: Callable[..., Any] | None = getattr(of_file, "apply_rotary_pos_emb_interleave", None)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        names = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
        return all(name in module._modules for name in names) and _of_queries(module) is not None

    @classmethod
    def choices(cls, module: nn.Module) -> dict[str, tuple[Any, ...]]:
        rotations = ("own interleaved", "own", "complex by sequence")
        return {**super().choices(module), "layout": ("latent",), "rotation": rotations}

    def parse(self, module: nn.Module) -> AttentionSpec:
        return replace(super().parse(module), latent=LatentVectors(module))

    def _sizes(self, module: nn.Module) -> tuple[int, int]:
        return int(module.num_heads), int(module.qk_head_dim)  # type: ignore[arg-type]

    def _projections(self, module: nn.Module, heads: int, size: int) -> tuple[Projection, Projection, Projection]:
        query, fused = _of_queries(module), projection(module.kv_b_proj)  # type: ignore[arg-type]
        assert query is not None
        rows = torch.arange(fused.weight.shape[0], device=fused.weight.device).view(heads, -1)
        keys, values = rows[:, : size - self.rotated], rows[:, size - self.rotated :]
        return projection(query), rows_of(fused, keys.flatten()), rows_of(fused, values.flatten())

    def rotate(self, q: Tensor, k: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        (q, q_last), (k, k_last) = (x.tensor_split([-self.rotated], dim=-1) for x in (q, k))
        if self.reading["rotation"] == "own interleaved" and self.own_interleaved is not None:
            q_last, k_last = self.own_interleaved(q_last, k_last, *rotary)
        else:
            q_last, k_last = super().rotate(q_last, k_last, rotary)
        return torch.cat([q, q_last], dim=-1), torch.cat([k, k_last], dim=-1)

    def probes(self, module: nn.Module, spec: AttentionSpec, x: Tensor) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        yield from super().probes(module, replace(spec, head_size=self.rotated), x)


def _of_queries(module: nn.Module) -> nn.Module | None:
    return find_part(module, "q_b_proj", "q_proj")

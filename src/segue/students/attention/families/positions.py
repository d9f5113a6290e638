"""Attention that computes something of its positions by itself: a rotation, a temperature, or what a token may see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from segue.students.attention.families.by_name import ByName, rows_of
from segue.students.attention.families.names import FUSED, find_part, find_whole, parameters_of
from segue.students.attention.families.rotations import turn
from segue.students.attention.masks import padding_in, visible
from segue.students.attention.spec import AttentionCall, AttentionSpec, Projection, projection

BASE = 10_000.0  # of the rotation of GPT-J


class RotatedInside(ByName):
    """GPT-J and CodeGen: positions come with the call, and the module rotates the first features of each head by them."""

    name = "attention that rotates by position_ids"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        inside = isinstance(getattr(module, "embed_positions", None), Tensor) and hasattr(module, "rotary_dim")
        return inside and "position_ids" in parameters_of(module) and super().matches(module)

    @classmethod
    def choices(cls, module: nn.Module) -> dict[str, tuple[Any, ...]]:
        return {**super().choices(module), "rotation": ("of pairs",), "causal": (True,)}

    def __init__(self, module: nn.Module, **reading: Any) -> None:
        super().__init__(module, **reading)
        self.rotated = find_whole(module, "rotary_dim") or find_whole(module, "head_dim") or 0

    def _projections(self, module: nn.Module, heads: int, size: int) -> tuple[Projection, Projection, Projection]:
        found = find_part(module, *FUSED)
        if found is None:
            return super()._projections(module, heads, size)
        fused = projection(found)  # CodeGen: four pieces, each of queries, values and keys
        q, v, k = torch.arange(fused.weight.shape[0], device=fused.weight.device).view(4, 3, -1).unbind(1)
        return rows_of(fused, q.reshape(-1)), rows_of(fused, k.reshape(-1)), rows_of(fused, v.reshape(-1))

    def unpack(self, *args: Any, **kwargs: Any) -> AttentionCall:
        call = super().unpack(*args, **kwargs)
        positions = (dict(zip(self.parameters, args, strict=False)) | kwargs)["position_ids"]
        steps = torch.arange(0, self.rotated, 2, device=positions.device) / self.rotated
        angles = positions[..., None].float() * BASE**-steps
        return replace(call, rotary=torch.polar(torch.ones_like(angles), angles))

    def rotate(self, q: Tensor, k: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        q, k = (torch.cat([turn(x[..., : self.rotated], rotary), x[..., self.rotated :]], dim=-1) for x in (q, k))
        return q, k


class Tempered(ByName):
    """Llama 4 and Ministral 3: queries are multiplied by a number that grows with their position, beyond a length."""

    name = "attention with a temperature of positions"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return (_of_llama4(module) is not None or _of_ministral3(module) is not None) and super().matches(module)

    def __init__(self, module: nn.Module, **reading: Any) -> None:
        super().__init__(module, **reading)
        self.layer = find_whole(module, "layer_idx")
        self.of_llama4, self.of_ministral3 = _of_llama4(module), _of_ministral3(module)

    def parse(self, module: nn.Module) -> AttentionSpec:
        spec = super().parse(module)
        config = getattr(module, "config", None)
        chunk = find_whole(config, "attention_chunk_size") if getattr(module, "use_rope", False) else None
        limited = chunk is not None and (spec.tokens is None or chunk < spec.tokens)
        return replace(spec, rotary=True, window=chunk if limited else spec.window, chunked=limited)

    def unpack(self, *args: Any, **kwargs: Any) -> AttentionCall:
        call = super().unpack(*args, **kwargs)
        factors = None
        if self.of_ministral3 is not None:
            beta, length = self.of_ministral3
            positions = (dict(zip(self.parameters, args, strict=False)) | kwargs)["position_ids"]
            factors = 1 + beta * (1 + (positions / length).floor()).log()
        elif self.of_llama4 is not None and self.of_llama4[0]:
            scale, length = self.of_llama4
            before = 0 if call.cache is None else call.cache.get_seq_length(self.layer)
            positions = torch.arange(call.x.shape[1], device=call.x.device)[None] + before
            factors = ((positions.float() + 1) / length).floor().log1p() * scale + 1
        return replace(call, rotary=(call.rotary, factors))

    def rotate(self, q: Tensor, k: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        rotation, factors = rotary
        q, k = super().rotate(q, k, rotation)
        return q if factors is None else (q * factors[:, None, :, None]).to(q.dtype), k


class MaskedInside(ByName):
    """GPT-Neo and the first GPT: a buffer says what a token may see, besides the mask of a call."""

    name = "attention that masks by itself"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return _pattern(module) is not None and super().matches(module)

    @classmethod
    def choices(cls, module: nn.Module) -> dict[str, tuple[Any, ...]]:
        return {**super().choices(module), "causal": (True,)}

    def __init__(self, module: nn.Module, **reading: Any) -> None:
        super().__init__(module, **reading)
        pattern = _pattern(module)
        assert pattern is not None
        self.window: int | None = int(pattern[..., -1, :].sum())
        self.window = self.window if self.window < pattern.shape[-1] else None

    def parse(self, module: nn.Module) -> AttentionSpec:
        return replace(super().parse(module), window=self.window)

    def unpack(self, *args: Any, **kwargs: Any) -> AttentionCall:
        call = super().unpack(*args, **kwargs)
        tokens, mask = call.x.shape[1], call.mask
        if mask is not None and mask.shape[-2] == 1 < tokens:  # of padding alone
            padding = padding_in(mask, call.x.shape[0])
            call, mask = replace(call, mask=None, token_mask=padding), None
        if self.window is None:
            return replace(call, causal=True if mask is None else None)
        keys = tokens if mask is None else mask.shape[-1]
        near = torch.ones(tokens, keys, dtype=torch.bool, device=call.x.device).tril(keys - tokens)
        near = near.triu(keys - tokens - self.window + 1)[None, None]
        return replace(call, mask=near if mask is None else near & visible(mask))

    def probes(self, module: nn.Module, spec: AttentionSpec, x: Tensor) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        for args, kwargs in super().probes(module, spec, x):
            if kwargs.get("attention_mask") is None:
                yield args, kwargs
                continue
            mask = kwargs["attention_mask"]
            if mask.is_floating_point():
                yield args, {**kwargs, "attention_mask": mask[..., -1:, :]}
                yield args, kwargs


def _of_llama4(module: nn.Module) -> tuple[float, float] | None:
    """Return the factor and the length of Llama 4's temperature; the factor is 0 in layers without it."""
    if not hasattr(module, "attn_temperature_tuning"):
        return None
    used = module.attn_temperature_tuning and not getattr(module, "use_rope", False)
    return float(module.attn_scale) if used else 0.0, float(module.floor_scale)  # type: ignore[arg-type]


def _of_ministral3(module: nn.Module) -> tuple[float, float] | None:
    rope = getattr(getattr(module, "config", None), "rope_parameters", None)
    if not isinstance(rope, dict) or "position_ids" not in parameters_of(module) or rope.get("llama_4_scaling_beta") is None:
        return None
    return float(rope["llama_4_scaling_beta"]), float(rope["original_max_position_embeddings"])


def _pattern(module: nn.Module) -> Tensor | None:
    """Return the buffer (1, 1, tokens, tokens) of pairs that may see each other."""
    found = module._buffers.get("bias")
    if found is None or found.dim() != 4 or found.shape[-1] != found.shape[-2]:
        return None
    return found.bool()

"""T5 and its relatives: a relative position bias that the first layer computes and returns for the others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from segue.students.attention.families.by_name import ByName
from segue.students.attention.families.names import parameters_of
from segue.students.attention.spec import AttentionCall, AttentionSpec


class RelativeBias(nn.Module):
    """A logit for each head and each bucket of distances."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.embedding: nn.Embedding = module.relative_attention_bias
        settings = {
            "bidirectional": not module.is_decoder,
            "num_buckets": self.embedding.num_embeddings,
            "max_distance": int(module.relative_attention_max_distance),
        }
        bucket: Callable[..., Tensor] = type(module)._relative_position_bucket
        if "bidirectional" in inspect.signature(bucket).parameters:
            self.bucket = partial(bucket, **settings)
        else:  # a method, of UMT5
            names = ("is_decoder", "relative_attention_num_buckets", "relative_attention_max_distance")
            self.bucket = partial(bucket, SimpleNamespace(**{name: getattr(module, name) for name in names}))

    def forward(self, queries: int, keys: int) -> Tensor:
        position = torch.arange(keys, device=self.embedding.weight.device)
        distances = position - position[keys - queries :, None]
        return self.embedding(self.bucket(distances)).permute(2, 0, 1)[None]  # type: ignore[no-any-return]


class T5(ByName):
    """The self-attention of T5, whose layers share one bias, and its cross-attention, which has none."""

    name = "T5's attention"
    returns_bias = True

    def __init__(self, module: nn.Module, **reading: Any) -> None:
        super().__init__(module, **reading)
        self.cross = bool(module.is_decoder) and not module.is_causal

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        names = parameters_of(module)
        return hasattr(module, "_relative_position_bucket") and {"position_bias", "hidden_states"} <= names.keys()

    @classmethod
    def choices(cls, module: nn.Module) -> dict[str, tuple[Any, ...]]:
        from_call = not (module.has_relative_attention_bias or (module.is_decoder and not module.is_causal))
        return {**super().choices(module), "bias": ("added",) if from_call else ("none",), "scale": ("named",)}

    def parse(self, module: nn.Module) -> AttentionSpec:
        spec = super().parse(module)
        return replace(spec, bias=RelativeBias(module)) if module.has_relative_attention_bias else spec

    def unpack(self, *args: Any, **kwargs: Any) -> AttentionCall:
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        bias = given.get("position_bias")
        if self.cross and bias is not None and (torch.compiler.is_compiling() or not bias.any()):
            given["position_bias"] = None  # zeros, which the first layer returned
        return replace(super().unpack(**given), extra=bias)

    def result(self, y: Tensor, call: AttentionCall, bias: Tensor | None) -> tuple[Tensor, Tensor | None, None]:
        return y, call.extra if bias is None else bias, None


class UMT5(ByName):
    """The attention of UMT5: every layer computes a bias of its own, and none returns it."""

    name = "UMT5's attention"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        own = hasattr(module, "_relative_position_bucket") and getattr(module, "has_relative_attention_bias", False)
        return own and "position_bias" not in parameters_of(module) and super().matches(module)

    def parse(self, module: nn.Module) -> AttentionSpec:
        return replace(super().parse(module), bias=RelativeBias(module))

"""Attention whose logits get a bias that grows with the distance, given with the call: Bloom, Falcon, MPT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from segue.students.attention.families.by_name import ByName
from segue.students.attention.families.names import FUSED, find_number, find_part, parameters_of
from segue.students.attention.masks import visible
from segue.students.attention.spec import AttentionCall, AttentionSpec


class Alibi(ByName):
    """Read `alibi` or `position_bias`, and add the `residual` that Bloom gives to its attention.

    Where the bias is part of the mask (Falcon), it is taken out, so that a student can leave it out.
    """

    name = "attention with biases of distances"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        named = {"alibi", "position_bias"} & parameters_of(module).keys()
        return bool(named) and find_part(module, *FUSED) is not None and super().matches(module)

    @classmethod
    def choices(cls, module: nn.Module) -> dict[str, tuple[Any, ...]]:
        config = getattr(module, "config", None)
        choices = super().choices(module)
        if not getattr(config, "alibi", True):
            return {**choices, "bias": ("none",), "alibi": ("none",)}
        rows = ("shown", "hidden") if "position_bias" in parameters_of(module) else ("shown",)
        added = ("added", "scaled", "in the mask")
        return {**choices, "rotation": ("none",), "causal": (True,), "rows": rows, "bias": ("none",), "alibi": added}

    def __init__(self, module: nn.Module, **reading: Any) -> None:
        super().__init__(module, **reading)
        self.factor = find_number(module, "inv_norm_factor") or 1.0

    def parse(self, module: nn.Module) -> AttentionSpec:
        spec = replace(super().parse(module), biased=self.reading["alibi"] != "none")
        scale, dropout = find_number(module, "softmax_scale"), getattr(module, "hidden_dropout", None)
        dropout = dropout if "residual" in self.parameters and isinstance(dropout, float) else spec.dropout
        return replace(spec, scale=scale or spec.scale, dropout=dropout)

    def unpack(self, *args: Any, **kwargs: Any) -> AttentionCall:
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        residual = given.pop("residual", None)
        bias = given.pop("alibi", None) if "alibi" in self.parameters else given.pop("position_bias", None)
        if self.reading["alibi"] == "none":
            return super().unpack(**given)
        call = replace(super().unpack(**given), rotary=None, extra=residual)
        mask = call.mask
        if bias is not None:
            bias = self._of_heads(bias, call.x.shape[0])
            keys = bias.shape[-1] if mask is None else mask.shape[-1]
            bias = bias[..., -keys:]  # MPT's is as long as its longest sequence
        if mask is not None and self.reading.get("rows") == "hidden":
            mask = ~mask
        if mask is not None and mask.is_floating_point():
            shown = visible(mask)
            inside = mask.masked_fill(~shown, 0.0)
            bias = {"added": bias, "scaled": bias * self.factor + inside, "in the mask": inside}[self.reading["alibi"]]
            mask = mask if self.reading["alibi"] == "added" else shown
        return replace(call, mask=mask, bias=bias)

    def _of_heads(self, bias: Tensor, batch: int) -> Tensor:
        """Return a bias as (batch or 1, heads, 1, keys)."""
        if bias.dim() == 4:
            return bias
        return bias[None] if "position_bias" in self.parameters else bias.view(batch, -1, *bias.shape[1:])

    def result(self, y: Tensor, call: AttentionCall, bias: Tensor | None) -> Any:
        return self.pack(y if call.extra is None else y + call.extra)

    def arguments(self, spec: AttentionSpec, x: Tensor) -> dict[str, Any]:
        bias, named = self._some(spec, x), "alibi" if "alibi" in self.parameters else "position_bias"
        given: dict[str, Any] = {named: bias[0] if named == "position_bias" else bias.flatten(0, 1)}
        if self.reading["alibi"] == "none":
            given[named] = None
        return given | ({"residual": x.flip(1)} if "residual" in self.parameters else {})

    def probes(self, module: nn.Module, spec: AttentionSpec, x: Tensor) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        for args, kwargs in super().probes(module, spec, x):
            mask = kwargs.get("attention_mask")
            if mask is None:
                continue
            if self.reading["alibi"] in ("scaled", "in the mask") and mask.is_floating_point():
                mask = torch.where(mask < 0, mask, self._some(spec, x) * self.factor)
            elif self.reading.get("rows") == "hidden" and mask.dtype == torch.bool:
                mask = ~mask
            yield args, {**kwargs, "attention_mask": mask}

    @staticmethod
    def _some(spec: AttentionSpec, x: Tensor) -> Tensor:
        slopes = torch.linspace(0.2, 1.0, spec.heads, device=x.device, dtype=x.dtype).view(1, -1, 1, 1)
        return (slopes * torch.arange(x.shape[1], device=x.device)).expand(x.shape[0], -1, -1, -1)

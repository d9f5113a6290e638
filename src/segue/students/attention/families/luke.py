"""LUKE: words and entities come apart, are mixed together by the same weights, and return apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from segue.students.attention.families.by_name import ByName
from segue.students.attention.families.names import parameters_of
from segue.students.attention.spec import AttentionCall, AttentionSpec


class Luke(ByName):
    """The self-attention of LUKE, whose queries do not depend on what they ask: words or entities."""

    name = "attention of words and entities"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return {"word_hidden_states", "entity_hidden_states"} <= parameters_of(module).keys() and super().matches(module)

    def unpack(self, *args: Any, **kwargs: Any) -> AttentionCall:
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        words, entities = given["word_hidden_states"], given.pop("entity_hidden_states", None)
        given["word_hidden_states"] = words if entities is None else torch.cat([words, entities], dim=1)
        return replace(super().unpack(**given), extra=words.shape[1])

    def result(self, y: Tensor, call: AttentionCall, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        words, entities = y[:, : call.extra], y[:, call.extra :]
        return words, entities if entities.shape[1] else None

    def arguments(self, spec: AttentionSpec, x: Tensor) -> dict[str, Any]:
        words = x.shape[1] // 2
        return {"word_hidden_states": x[:, :words], "entity_hidden_states": x[:, words:]}

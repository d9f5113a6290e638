"""Shapes without values: a model on the meta device costs what it costs in memory, and takes no time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

FLASH = 1  # torch's number of this kernel


def shape_of(tree: Any) -> Any:
    """Return a tree with its tensors on the meta device."""
    return tree_map_only(Tensor, lambda x: x.to("meta"), tree)


def drop_values_(*models: nn.Module | None) -> None:
    """Move models to the meta device in place; what is tied stays tied."""
    moved: dict[int, Tensor] = {}

    def shape(x: Tensor) -> Tensor:
        if id(x) not in moved:
            plain = x.detach().to("meta")
            moved[id(x)] = nn.Parameter(plain, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else plain
        return moved[id(x)]

    held = [module for model in models if model is not None for module in model.modules()]
    tables: list[dict[str, Any]] = [table for module in held for table in (module._parameters, module._buffers)]
    before = [(table, dict(table)) for table in tables]  # so that ids last
    for table, tensors in before:
        table.update({name: shape(x) for name, x in tensors.items() if x is not None})


@contextmanager
def fused_attention() -> Iterator[None]:
    """Let attention on the meta device keep for its backward what it keeps on a CPU, where torch chooses a fused kernel."""
    plain = F.scaled_dot_product_attention

    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _attention(query, *args, **kwargs) if query.is_meta else plain(query, *args, **kwargs)

    F.scaled_dot_product_attention = attention  # not a mode: torch's MultiheadAttention would hide its inside from one
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


@contextmanager
def whole_texts(batch: Any) -> Iterator[None]:
    """Let transformers take texts on the meta device for whole ones, as their own position ids say they are.

    It looks at the values of those ids. Where a batch brings ids of its own it may hold packed texts: these need values.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if not hasattr(masks, "find_packed_sequence_indices") or (isinstance(batch, Mapping) and "position_ids" in batch):
        yield
        return
    plain = masks.find_packed_sequence_indices

    def find(position_ids: Tensor) -> Any:
        return None if position_ids.is_meta else plain(position_ids)

    masks.find_packed_sequence_indices = find
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = plain


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    plain: Any = torch.ops.aten.scaled_dot_product_attention
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    on_cpu = [None if x is None else _uninitialised(x) for x in (query, key, value, attn_mask)]
    choose: Any = torch._fused_sdp_choice
    if choose(*on_cpu, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa) != FLASH:
        result: Tensor = plain(*given, scale=scale, enable_gqa=enable_gqa)
        return result
    fused: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output


def _uninitialised(x: Tensor) -> Tensor:
    """Return a tensor of the same layout on the CPU, whose memory is never touched; torch decides by the layout alone."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, requires_grad=x.requires_grad)

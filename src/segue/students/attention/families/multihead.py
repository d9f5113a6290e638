"""torch.nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from segue.students.attention.masks import MASKED
from segue.students.attention.proof import MisreadError
from segue.students.attention.spec import AttentionCall, AttentionInterface, AttentionSpec, Projection, projection


class NotFused:
    """Make nn.TransformerEncoder call a module: its fast path asks for the weights and gives up on these."""

    requires_grad = True

    @property
    def weight(self) -> NotFused:
        return self

    bias = weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("this module has no weights that torch can fuse")


class TorchMultiheadAttention(AttentionInterface):
    """torch.nn.MultiheadAttention, as torchvision, nn.TransformerEncoder and nn.TransformerDecoder call it."""

    name = "torch.nn.MultiheadAttention"

    def __init__(self, module: nn.Module) -> None:
        self.batch_first = bool(module.batch_first)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention)

    def parse(self, module: nn.Module) -> AttentionSpec:
        assert isinstance(module, nn.MultiheadAttention)
        if module.add_zero_attn:
            raise MisreadError("It has add_zero_attn=True, a key of zeros, for which operators have no counterpart.")
        if module.bias_k is not None:
            raise MisreadError("It has add_bias_kv=True, a learned key and value, for which operators have no counterpart.")
        apart = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        weights = apart if module.in_proj_weight is None else module.in_proj_weight.chunk(3)
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        query, key, value = (Projection(weight, bias) for weight, bias in zip(weights, biases, strict=True))
        return AttentionSpec(
            heads=module.num_heads,
            head_size=module.head_dim,
            query=query,
            key=key,
            value=value,
            output=projection(module.out_proj),
        )

    def unpack(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> AttentionCall:
        alone = query.dim() == 2  # one sequence without a batch
        own = is_self_attention(self, key, query)  # attn(norm(x), norm(x), norm(x)) is self-attention too
        x, keys, values = (
            part[None] if alone else part if self.batch_first else part.transpose(0, 1) for part in (query, key, value)
        )
        token_mask, bias = _read_padding(key_padding_mask[None] if alone and key_padding_mask is not None else key_padding_mask)
        mask = attn_mask
        if mask is not None and mask.dim() == 3:  # (batch * heads, tokens, keys)
            mask = mask.view(x.shape[0], -1, *mask.shape[1:])
        mask = None if mask is None else mask[(None,) * (4 - mask.dim())]
        mask = ~mask if mask is not None and mask.dtype == torch.bool else mask
        return AttentionCall(
            x,
            token_mask,
            None if mask is not None else is_causal,
            mask=mask,
            bias=bias,
            keys=None if own else keys,
            values=None if value is key else values,
            cross=not own,
            extra=(alone, average_attn_weights),
            need_weights=need_weights,
        )

    def result(self, y: Tensor, call: AttentionCall, bias: Tensor | None) -> tuple[Tensor, Any]:
        alone, average = call.extra
        weights = call.weights
        if isinstance(weights, Tensor):
            weights = weights.mean(1) if average else weights
            weights = weights[0] if alone else weights
        return (y[0] if alone else y if self.batch_first else y.transpose(0, 1)), weights

    def probes(self, module: nn.Module, spec: AttentionSpec, x: Tensor) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        padding[-1, -2:] = True
        widths = spec.key.weight.shape[1], spec.value.weight.shape[1]
        keys, values = (x if width == spec.width else x[..., :1].expand(*x.shape[:2], width) for width in widths)
        given = (x, keys, values) if self.batch_first else tuple(part.transpose(0, 1) for part in (x, keys, values))
        given = (given[0],) * 3 if keys is x and values is x else given
        yield given, {"key_padding_mask": padding, "need_weights": False}

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        return {"_qkv_same_embed_dim": False, "in_proj_bias": None, "in_proj_weight": NotFused(), "out_proj": NotFused()}


def _read_padding(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Read torch's padding: True where a token is hidden, or numbers that are added to the logits of its key."""
    if mask is None:
        return None, None
    if mask.dtype == torch.bool:
        return ~mask, None
    shown = mask > MASKED
    hides_only = ((mask == 0) | ~shown).all()
    if torch.compiler.is_compiling():  # compiled code cannot look into it
        torch._assert_async(hides_only, "compiled code takes a key_padding_mask of booleans, or of 0 and minus infinity.")
        return shown, None
    if bool(hides_only):
        return shown, None
    return None, mask[:, None, None, :]


def is_self_attention(interface: AttentionInterface, keys: Tensor, x: Tensor) -> bool:
    """Return whether keys are computed from the queries' sequence: from one tensor, or from two of the same numbers.

    Compiled code cannot compare numbers: it takes what the last call before it found, and the device refuses anything else.
    """
    if keys is x or keys.shape != x.shape:
        return keys is x
    if not torch.compiler.is_compiling():
        interface.repeats_queries = torch.equal(keys, x)
    elif interface.repeats_queries:
        same = ((keys == x) | keys.isnan()).all()
        torch._assert_async(same, "an attention student was compiled for keys of the queries' numbers, and got others.")
    return interface.repeats_queries

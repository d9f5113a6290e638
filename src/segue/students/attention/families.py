"""The interfaces of the attention modules that Segue knows, one class per family."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from segue.errors import StudentError
from segue.students.attention.spec import (
    AttentionCall,
    AttentionInterface,
    AttentionSpec,
    Projection,
    check_spec,
    is_transposed_linear,
    projection,
    split_qkv,
)


class TimmAttention(AttentionInterface):
    """timm's `Attention`: one projection to queries, keys and values; masks and causality are arguments of the call."""

    name = "timm attention"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return _has_linears(module, "qkv", "proj") and isinstance(getattr(module, "num_heads", None), int)

    def parse(self, module: nn.Module) -> AttentionSpec:
        query, key, value = split_qkv(projection(module.get_submodule("qkv")))
        heads: Any = module.num_heads
        return AttentionSpec(
            heads=heads,
            head_size=query.weight.shape[0] // heads,
            query=query,
            key=key,
            value=value,
            output=projection(module.get_submodule("proj")),
            query_norm=_norm(module, "q_norm"),
            key_norm=_norm(module, "k_norm"),
            scale=_number(module, "scale"),
            dropout=getattr(getattr(module, "proj_drop", None), "p", 0.0),
        )

    def unpack(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> AttentionCall:
        pairs = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]  # as torch broadcasts it
        return AttentionCall(x, token_mask=_token_mask(pairs, x), causal=is_causal, mask=pairs)


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
    """torch.nn.MultiheadAttention, as torchvision and nn.TransformerEncoder call it, for self-attention."""

    name = "torch.nn.MultiheadAttention"

    def __init__(self, module: nn.Module) -> None:
        self.batch_first = bool(module.batch_first)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention)

    def parse(self, module: nn.Module) -> AttentionSpec:
        assert isinstance(module, nn.MultiheadAttention)
        if module.add_zero_attn:
            raise StudentError(
                "Segue cannot replace this MultiheadAttention.",
                "It has add_zero_attn=True, which the interface does not support.",
                "register an interface of your own (segue.students.register_attention). Nothing was changed.",
            )
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
        if key is not query or value is not query:
            raise _not_self_attention("keys or values of another sequence")
        x = query if self.batch_first else query.transpose(0, 1)
        token_mask = None if key_padding_mask is None else ~_is_masked(key_padding_mask)
        mask = None if attn_mask is None or is_causal else attn_mask[(None,) * (4 - attn_mask.dim())]
        mask = ~mask if mask is not None and mask.dtype == torch.bool else mask
        return AttentionCall(x, token_mask, is_causal, mask=mask)

    def pack(self, y: Tensor) -> tuple[Tensor, None]:
        return (y if self.batch_first else y.transpose(0, 1)), None

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        return {"_qkv_same_embed_dim": False, "in_proj_bias": None, "in_proj_weight": NotFused(), "out_proj": NotFused()}


class HuggingFace(AttentionInterface):
    """What Hugging Face's families share: masks over pairs of tokens, caches, outputs in a tuple."""

    def pack(self, y: Tensor) -> tuple[Tensor, None]:
        return y, None

    def call(self, x: Tensor, mask: Tensor | None, cache: Any, rotary: Any = None, encoder: Any = None) -> AttentionCall:
        if encoder is not None:
            raise _not_self_attention("the states of an encoder")
        return AttentionCall(x, _token_mask(mask, x), None, rotary, cache, _pairs(mask))


class HuggingFaceProjections(HuggingFace):
    """Hugging Face's ViT and the Llama, Qwen and Mistral family: q_proj, k_proj, v_proj, o_proj; grouped queries, rotation."""

    name = "Hugging Face ViT / Llama / Qwen / Mistral attention"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return _has_linears(module, "q_proj", "k_proj", "v_proj", "o_proj") and hasattr(module, "config")

    def parse(self, module: nn.Module) -> AttentionSpec:
        query, key, value, output = (projection(module.get_submodule(f"{name}_proj")) for name in "qkvo")
        head_size: Any = module.head_dim
        spec = AttentionSpec(
            heads=query.weight.shape[0] // head_size,
            head_size=head_size,
            query=query,
            key=key,
            value=value,
            output=output,
            query_norm=_norm(module, "q_norm"),
            key_norm=_norm(module, "k_norm"),
            scale=_number(module, "scaling"),
            rotary="position_embeddings" in inspect.signature(module.forward).parameters,
            causal=bool(getattr(module, "is_causal", False)),
            tokens=_longest(module.config),
            window=getattr(module, "sliding_window", None) or getattr(module.config, "sliding_window", None),
            layer=getattr(module, "layer_idx", None),
        )
        check_spec(module, spec)
        return spec

    def unpack(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> AttentionCall:
        return self.call(hidden_states, attention_mask, past_key_values, rotary=position_embeddings)


class HuggingFaceBert(HuggingFace):
    """BERT's `attention.self`, and RoBERTa's: three projections, no output projection."""

    name = "Hugging Face BERT attention (`attention.self`)"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return _has_linears(module, "query", "key", "value") and hasattr(module, "attention_head_size")

    def parse(self, module: nn.Module) -> AttentionSpec:
        if "Cross" in type(module).__name__:
            raise StudentError(
                f"Segue cannot replace {type(module).__name__}.",
                "It attends to the states of an encoder, and operators replace self-attention only.",
                "choose the self-attention sites. Nothing was changed.",
            )
        query, key, value = (projection(module.get_submodule(name)) for name in ("query", "key", "value"))
        head_size: Any = module.attention_head_size
        return AttentionSpec(
            heads=query.weight.shape[0] // head_size,
            head_size=head_size,
            query=query,
            key=key,
            value=value,
            scale=_number(module, "scaling"),
            causal=bool(getattr(module, "is_causal", False)),
            tokens=_longest(getattr(module, "config", None)),
            layer=getattr(module, "layer_idx", None),
        )

    def unpack(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None, **kwargs: Any
    ) -> AttentionCall:
        return self.call(hidden_states, attention_mask, past_key_values, encoder=kwargs.get("encoder_hidden_states"))


class HuggingFaceGpt2(HuggingFace):
    """GPT-2's attention: one transposed projection to queries, keys and values."""

    name = "Hugging Face GPT-2 attention"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        parts = (getattr(module, "c_attn", None), getattr(module, "c_proj", None))
        fused = all(isinstance(part, nn.Module) and is_transposed_linear(part) for part in parts)
        return fused and hasattr(module, "num_heads") and hasattr(module, "is_causal")

    def parse(self, module: nn.Module) -> AttentionSpec:
        query, key, value = split_qkv(projection(module.get_submodule("c_attn")))
        return AttentionSpec(
            heads=module.num_heads,  # type: ignore[arg-type]
            head_size=module.head_dim,  # type: ignore[arg-type]
            query=query,
            key=key,
            value=value,
            output=projection(module.get_submodule("c_proj")),
            scale=_number(module, "scaling"),
            causal=bool(module.is_causal),
            dropout=getattr(getattr(module, "resid_dropout", None), "p", 0.0),
            tokens=_longest(module.config),
            layer=module.layer_idx,  # type: ignore[arg-type]
        )

    def unpack(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        **kwargs: Any,
    ) -> AttentionCall:
        return self.call(hidden_states, attention_mask, past_key_values, encoder=encoder_hidden_states)


BUILT_IN: tuple[type[AttentionInterface], ...] = (
    TorchMultiheadAttention,
    HuggingFaceGpt2,
    HuggingFaceBert,
    HuggingFaceProjections,
    TimmAttention,
)


def _has_linears(module: nn.Module, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in names)


def _norm(module: nn.Module, name: str) -> nn.Module | None:
    norm = getattr(module, name, None)
    return norm if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity) else None


def _number(module: nn.Module, name: str) -> float | None:
    value = getattr(module, name, None)
    return float(value) if isinstance(value, int | float) else None


def _longest(config: Any) -> int | None:
    """Read the longest sequence from a Hugging Face configuration: positions, or patches and the class token."""
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if isinstance(image, int) and isinstance(patch, int):
        return (image // patch) ** 2 + 1
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def _is_masked(mask: Tensor) -> Tensor:
    """Read torch's masks: True, or minus infinity, where a token is masked."""
    return mask if mask.dtype == torch.bool else mask < 0


def _pairs(mask: Tensor | None) -> Tensor | None:
    """Return a mask over pairs of tokens as (batch, heads, tokens, tokens), None for a mask over tokens."""
    if mask is None or mask.dim() == 2:
        return None
    return mask if mask.dim() == 4 else mask[:, None]


def _token_mask(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Find padding in a mask over pairs: in a square one, tokens that do not see themselves; else, what the last row hides."""
    if mask is None:
        return None
    if mask.dim() == 2 and mask.shape[0] == x.shape[0]:
        return mask.bool()
    pairs = _pairs(mask if mask.dim() > 2 else mask[None, None])
    assert pairs is not None
    visible = pairs if pairs.dtype == torch.bool else pairs >= 0
    rows = visible.diagonal(dim1=-2, dim2=-1) if visible.shape[-1] == visible.shape[-2] else visible[..., -1, :]
    return rows[:, 0].expand(x.shape[0], -1)


def _not_self_attention(got: str) -> StudentError:
    found, hint = "Operators replace self-attention only.", "choose the self-attention sites."
    return StudentError(f"an attention student got {got}.", found, hint)

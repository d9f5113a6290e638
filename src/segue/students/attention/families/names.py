"""The names that parts, settings and arguments of attention modules have, and how they are looked up."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn

from segue.students.attention.spec import is_transposed_linear

APART = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("Wq", "Wk", "Wv"),
    ("query_proj", "key_proj", "value_proj"),
)
FUSED = ("qkv", "query_key_value", "qkv_proj", "Wqkv", "c_attn", "in_proj", "to_qkv", "wqkv")
OUTPUT = (
    "o_proj",
    "out_proj",
    "proj",
    "dense",
    "c_proj",
    "out_lin",
    "projection",
    "o",
    "wo",
    "Wo",
    "to_out",
    "to_out.0",
    "output_proj",
    "merge",
)
QUERY_NORM = ("q_norm", "q_layernorm", "query_layernorm", "norm_q", "qk_norm")
KEY_NORM = ("k_norm", "k_layernorm", "key_layernorm", "norm_k", "qk_norm")
GATE = ("gate_proj", "g_proj")  # of the heads' outputs
INNER_NORM = ("norm", "inner_attn_ln", "sub_norm", "attn_sub_norm")
RESIDUAL_NORM = ("LayerNorm",)
OUTPUT_DROPOUT = ("proj_drop", "resid_dropout", "resid_drop", "output_dropout", "to_out.1")
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
HEAD_SIZE = ("head_dim", "attention_head_size", "head_size", "dim_head", "d_kv", "key_value_proj_dim")
SCALE = ("scaling", "scale", "scale_attn", "scale_factor", "norm_factor")

ROLES = {
    "x": ("hidden_states", "x", "hidden", "query_tensor", "from_tensor", "input", "q", "word_hidden_states"),
    "mask": ("attention_mask", "attn_mask", "mask"),
    "rotary": ("position_embeddings", "sinusoidal_pos", "rotary_pos_emb", "rope", "freqs_cis", "rotary_emb"),
    "cache": ("past_key_values", "past_key_value", "layer_past", "cache"),
    "memory": ("key_value_states", "encoder_hidden_states", "context", "kv"),
    "memory mask": ("encoder_attention_mask",),
    "memory positions": ("encoder_position_embeddings",),
    "keys": ("key_tensor", "to_tensor", "k"),
    "values": ("value_tensor", "v"),
    "bias": ("position_bias", "relative_position_bias", "rel_pos", "rel_2d_pos", "shared_rel_pos"),
    "causal": ("is_causal",),
}
ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
# They change nothing in what attention returns: positions are in the rotation, and how to compute is up to the student.
HARMLESS = frozenset(
    {"position_ids", "cache_position", "use_cache", "num_items_in_batch", "return_dict", "output_hidden_states"}
    | {"resolution", "interpolate_pos_encoding"}  # of a table of positions, which is read as a part
)
ASKS_FOR_WEIGHTS = ("output_attentions", "need_weights", "return_weights")

BETWEEN_CHANNELS = "it is attention between channels, not between tokens, which operators mix"
POOLED = "its keys and values come from fewer, pooled tokens"
# Parts, or names of classes, that say what a module computes besides softmax attention of its own queries, keys and values.
BEYOND = {
    "wkv_b": "its keys and values come from a latent vector that they share (multi-head latent attention)",
    "lambda_q1": "it is the difference of two softmax attentions (differential attention)",
    "indexer": "a part of it, the indexer, chooses the keys that a query sees",
    "conv1d": "it is a recurrence with a convolution, not softmax attention",
    "slope_rate": "it is linear attention that decays with the distance, not softmax attention",
    "k_sconv": "its keys and values pass a convolution over the tokens",
    "dt_proj": "its mask is computed from its values",
    "is_kv_shared_layer": "it takes keys and values from another layer",
    "v_norm": "its values are normed, as its queries and keys are",
    "ChannelAttention": BETWEEN_CHANNELS,
    "ChannelAttentionV2": BETWEEN_CHANNELS,
    "XCA": BETWEEN_CHANNELS,
    "CrossCovarianceAttn": BETWEEN_CHANNELS,
    "proj_l": "its heads exchange their logits and their weights (talking heads)",
    "talking_head1": "its heads exchange their logits and their weights (talking heads)",
    "OutlookAttention": "its weights come from each token alone, without keys (outlook attention)",
    "LinearSelfAttention": "it is linear attention already, without a softmax over pairs of tokens",
    "EfficientAdditiveAttention": "it is linear attention already, without a softmax over pairs of tokens",
    "gating_param": "its weights are a softmax mixed with one of positions alone (gated positional attention)",
    "rel_pos_h": "what it adds to its logits depends on the queries (decomposed relative positions)",
    "sr": POOLED,
    "pool_k": POOLED,
    "MaskUnitAttention": "it attends inside units of tokens, and may keep the largest query of several (Hiera)",
    "latent": "it pools all tokens by a query of its own, and contains an MLP",
    "experts": "its queries and its output are computed by experts, which a router chooses for each token",
}


def beyond(module: nn.Module) -> str | None:
    """Return what a module computes that no field of an AttentionSpec can say, where a part of it tells."""
    found = {name: getattr(module, name, None) for name in BEYOND} | {type(module).__name__: True}
    composed = next((name for name in FUSED if isinstance(module._modules.get(name), nn.Module)), None)
    if composed is not None and find_part(module, composed) is None:
        return f"its {composed!r} is {type(module._modules[composed]).__name__}, more than a linear layer"
    held = (name for name, value in found.items() if value is not None and value is not False and name in BEYOND)
    return next((BEYOND[name] for name in held), None)


def is_cross(module: nn.Module, *names: str) -> bool:
    """Return whether its class, a flag, or names of its place say that a module is cross-attention."""
    said = re.compile("cross_?att|encoder_?attn|encdecatt", re.IGNORECASE)
    return any(said.search(name) for name in (type(module).__name__, *names)) or (
        getattr(module, "is_cross_attention", None) is True
    )


def parameters_of(module: nn.Module) -> dict[str, inspect.Parameter]:
    found = inspect.signature(module.forward).parameters
    return {name: p for name, p in found.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def find_apart(module: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module] | None:
    for names in APART:
        parts = [find_part(module, name) for name in names]
        if all(part is not None for part in parts):
            return parts[0], parts[1], parts[2]  # type: ignore[return-value]
    return None


def find_part(module: nn.Module, *names: str) -> nn.Module | None:
    """Return the first part with one of these names that is a linear layer, a convolution over single pixels or a dropout."""
    for name in names:
        part: Any = module
        for step in name.split("."):
            part = part._modules.get(step) if isinstance(part, nn.Module) else None
        if isinstance(part, nn.Linear | nn.Dropout) or (isinstance(part, nn.Module) and is_transposed_linear(part)):
            return part
        if isinstance(part, nn.Conv2d) and part.kernel_size == part.stride == (1, 1) and part.groups == 1:
            return part
    return None


def find_norm(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    norm = next((module._modules[name] for name in names if module._modules.get(name) is not None), None)
    return None if norm is None or isinstance(norm, nn.Identity) else norm


def find_number(module: Any, *names: str) -> float | None:
    values = (getattr(module, name, None) for name in names)
    return next((float(x) for x in values if isinstance(x, int | float) and not isinstance(x, bool) and x > 0), None)


def find_whole(module: Any, *names: str) -> int | None:
    values = (getattr(module, name, None) for name in names)
    return next((x for x in values if isinstance(x, int) and not isinstance(x, bool)), None)


def longest_sequence(config: Any) -> int | None:
    """Read the longest sequence from a Hugging Face configuration: positions, or patches and the class token."""
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if isinstance(image, int) and isinstance(patch, int):
        return (image // patch) ** 2 + 1
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None

"""Tiny models of transformers by their family's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.matrix.entries import VOCABULARY

SIZES = {
    "hidden_size": 32,
    "d_model": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_size": 32,
    "patch_size": 8,
    "use_cache": False,
}
DEPTHS = ("num_hidden_layers", "encoder_layers", "decoder_layers")


def configuration(family: str, layers: int, **settings: Any) -> Any:
    """Configure a family: the sizes that it has, at `layers` layers; `settings` may be functions of that number."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    standard = kind()
    sizes = {name: value for name, value in SIZES.items() if hasattr(standard, name)}
    sizes |= {name: layers for name in DEPTHS if hasattr(standard, name)}
    sizes |= {name: value(layers) if callable(value) else value for name, value in settings.items()}
    return kind(**{name: value for name, value in sizes.items() if value is not LEFT_OUT})


LEFT_OUT = object()  # in place of a size that a family has, and computes from others


def maker(family: str, model: str = "AutoModel", **settings: Any) -> Callable[[int], nn.Module]:
    """Return what builds a model of a family, by the name of its class or of an auto class."""

    def build(layers: int) -> nn.Module:
        import transformers

        config = configuration(family, layers, **settings)
        kind = getattr(transformers, model)
        return kind.from_config(config) if model.startswith("Auto") else kind(config)

    return build

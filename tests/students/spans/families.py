"""Models with four layers in a list, of many families, with tiny random weights, and how each is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torchvision
import transformers
from torch import Tensor, nn

from tests.helpers.models import padding, token_ids

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2


class Family(NamedTuple):
    """A model, how it is called, and the list of its layers."""

    make: Callable[..., nn.Module]
    batch: dict[str, Any]
    layers: str
    count: str  # the setting of its configuration that counts them, empty if it has none
    which: int = 0  # the layer of each group that is copied


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def causal(name: str, layers: str = "model.layers", **settings: Any) -> Family:
    def make(**changes: Any) -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**{**SIZES, **settings, **changes})
        return getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)

    return Family(make, {"input_ids": token_ids(), "attention_mask": padding()}, layers, "num_hidden_layers")


def plain(name: str, model: str, batch: dict[str, Any], layers: str, count: str, **settings: Any) -> Family:
    def make() -> nn.Module:
        return getattr(transformers, model)(getattr(transformers, f"{name}Config")(**settings))

    return Family(make, batch, layers, count)


TOKENS = {"input_ids": token_ids(), "attention_mask": padding()}
TRANSLATION = {**TOKENS, "decoder_input_ids": token_ids()}
SOUNDS = {"input_features": random(2, 8, 20), "decoder_input_ids": token_ids()[:2]}
IMAGES = {"pixel_values": random(2, 3, 16, 16)}
ENCODER = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
VISION = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
SEQ2SEQ = {
    "vocab_size": 50,
    "d_model": 32,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
BART = {**SEQ2SEQ, "max_position_embeddings": 32, "forced_eos_token_id": 2}
WHISPER = {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32, "suppress_tokens": None}
WHISPER = {**WHISPER, "begin_suppress_tokens": None}
T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_decoder_layers": 4, "num_heads": 4}
T5 = {**T5, "decoder_start_token_id": 0}
DEBERTA = {**ENCODER, "max_position_embeddings": 32, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
MAMBA = {"vocab_size": 50, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 4, "bos_token_id": 1, "eos_token_id": 1}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LINEAR = {f"linear_{what}": 2 for what in ("num_key_heads", "num_value_heads")}
LINEAR |= {f"linear_{what}": 8 for what in ("key_head_dim", "value_head_dim")}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
CHUNKED = {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 3, "intermediate_size_mlp": 48}

FAMILIES = {
    # sliding and full layers in turn: each kind has its own mask, and in Gemma 3 its own rotation
    "Gemma 2": causal("Gemma2", head_dim=8, sliding_window=3),
    "Gemma 3": causal("Gemma3Text", head_dim=8, sliding_window=3, layer_types=ALTERNATING),
    "GPT-OSS": causal(
        "GptOss",
        head_dim=8,
        sliding_window=3,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "Cohere 2": causal("Cohere2", sliding_window=3, layer_types=ALTERNATING),
    "ModernBERT": plain(
        "ModernBert",
        "ModernBertForSequenceClassification",
        TOKENS,
        "model.layers",
        "num_hidden_layers",
        **{**ENCODER, "local_attention": 4, "global_attn_every_n_layers": 2},
        **{f"{kind}_token_id": 1 for kind in ("pad", "bos", "eos", "cls", "sep")},
    ),
    # lists with an entry for each layer, positions of layers, the number of the first layers
    "Llama 4": causal("Llama4Text", intermediate_size=32, no_rope_layer_interval=2, moe_layers=[1, 2, 3], **CHUNKED),
    "SmolLM3": causal("SmolLM3", no_rope_layer_interval=2)._replace(which=-1),
    "DeepSeek 3": causal("DeepseekV3", first_k_dense_replace=2, num_key_value_heads=4, **ROUTED, **LATENT),
    "Qwen 2": causal("Qwen2", use_sliding_window=True, sliding_window=3, max_window_layers=2),
    "Qwen3-Next": causal("Qwen3Next", head_dim=8, layer_types=["full_attention", "linear_attention"] * 2, **EXPERTS, **LINEAR),
    "Mamba": plain("Mamba", "MambaForCausalLM", {"input_ids": token_ids()}, "backbone.layers", "num_hidden_layers", **MAMBA),
    # encoders and decoders
    "BART, encoder": plain("Bart", "BartForConditionalGeneration", TRANSLATION, "encoder.layers", "encoder_layers", **BART),
    "BART, decoder": plain("Bart", "BartForConditionalGeneration", TRANSLATION, "decoder.layers", "decoder_layers", **BART),
    "Whisper, encoder": plain(
        "Whisper", "WhisperForConditionalGeneration", SOUNDS, "encoder.layers", "encoder_layers", **WHISPER
    ),
    "Whisper, decoder": plain(
        "Whisper", "WhisperForConditionalGeneration", SOUNDS, "decoder.layers", "decoder_layers", **WHISPER
    ),
    "T5, encoder": plain("T5", "T5ForConditionalGeneration", TRANSLATION, "encoder.block", "num_layers", **T5),
    "T5, decoder": plain("T5", "T5ForConditionalGeneration", TRANSLATION, "decoder.block", "num_decoder_layers", **T5),
    "DeBERTa": plain(
        "DebertaV2", "DebertaV2ForSequenceClassification", TOKENS, "encoder.layer", "num_hidden_layers", **DEBERTA
    ),
    # vision
    "Swin": plain(
        "Swin",
        "SwinForImageClassification",
        IMAGES,
        "layers.1.blocks",
        "depths",
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=2,
        drop_path_rate=0.0,
    ),
    "DINOv2": plain("Dinov2", "Dinov2ForImageClassification", IMAGES, "encoder.layer", "num_hidden_layers", **VISION),
    "DINOv2, backbone": plain(
        "Dinov2", "Dinov2Backbone", IMAGES, "encoder.layer", "num_hidden_layers", out_indices=[2, 4], **VISION
    ),
    "BEiT": plain(
        "Beit",
        "BeitForImageClassification",
        IMAGES,
        "beit.layers",
        "num_hidden_layers",
        intermediate_size=48,
        out_indices=[1, 2, 3, 4],
        drop_path_rate=0.0,
        **VISION,
    ),
    "torchvision": Family(
        lambda: torchvision.models.VisionTransformer(16, 8, 4, 2, 16, 32, num_classes=3),
        {"x": random(2, 3, 16, 16)},
        "encoder.layers",
        "",
    ),
}


class Encoder(nn.Module):
    """torch's encoder, with a causal mask."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=batch_first), 4, enable_nested_tensor=False
        )

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1 if self.encoder.layers[0].self_attn.batch_first else 0])
        return self.encoder(x, mask=mask, is_causal=True)


class Decoder(nn.Module):
    """torch's decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True), 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, x.flip(1))


FAMILIES |= {
    "torch, encoder": Family(Encoder, {"x": random(2, 5, 16)}, "encoder.layers", ""),
    "torch, encoder, tokens first": Family(lambda: Encoder(batch_first=False), {"x": random(5, 2, 16)}, "encoder.layers", ""),
    "torch, decoder": Family(Decoder, {"x": random(2, 5, 16)}, "decoder.layers", ""),
}

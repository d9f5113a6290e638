"""Tiny encoders of text, images and sound, and encoder-decoders, of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.helpers import models
from tests.helpers.models import TOKENS, VOCABULARY, WIDTH

Call = Callable[[], dict[str, Any]]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def sentences() -> dict[str, Any]:
    return {"input_ids": models.token_ids().clamp_min(3), "attention_mask": models.padding()}


def pairs() -> dict[str, Any]:
    return {**sentences(), "decoder_input_ids": models.token_ids().clamp_min(3).flip(1)[:, :5]}


def images() -> dict[str, Any]:
    return {"pixel_values": _random(2, 3, 16, 16)}


def noisy_images() -> dict[str, Any]:
    return {**images(), "noise": torch.linspace(0, 1, 32).view(2, 16)}


def large_images() -> dict[str, Any]:
    return {"pixel_values": _random(2, 3, 64, 64)}


def patches() -> dict[str, Any]:
    shapes, mask = torch.tensor([[4, 4], [3, 4]]), torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    return {"pixel_values": _random(2, 16, 48), "pixel_attention_mask": mask, "spatial_shapes": shapes}


def sounds() -> dict[str, Any]:
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[1, 200:] = 0
    return {"input_values": _random(2, 300), "attention_mask": mask}


def spectrograms() -> dict[str, Any]:
    return {"input_values": _random(2, 32, 16)}


def boxes() -> dict[str, Any]:
    box = torch.randint(1, 400, (3, TOKENS, 2), generator=torch.Generator().manual_seed(1))
    return {**sentences(), "bbox": torch.cat([box, box + 100], dim=-1)}


def entities() -> dict[str, Any]:
    seen = torch.tensor([[1, 1], [1, 0], [1, 1]])
    places = torch.tensor([[[0, 1], [2, 3]]]).expand(3, -1, -1)
    return {**sentences(), "entity_ids": seen * 2, "entity_attention_mask": seen, "entity_position_ids": places}


def speech() -> dict[str, Any]:
    return {"input_features": _random(2, 8, 24), "decoder_input_ids": models.token_ids()[:2, :5].clamp_min(3)}


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A model, how to call it, and where its attention is."""

    kind: str  # the name that Hugging Face gives to the family
    sites: str = "encoder.layer.*.attention.self"
    cross: str | None = None  # the sites of its cross-attention
    call: Call = sentences
    settings: dict[str, Any]
    note: str = ""
    model: Any = transformers.AutoModel
    fused: bool = True  # it has an implementation on scaled_dot_product_attention

    def __str__(self) -> str:
        return f"{self.kind}, {self.note}" if self.note else self.kind

    def build(self, implementation: str = "eager", **settings: Any) -> nn.Module:
        config = transformers.AutoConfig.for_model(self.kind, **{**self.settings, **settings})
        make = getattr(self.model, "from_config", None) or self.model._from_config
        return models.build(lambda: make(config, attn_implementation=implementation)).eval()

    def output(self, model: nn.Module, call: dict[str, Any] | None = None) -> Tensor:
        """Call the model, and return its output at the tokens that are not padding."""
        call = self.call() if call is None else call
        y = getattr(output := model(**call), "logits", None)
        y = output.last_hidden_state if y is None else y
        mask = call.get("pixel_attention_mask", call.get("attention_mask"))
        return y[mask.bool()] if mask is not None and mask.shape == y.shape[:2] else y


CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
STILL = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
WORDS = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, **ENDS}
TEXT = {**WORDS, **SIZES, **CALM}
IMAGE = {"image_size": 16, "patch_size": 4, **SIZES, **CALM}
LAYERS = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}
BOTH = {
    **WORDS,
    **LAYERS,
    **STILL,
    "d_model": WIDTH,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
WHISPER = {
    **BOTH,
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "max_target_positions": 32,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
LED = {**BOTH, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32, "attention_window": 4}
T5 = {
    **ENDS,
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 1,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}
SOUND = {
    **SIZES,
    **STILL,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 5),
    "conv_stride": (5, 4),
    "feat_extract_norm": "layer",
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "hidden_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "layerdrop": 0.0,
    "vocab_size": VOCABULARY,
}
AST = {**SIZES, **CALM, "patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 32, "num_mel_bins": 16}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, **CALM}
LUKE = {**TEXT, "entity_vocab_size": 4, "entity_emb_size": 16, "use_entity_aware_attention": False}
XLM = {**WORDS, **STILL, "emb_dim": WIDTH, "n_layers": 2, "n_heads": 4, "n_langs": 1}
PYRAMID = {
    "depths": [1, 1],
    "hidden_sizes": [16, 32],
    "num_attention_heads": [2, 4],
    "num_encoder_blocks": 2,
    "mlp_ratios": [2, 2],
    **CALM,
}
DISTILBERT = {**WORDS, **STILL, "dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
MODERNBERT = {
    **TEXT,
    "local_attention": 4,
    "global_attn_every_n_layers": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "mlp_dropout": 0.0,
}
LAYOUT = {**TEXT, "max_2d_position_embeddings": 1024}
LAYOUTLMV3 = {**LAYOUT, "coordinate_size": 4, "shape_size": 8, "visual_embed": False}
MOBILEBERT = {**TEXT, "embedding_size": 16, "intra_bottleneck_size": 16, "num_feedforward_networks": 1}
CANINE = {
    **TEXT,
    "downsampling_rate": 2,
    "upsampling_kernel_size": 2,
    "num_hash_functions": 2,
    "num_hash_buckets": 16,
    "local_transformer_stride": 4,
}
SPARSE = {**TEXT, "attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1, "max_position_embeddings": 128}
DEBERTA = {
    **TEXT,
    "relative_attention": True,
    "position_buckets": 8,
    "pos_att_type": ["p2c", "c2p"],
    "max_relative_positions": 16,
}
RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 8, 8],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage4"],
}
DETR = {**LAYERS, **STILL, "d_model": WIDTH, "num_queries": 5, "backbone_config": transformers.ResNetConfig(**RESNET)}

ALBERT = "encoder.albert_layer_groups.*.albert_layers.*.attention"
READ = [
    Encoder(kind="bert", settings=TEXT),
    Encoder(kind="roberta", settings=TEXT),
    Encoder(kind="electra", settings={**TEXT, "embedding_size": WIDTH}),
    Encoder(kind="layoutlm", call=boxes, settings=LAYOUT),
    Encoder(kind="distilbert", sites="transformer.layer.*.attention", settings=DISTILBERT),
    Encoder(kind="albert", sites=ALBERT, settings={**TEXT, "embedding_size": 16}),
    Encoder(kind="mpnet", sites="encoder.layer.*.attention.attn", settings={**TEXT, "pad_token_id": 1}, fused=False),
    Encoder(kind="modernbert", sites="layers.*.attn", settings=MODERNBERT),
    Encoder(kind="esm", settings={**TEXT, "position_embedding_type": "rotary"}, note="rotary"),
    Encoder(kind="esm", settings={**TEXT, "position_embedding_type": "absolute"}, note="absolute"),
    Encoder(kind="roformer", settings={**TEXT, "embedding_size": WIDTH}, fused=False),
    Encoder(kind="layoutlmv3", call=boxes, settings=LAYOUTLMV3, fused=False),
    Encoder(kind="mobilebert", settings=MOBILEBERT),
    Encoder(kind="canine", settings=CANINE, fused=False),
    Encoder(kind="big_bird", settings={**TEXT, "attention_type": "original_full"}, fused=False),
    Encoder(
        kind="blip_text_model",
        sites="**.attention.self",
        settings={**TEXT, "encoder_hidden_size": WIDTH, "is_decoder": False},
        model=transformers.BlipTextModel,
        fused=False,
    ),
    Encoder(kind="luke", call=entities, settings=LUKE, fused=False),
    Encoder(kind="xlm", sites="attentions.*", settings=XLM, fused=False),
    Encoder(kind="clip_text_model", sites="**.self_attn", settings={**WORDS, **SIZES}),
    Encoder(kind="siglip_text_model", sites="**.self_attn", settings={**WORDS, **SIZES}, model=transformers.SiglipTextModel),
    Encoder(kind="vit", sites="**.attention", call=images, settings=IMAGE),
    Encoder(kind="deit", sites="**.attention", call=images, settings=IMAGE),
    Encoder(kind="dinov2", sites="**.attention", call=images, settings=IMAGE),
    Encoder(kind="dinov2_with_registers", sites="**.attention", call=images, settings=IMAGE),
    Encoder(
        kind="dinov3_vit",
        sites="**.attention",
        call=images,
        settings={**IMAGE, "num_attention_heads": 2, "num_register_tokens": 2},
    ),
    Encoder(kind="pixtral", sites="**.attention", call=images, settings={**IMAGE, "patch_size": 2}),
    Encoder(kind="swin", sites="**.attention", call=images, settings=SWIN),
    Encoder(kind="swinv2", sites="**.attention.self", call=images, settings=SWIN, fused=False),
    Encoder(
        kind="pvt",
        sites="**.attention.self",
        call=images,
        settings={**PYRAMID, "sequence_reduction_ratios": [2, 1], "patch_sizes": [4, 2], "strides": [4, 2], "image_size": 16},
        fused=False,
    ),
    Encoder(
        kind="segformer",
        sites="**.attention",
        call=images,
        settings={**PYRAMID, "sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2]},
    ),
    Encoder(kind="ijepa", sites="**.attention", call=images, settings=IMAGE),
    Encoder(kind="vit_mae", sites="**.attention", call=noisy_images, settings={**IMAGE, "mask_ratio": 0.25}),
    Encoder(
        kind="yolos",
        sites="**.attention.attention",
        call=images,
        settings={**IMAGE, "image_size": [16, 16], "num_detection_tokens": 3},
    ),
    Encoder(kind="beit", sites="**.attention", call=images, settings={**IMAGE, "use_absolute_position_embeddings": True}),
    Encoder(
        kind="beit", sites="**.attention", call=images, settings={**IMAGE, "use_relative_position_bias": True}, note="bias"
    ),
    Encoder(kind="audio-spectrogram-transformer", sites="**.attention", call=spectrograms, settings=AST),
    Encoder(kind="clip_vision_model", sites="**.self_attn", call=images, settings={"image_size": 16, "patch_size": 4, **SIZES}),
    Encoder(
        kind="siglip_vision_model", sites="**.self_attn", call=images, settings={"image_size": 16, "patch_size": 4, **SIZES}
    ),
    Encoder(
        kind="siglip2_vision_model", sites="**.self_attn", call=patches, settings={"num_patches": 16, "patch_size": 4, **SIZES}
    ),
    Encoder(
        kind="blip_vision_model",
        sites="**.self_attn",
        call=images,
        settings={"image_size": 16, "patch_size": 4, **SIZES},
        model=transformers.BlipVisionModel,
        fused=False,
    ),
    Encoder(kind="wav2vec2", sites="encoder.layers.*.attention", call=sounds, settings=SOUND),
    Encoder(kind="hubert", sites="encoder.layers.*.attention", call=sounds, settings=SOUND),
    *[
        Encoder(kind=kind, sites="**.self_attn", cross="**.encoder_attn", call=pairs, settings=BOTH)
        for kind in ("bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot")
    ],
    Encoder(kind="t5", sites="**.SelfAttention", cross="**.EncDecAttention", call=pairs, settings=T5),
    Encoder(kind="umt5", sites="**.SelfAttention", cross="**.EncDecAttention", call=pairs, settings=T5),
    Encoder(kind="whisper", sites="**.self_attn", cross="**.encoder_attn", call=speech, settings=WHISPER),
    Encoder(kind="led", sites="decoder.**.self_attn", cross="**.encoder_attn", call=pairs, settings=LED, fused=False),
    Encoder(kind="detr", sites="**.self_attn", cross="**.encoder_attn", call=large_images, settings=DETR, fused=False),
]

LILT = {**LAYOUT, "hidden_size": 48, "channel_shrink_ratio": 2}
NYSTROMFORMER = {**TEXT, "num_landmarks": TOKENS, "segment_means_seq_len": TOKENS}
REFUSED = [
    (Encoder(kind="roformer", settings={**TEXT, "rotary_value": True}, note="values"), "It rotates its values too"),
    (Encoder(kind="lilt", call=boxes, settings=LILT), "7,056 of its 8,856 parameters are read."),
    (
        Encoder(kind="bros", call=boxes, settings={**TEXT, "dim_bbox": 4}),
        "needs the argument 'bbox_pos_emb', whose meaning is unknown",
    ),
    (Encoder(kind="yoso", settings=TEXT), "Softmax attention with its weights returns another result"),
    (Encoder(kind="nystromformer", settings=NYSTROMFORMER), "3,168 of its 3,428 parameters are read."),
    (Encoder(kind="deberta-v2", settings=DEBERTA), "3,168 of its 5,280 parameters are read."),
    (Encoder(kind="big_bird", settings=SPARSE, note="sparse"), "Called as the interface expects, it raises TypeError"),
    (Encoder(kind="wavlm", sites="encoder.layers.*.attention", call=sounds, settings=SOUND), "parameters are read"),
]

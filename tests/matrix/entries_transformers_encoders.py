"""Encoders of text and audio, and encoder-decoders, of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.matrix.entries import TOKENS, Batch, Entry, features, generator, not_softmax, real_tokens, text, token_ids, unpadded
from tests.matrix.hugging_face import LEFT_OUT, maker

SELF = "encoder.layer.*.attention.self"
LAYER = "encoder.layer"


def encoder(
    family: str,
    name: str | None = None,
    *,
    attention: str | None = SELF,
    mlp: str | None = None,
    layers: str | None = LAYER,
    batch: Callable[[], Batch] = text,
    model: str = "AutoModel",
    blocks: str | None = None,
    **settings: Any,
) -> Entry:
    """Describe a family that is built as BERT is, or says where it differs."""
    return Entry(f"transformers {name or family}", maker(family, model, **settings), batch, attention, mlp, layers, blocks)


def boxes() -> Batch:
    return text(bbox=torch.randint(0, 40, (2, TOKENS, 4), generator=generator()).sort(dim=-1).values)


def page_boxes() -> Batch:  # of BROS: eight coordinates from 0 to 1
    return text(bbox=torch.rand(2, TOKENS, 4, generator=generator()))


def typed() -> Batch:
    return text(token_type_ids=torch.zeros(2, TOKENS, dtype=torch.long))


def pairs() -> Batch:
    """A source and a target, both padded; the outputs are the target's."""
    mask = real_tokens()
    ids = token_ids()
    return Batch(
        kwargs={"input_ids": ids, "attention_mask": mask.long(), "decoder_input_ids": ids.flip(1)}, tokens="decoder_input_ids"
    )


def sources() -> Batch:
    """The same; what is varied is the source, at the encoder's end."""
    mask = real_tokens()
    ids = token_ids()
    return Batch(kwargs={"input_ids": ids, "attention_mask": mask.long(), "decoder_input_ids": ids.flip(1)})


def waves() -> Batch:
    sound = torch.randn(2, 400, generator=generator())
    mask = torch.arange(400) < torch.tensor([400, 250])[:, None]
    return Batch(kwargs={"input_values": sound * mask, "attention_mask": mask.long()})


def spectrum() -> Batch:
    mask = real_tokens()
    return Batch(kwargs={"input_features": features(16), "attention_mask": mask.long()}, tokens="input_features", real=mask)


def whisper() -> Batch:
    return Batch(
        kwargs={"input_features": torch.randn(2, 8, 32, generator=generator()), "decoder_input_ids": token_ids()},
        tokens="decoder_input_ids",
    )


def encoder_decoder(
    family: str,
    *,
    batch: Callable[[], Batch] = pairs,
    encoder: str = "model.encoder.layers",
    decoder: str = "model.decoder.layers",
    own: str = "self_attn",
    cross: str = "encoder_attn",
    decoder_own: str | None = None,
    model: str = "AutoModelForSeq2SeqLM",
    **settings: Any,
) -> list[Entry]:
    """Describe the three kinds of attention of an encoder-decoder, each an entry."""
    build = maker(family, model, **settings)
    places = {"encoder": (f"{encoder}.*.{own}", encoder), "decoder": (f"{decoder}.*.{decoder_own or own}", decoder)}
    found = [
        Entry(
            f"transformers {family}, {where}",
            build,
            batch if where == "decoder" else sources if batch is pairs else batch,
            attention,
            None,
            layers,
            causal=where == "decoder",
            generates=where == "decoder",
        )
        for where, (attention, layers) in places.items()
    ]
    found.append(
        Entry(f"transformers {family}, cross-attention", build, batch, f"{decoder}.*.{cross}", part=True, generates=True)
    )
    return found


BART = {
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 2,
}
T5 = {
    "d_kv": 8,
    "d_ff": 64,
    "num_heads": 4,
    "num_layers": lambda n: n,
    "num_decoder_layers": lambda n: n,
    "decoder_start_token_id": 0,
    "encoder": "encoder.block",
    "decoder": "decoder.block",
    "own": "layer.0.SelfAttention",
    "cross": "layer.1.EncDecAttention",
}
WAVE = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "batch": waves,
    "attention": "encoder.layers.*.attention",
    "mlp": "encoder.layers.*.feed_forward",
    "layers": "encoder.layers",
    "hidden_dropout": 0.0,
    "layerdrop": 0.0,
}

ENTRIES = [
    encoder("bert"),
    encoder("roberta", max_position_embeddings=66, pad_token_id=1),
    encoder("electra", embedding_size=32),
    encoder("ernie"),
    encoder("megatron-bert", attention="encoder.layer.*.attention.self"),
    encoder("rembert", input_embedding_size=32, output_embedding_size=32),
    encoder(
        "albert",
        embedding_size=32,
        attention="encoder.albert_layer_groups.*.albert_layers.*.attention",
        layers=None,
        blocks="encoder",
        num_hidden_groups=1,
    ),
    encoder(
        "distilbert",
        attention="transformer.layer.*.attention",
        mlp="transformer.layer.*.ffn",
        layers="transformer.layer",
        dim=32,
        hidden_dim=64,
        n_heads=4,
        n_layers=lambda n: n,
    ),
    encoder("mpnet", attention="encoder.layer.*.attention.attn", max_position_embeddings=66, pad_token_id=1),
    encoder("deberta", attention="encoder.layer.*.attention.self", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    encoder(
        "deberta-v2",
        attention="encoder.layer.*.attention.self",
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=8,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    ),
    encoder(
        "modernbert",
        attention="layers.*.attn",
        mlp="layers.*.mlp",
        layers="layers",
        local_attention=4,
        global_attn_every_n_layers=2,
    ),
    encoder("roformer", embedding_size=32),
    encoder("esm", "esm (ESM-2)", position_embedding_type="rotary", token_dropout=False, mask_token_id=4),
    encoder("esm", "esm (ESM-1b)", position_embedding_type="absolute", token_dropout=False, mask_token_id=4),
    encoder("layoutlm", batch=boxes, max_2d_position_embeddings=64),
    encoder(
        "layoutlmv3",
        batch=boxes,
        max_2d_position_embeddings=64,
        coordinate_size=6,
        shape_size=4,
        visual_embed=False,
        has_relative_attention_bias=True,
        has_spatial_attention_bias=True,
        rel_pos_bins=8,
        rel_2d_pos_bins=8,
        pad_token_id=1,
        max_position_embeddings=66,
    ),
    encoder(
        "lilt", batch=boxes, hidden_size=24, max_2d_position_embeddings=64, channel_shrink_ratio=2, max_position_embeddings=66
    ),
    encoder("bros", batch=page_boxes, dim_bbox=4, bbox_scale=100.0),
    encoder("markuplm", max_depth=4, xpath_unit_hidden_size=8, pad_token_id=1, max_position_embeddings=66),
    encoder("mobilebert", embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=1, true_hidden_size=16),
    encoder(
        "squeezebert",
        attention="encoder.layers.*.attention",
        layers="encoder.layers",
        embedding_size=32,
        q_groups=1,
        k_groups=1,
        v_groups=1,
        post_attention_groups=1,
        intermediate_groups=1,
        output_groups=1,
    ),
    encoder(
        "canine",
        attention="encoder.layer.*.attention.self",
        downsampling_rate=2,
        num_hash_buckets=64,
        local_transformer_stride=4,
        upsampling_kernel_size=2,
    ),
    encoder("big_bird", attention_type="original_full"),
    not_softmax(
        encoder(
            "big_bird",
            "big_bird, sparse",
            attention_type="block_sparse",
            block_size=2,
            num_random_blocks=1,
            batch=lambda: Batch(kwargs={"input_ids": token_ids().repeat(1, 4)}, tokens="input_ids"),
        )
    ),
    encoder("longformer", attention_window=lambda n: [4] * n, max_position_embeddings=66, pad_token_id=1),
    not_softmax(encoder("nystromformer", batch=unpadded, num_landmarks=4, segment_means_seq_len=8, conv_kernel_size=3)),
    not_softmax(encoder("yoso", use_expectation=True, conv_window=None)),
    encoder("fnet", attention=None),
    encoder(
        "funnel",
        attention="encoder.blocks.*.*.attention",
        layers=None,
        blocks="encoder.blocks",
        d_head=8,
        d_inner=64,
        n_head=4,
        block_sizes=[1, 1],
        model="FunnelBaseModel",
        num_hidden_layers=LEFT_OUT,
    ),
    not_softmax(encoder("convbert", embedding_size=32, head_ratio=2, conv_kernel_size=3)),
    encoder("ibert", quant_mode=False, max_position_embeddings=66, pad_token_id=1),
    encoder(
        "luke",
        entity_vocab_size=8,
        entity_emb_size=8,
        use_entity_aware_attention=False,
        max_position_embeddings=66,
        pad_token_id=1,
    ),
    encoder(
        "xlm",
        attention="attentions.*",
        mlp="ffns.*",
        layers=None,
        blocks="ffns",
        emb_dim=32,
        n_layers=lambda n: n,
        n_heads=4,
        n_langs=1,
    ),
    encoder(
        "xlnet",
        attention="layer.*.rel_attn",
        mlp="layer.*.ff",
        layers="layer",
        d_inner=64,
        n_head=4,
        n_layer=lambda n: n,
        max_position_embeddings=LEFT_OUT,
    ),
    encoder("roberta-prelayernorm", max_position_embeddings=66, pad_token_id=1),
    encoder("nomic_bert", attention="layers.*.self_attn", mlp="layers.*.mlp", layers="layers"),
    encoder("eurobert", attention="layers.*.self_attn", mlp="layers.*.mlp", layers="layers"),
    encoder(
        "clip_text_model",
        "clip, text",
        attention="encoder.layers.*.self_attn",
        mlp="encoder.layers.*.mlp",
        layers="encoder.layers",
        model="CLIPTextModel",
    ),
    encoder(
        "siglip_text_model",
        "siglip, text",
        attention="encoder.layers.*.self_attn",
        mlp="encoder.layers.*.mlp",
        layers="encoder.layers",
        model="SiglipTextModel",
    ),
    encoder("wav2vec2", **WAVE),
    encoder("hubert", **WAVE),
    encoder("wavlm", **{**WAVE, "num_buckets": 8, "max_bucket_distance": 8}),
    encoder("unispeech", **WAVE),
    encoder("wav2vec2-conformer", **{**WAVE, "attention": "encoder.layers.*.self_attn", "mlp": "encoder.layers.*.ffn1"}),
    encoder(
        "wav2vec2-bert",
        batch=spectrum,
        attention="encoder.layers.*.self_attn",
        mlp="encoder.layers.*.ffn1",
        layers="encoder.layers",
        feature_projection_input_dim=16,
        layerdrop=0.0,
        mask_time_prob=0.0,
    ),
    encoder(
        "audio-spectrogram-transformer",
        "ast",
        attention="layers.*.attention",
        mlp="layers.*.mlp",
        layers="layers",
        max_length=32,
        num_mel_bins=16,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
        batch=lambda: Batch(kwargs={"input_values": features(16, 32)}),
    ),
    *encoder_decoder("t5", **T5),
    *encoder_decoder("umt5", **T5),
    *encoder_decoder("bart", **BART),
    *encoder_decoder("pegasus", **BART),
    *encoder_decoder("marian", **BART),
    *encoder_decoder("m2m_100", **BART),
    *encoder_decoder(
        "whisper",
        batch=whisper,
        model="WhisperForConditionalGeneration",
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=64,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **BART,
    ),
]

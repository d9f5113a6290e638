"""Vision models of timm and torchvision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.matrix.entries import Batch, Entry, images, not_softmax

PLAIN = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 4}


def create(name: str, **settings: Any) -> Callable[[int], nn.Module]:
    """Return what builds a model of timm; settings may be functions of the number of layers."""

    def build(layers: int) -> nn.Module:
        import timm

        chosen = {key: value(layers) if callable(value) else value for key, value in settings.items()}
        return timm.create_model(name, pretrained=False, num_classes=5, **chosen)

    return build


def flat(
    name: str,
    label: str | None = None,
    *,
    attention: str | None = "blocks.*.attn",
    mlp: str | None = "blocks.*.mlp",
    layers: str | None = "blocks",
    batch: Callable[[], Batch] = images,
    **settings: Any,
) -> Entry:
    """Describe a model of equal blocks."""
    sizes = {**PLAIN, "depth": lambda n: n, **settings}
    return Entry(f"timm {label or name}", create(name, **sizes), batch, attention, mlp, layers)


def pyramid(
    name: str,
    attention: str | None,
    mlp: str | None = None,
    *,
    layers: str | None = None,
    size: int = 32,
    label: str | None = None,
    blocks: str = "",
    **settings: Any,
) -> Entry:
    """Describe a model of several resolutions."""
    return Entry(f"timm {label or name}", create(name, **settings), lambda: images(size, None), attention, mlp, layers, blocks)


def fastvit(layers: int) -> nn.Module:
    from timm.models.fastvit import FastVit

    mixers = ("repmixer", "repmixer", "repmixer", "attention")
    return FastVit(layers=(1, 1, 1, layers), embed_dims=(8, 8, 16, 64), token_mixers=mixers, num_classes=5)


def volo(layers: int) -> nn.Module:
    from timm.models.volo import VOLO

    sizes = {"embed_dims": (16, 32, 32, 32), "num_heads": (2, 4, 4, 4), "stem_hidden_dim": 8}
    return VOLO(layers=(1, layers, 1, 1), img_size=32, num_classes=5, use_aux_head=False, **sizes)


def mixer(block: str) -> Callable[[int], nn.Module]:
    def build(layers: int) -> nn.Module:
        from timm.layers import GatedMlp, Mlp
        from timm.models import mlp_mixer

        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_classes": 5, "num_blocks": layers}
        gated = block == "SpatialGatingBlock"
        ratio, mlp = (4, GatedMlp) if gated else ((0.5, 4.0), Mlp)
        return mlp_mixer.MlpMixer(block_layer=getattr(mlp_mixer, block), mlp_ratio=ratio, mlp_layer=mlp, **sizes)

    return build


def nest(layers: int) -> nn.Module:
    from timm.models.nest import Nest

    sizes = {"embed_dims": (16, 32), "num_heads": (2, 4), "depths": (layers, 2)}
    return Nest(img_size=32, patch_size=4, num_levels=2, num_classes=5, **sizes)


def caformer(layers: int) -> nn.Module:
    from timm.models import metaformer as m

    mixers = [m.SepConv, m.SepConv, m.Attention, m.Attention]
    norms = [m.LayerNorm2dNoBias] * 2 + [m.LayerNormNoBias] * 2
    return m.MetaFormer(depths=(1, 1, 1, layers), dims=(8, 16, 32, 32), token_mixers=mixers, norm_layers=norms, num_classes=5)


def torchvision_vit(layers: int) -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32, patch_size=8, num_layers=layers, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=5
    )


def torchvision_swin(version: str) -> Callable[[int], nn.Module]:
    def build(layers: int) -> nn.Module:
        from torchvision.models import swin_transformer as swin

        block = swin.SwinTransformerBlockV2 if version == "v2" else None
        more = {"block": block, "downsample_layer": swin.PatchMergingV2} if block else {}
        return swin.SwinTransformer([4, 4], 16, [layers, 2], [2, 4], [2, 2], num_classes=5, **more)

    return build


def torchvision_maxvit(layers: int) -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit((32, 32), 16, 2, [16, 32], [1, 1], 8, 0.0, num_classes=5)


def torchvision_convnext(layers: int) -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(16, 32, layers), CNBlockConfig(32, None, 1)], num_classes=5)


DAVIT = {"depths": (1, 1), "embed_dims": (16, 32), "num_heads": (2, 4), "window_size": 2}
SWIN = {"img_size": 32, "patch_size": 4, "embed_dim": 16, "depths": lambda n: (n, 2), "num_heads": (2, 4), "window_size": 2}

ENTRIES = [
    flat("vit_tiny_patch16_224", "vit"),
    flat("vit_tiny_patch16_224", "vit, norms of queries and keys", qk_norm=True),
    flat("vit_base_patch16_clip_224", "vit (CLIP)"),
    flat("vit_base_patch14_dinov2", "vit (DINOv2)"),
    flat("vit_base_patch14_reg4_dinov2", "vit (DINOv2, registers)"),
    flat("vit_base_patch16_siglip_224", "vit (SigLIP, attention pool)"),
    flat("vit_small_patch16_18x2_224", "vit, parallel blocks", attention="blocks.*.attns.*.attn", mlp="blocks.*.ffns.*.mlp"),
    flat("deit_tiny_distilled_patch16_224", "deit, distilled"),
    flat("deit3_small_patch16_224", "deit3"),
    flat("aimv2_large_patch14_224", "aimv2"),
    flat("beit_base_patch16_224", "beit"),
    flat("beitv2_base_patch16_224", "beit, no relative bias", use_rel_pos_bias=False, use_abs_pos_emb=True),
    flat("beit3_base_patch16_224", "beit3"),
    flat("eva02_tiny_patch14_224", "eva02"),
    flat("eva_large_patch14_196", "eva"),
    flat("vit_small_patch16_dinov3", "vit (DINOv3)"),
    flat("vit_small_patch16_rope_224", "vit, axial rotation"),
    flat("vit_small_patch16_rope_mixed_224", "vit, mixed rotation"),
    flat("vit_relpos_small_patch16_224", "vit, relative positions (MLP)"),
    flat("vit_srelpos_small_patch16_224", "vit, relative positions (shared)"),
    flat("cait_xxs24_224", "cait"),
    not_softmax(flat("xcit_nano_12_p16_224", "xcit", attention="blocks.*.attn")),
    flat("convit_tiny", "convit", local_up_to_layer=1, embed_dim=8),
    flat(
        "tnt_s_patch16_224",
        "tnt",
        attention="blocks.*.attn_out",
        mlp="blocks.*.mlp",
        embed_dim=32,
        inner_dim=8,
        num_heads_outer=4,
        num_heads_inner=2,
        patch_size=8,
        num_heads=None,
    ),
    Entry("timm mlp-mixer", mixer("MixerBlock"), images, None, "blocks.*.mlp_channels", "blocks"),
    Entry("timm gmlp", mixer("SpatialGatingBlock"), images, None, None, "blocks"),
    pyramid(
        "swin_tiny_patch4_window7_224",
        "layers.*.blocks.*.attn",
        "layers.*.blocks.*.mlp",
        layers="layers.0.blocks",
        label="swin",
        **SWIN,
    ),
    pyramid(
        "swinv2_tiny_window8_256",
        "layers.*.blocks.*.attn",
        "layers.*.blocks.*.mlp",
        layers="layers.0.blocks",
        label="swinv2",
        **SWIN,
    ),
    pyramid(
        "davit_tiny",
        "stages.*.blocks.*.0.attn",
        "stages.*.blocks.*.*.mlp",
        label="davit, windows",
        **DAVIT,
    ),
    not_softmax(  # its softmax is over channels
        Entry(
            "timm davit, channels",
            create("davit_tiny", **DAVIT),
            lambda: images(32, None),
            "stages.*.blocks.*.1.attn",
            part=True,
        )
    ),
    Entry(
        "timm nest",
        nest,
        lambda: images(32, None),
        "levels.*.transformer_encoder.*.attn",
        "levels.*.transformer_encoder.*.mlp",
        "levels.0.transformer_encoder",
    ),
    Entry("timm volo", volo, lambda: images(32, None), "network.{2,3}.*.attn", "network.*.*.mlp", "network.2"),
    pyramid(
        "twins_pcpvt_small",
        "blocks.*.*.attn",
        "blocks.*.*.mlp",
        label="twins (PCPVT)",
        img_size=32,
        embed_dims=(16, 32),
        num_heads=(2, 4),
        mlp_ratios=(2, 2),
        depths=(2, 2),
        sr_ratios=(2, 1),
    ),
    pyramid(
        "twins_svt_small",
        "blocks.*.*.attn",
        "blocks.*.*.mlp",
        label="twins (SVT)",
        img_size=32,
        embed_dims=(16, 32),
        num_heads=(2, 4),
        mlp_ratios=(2, 2),
        depths=(2, 2),
        sr_ratios=(2, 1),
        wss=(2, 2),
    ),
    pyramid(
        "pvt_v2_b0",
        "stages.*.blocks.*.attn",
        "stages.*.blocks.*.mlp",
        label="pvt_v2",
        embed_dims=(16, 32),
        depths=lambda n: (n, 2),
        num_heads=(2, 4),
        sr_ratios=(2, 1),
        mlp_ratios=(2, 2),
        layers="stages.0.blocks",
    ),
    pyramid(
        "pit_ti_224",
        "transformers.*.blocks.*.attn",
        "transformers.*.blocks.*.mlp",
        label="pit",
        img_size=32,
        patch_size=8,
        stride=4,
        base_dims=(8, 8),
        depth=lambda n: (n, 2),
        heads=(2, 4),
        layers="transformers.0.blocks",
    ),
    Entry("timm fastvit", fastvit, lambda: images(64, None), "stages.3.blocks.*.token_mixer", None, "stages.3.blocks"),
    pyramid(
        "levit_128s",
        "stages.*.blocks.*.attn",
        None,
        label="levit",
        size=64,
        img_size=64,
        embed_dim=(16, 32),
        key_dim=8,
        depth=(1, 1),
        num_heads=(2, 4),
    ),
    pyramid(
        "hiera_tiny_224",
        "blocks.*.attn",
        "blocks.*.mlp",
        label="hiera",
        img_size=(64, 64),
        size=64,
        embed_dim=16,
        num_heads=1,
        stages=(1, 1),
        q_pool=1,
        mask_unit_size=(2, 2),
        mask_unit_attn=(True, False),
    ),
    pyramid(
        "crossvit_tiny_240",
        "blocks.*.blocks.*.*.attn",
        "blocks.*.blocks.*.*.mlp",
        label="crossvit",
        size=48,
        img_size=48,
        img_scale=(1.0, 1.0),
        patch_size=(12, 16),
        embed_dim=(16, 32),
        depth=((1, 1, 0),),
        num_heads=(2, 4),
    ),
    pyramid(
        "visformer_tiny",
        "stage{2,3}.*.attn",
        None,
        label="visformer",
        img_size=64,
        size=64,
        init_channels=8,
        embed_dim=32,
        depth=(1, 1, 1),
        num_heads=2,
    ),
    Entry("timm caformer", caformer, lambda: images(64, None), "stages.{2,3}.blocks.*.token_mixer", None, "stages.3.blocks"),
    pyramid(
        "convnext_atto",
        None,
        "stages.*.blocks.*.mlp",
        label="convnext",
        depths=lambda n: (n, 1, 1, 1),
        dims=(8, 16, 16, 32),
        layers="stages.0.blocks",
        size=64,
    ),
    pyramid("resnet18", None, None, label="resnet", channels=(8, 8, 16, 16), layers=None, blocks="layer1"),
    Entry(
        "torchvision vit", torchvision_vit, images, "encoder.layers.*.self_attention", "encoder.layers.*.mlp", "encoder.layers"
    ),
    Entry(
        "torchvision swin",
        torchvision_swin("v1"),
        lambda: images(32, None),
        "features.*.*.attn",
        "features.*.*.mlp",
        "features.1",
    ),
    Entry(
        "torchvision swinv2",
        torchvision_swin("v2"),
        lambda: images(32, None),
        "features.*.*.attn",
        "features.*.*.mlp",
        "features.1",
    ),
    Entry(
        "torchvision maxvit",
        torchvision_maxvit,
        lambda: images(32, None),
        "**.attn_layer.1",
        "**.mlp_layer",
        None,
        blocks="blocks",
    ),
    Entry("torchvision convnext", torchvision_convnext, lambda: images(32, None), None, None, "features.1"),
]

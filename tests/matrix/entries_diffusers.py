"""Models of diffusers: transformers and UNets that predict noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.matrix.entries import Batch, Entry, generator

HEADS = {"num_attention_heads": 4, "attention_head_dim": 8}


def noise(*shape: int) -> Tensor:
    return torch.randn(2, *shape, generator=generator())


def create(kind: str, **settings: Any) -> Callable[[int], nn.Module]:
    """Return what builds a model; settings may be functions of the number of layers."""

    def build(layers: int) -> nn.Module:
        import diffusers

        return getattr(diffusers, kind)(
            **{name: value(layers) if callable(value) else value for name, value in settings.items()}
        )

    return build


def latent(**others: Any) -> Callable[[], Batch]:
    """Return what makes a batch: latent images, time steps, and conditions."""

    def batch() -> Batch:
        given = {name: value() if callable(value) else value for name, value in others.items()}
        return Batch(kwargs={"hidden_states": noise(4, 8, 8), "timestep": torch.tensor([3, 700]), **given})

    return batch


def prompt() -> Tensor:
    return noise(6, 32)


def flux() -> Batch:
    place = torch.stack(torch.meshgrid(torch.zeros(1), torch.arange(4.0), torch.arange(4.0), indexing="ij"), -1).view(16, 3)
    return Batch(
        kwargs={
            "hidden_states": noise(16, 4),
            "encoder_hidden_states": prompt(),
            "pooled_projections": noise(32),
            "timestep": torch.tensor([0.3, 0.7]),
            "img_ids": place,
            "txt_ids": torch.zeros(6, 3),
        }
    )


def unet(conditioned: bool) -> Callable[[], Batch]:
    def batch() -> Batch:
        given = {"encoder_hidden_states": prompt()} if conditioned else {}
        return Batch(kwargs={"sample": noise(4, 8, 8), "timestep": torch.tensor([3, 700]), **given})

    return batch


def video() -> Batch:
    return Batch(
        kwargs={"hidden_states": noise(4, 2, 8, 8), "timestep": torch.tensor([3, 700]), "encoder_hidden_states": noise(6, 16)}
    )


def depth(layers: int) -> int:
    return layers


DIT = create(
    "DiTTransformer2DModel",
    in_channels=4,
    out_channels=8,
    num_layers=depth,
    sample_size=8,
    patch_size=2,
    num_embeds_ada_norm=10,
    norm_num_groups=4,
    **HEADS,
)
PIXART = create(
    "PixArtTransformer2DModel",
    in_channels=4,
    out_channels=8,
    num_layers=depth,
    sample_size=8,
    patch_size=2,
    cross_attention_dim=32,
    caption_channels=32,
    use_additional_conditions=False,
    norm_num_groups=4,
    **HEADS,
)
PIXART_BATCH = latent(
    encoder_hidden_states=prompt,
    added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    encoder_attention_mask=lambda: torch.arange(6) < torch.tensor([[6], [4]]),
)
SD3 = create(
    "SD3Transformer2DModel",
    sample_size=8,
    patch_size=2,
    in_channels=4,
    num_layers=depth,
    joint_attention_dim=32,
    caption_projection_dim=32,
    pooled_projection_dim=16,
    out_channels=4,
    pos_embed_max_size=8,
    **HEADS,
)
FLUX = create(
    "FluxTransformer2DModel",
    patch_size=1,
    in_channels=4,
    num_layers=depth,
    num_single_layers=depth,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=32,
    pooled_projection_dim=32,
    axes_dims_rope=[4, 4, 8],
)
UNET = create(
    "UNet2DConditionModel",
    sample_size=8,
    in_channels=4,
    out_channels=4,
    layers_per_block=1,
    block_out_channels=(16, 32),
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=32,
    attention_head_dim=4,
    norm_num_groups=4,
)
PLAIN_UNET = create(
    "UNet2DModel",
    sample_size=8,
    in_channels=4,
    out_channels=4,
    layers_per_block=1,
    block_out_channels=(16, 32),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=8,
    norm_num_groups=4,
)
WAN = create(
    "WanTransformer3DModel",
    patch_size=(1, 2, 2),
    num_attention_heads=2,
    attention_head_dim=16,
    in_channels=4,
    out_channels=4,
    text_dim=16,
    freq_dim=32,
    ffn_dim=64,
    num_layers=depth,
    rope_max_seq_len=32,
)
AURA = create(
    "AuraFlowTransformer2DModel",
    sample_size=8,
    patch_size=2,
    in_channels=4,
    num_mmdit_layers=depth,
    num_single_dit_layers=depth,
    joint_attention_dim=32,
    caption_projection_dim=32,
    out_channels=4,
    pos_embed_max_size=16,
    **HEADS,
)
BLOCKS = "transformer_blocks"

ENTRIES = [
    Entry(
        "diffusers DiT", DIT, latent(class_labels=lambda: torch.tensor([1, 2])), f"{BLOCKS}.*.attn1", f"{BLOCKS}.*.ff", BLOCKS
    ),
    Entry("diffusers PixArt", PIXART, PIXART_BATCH, f"{BLOCKS}.*.attn1", f"{BLOCKS}.*.ff", BLOCKS),
    Entry("diffusers PixArt, cross-attention", PIXART, PIXART_BATCH, f"{BLOCKS}.*.attn2", part=True),
    Entry(
        "diffusers SD3, joint",
        SD3,
        latent(encoder_hidden_states=prompt, pooled_projections=lambda: noise(16)),
        f"{BLOCKS}.*.attn",
        f"{BLOCKS}.*.ff",
        BLOCKS,
    ),
    Entry("diffusers FLUX, joint", FLUX, flux, f"{BLOCKS}.*.attn", f"{BLOCKS}.*.ff", BLOCKS),
    Entry("diffusers FLUX, single", FLUX, flux, f"single_{BLOCKS}.*.attn", None, f"single_{BLOCKS}"),
    Entry(
        "diffusers AuraFlow, single",
        AURA,
        latent(encoder_hidden_states=prompt, timestep=lambda: torch.tensor([0.1, 0.7])),
        "single_transformer_blocks.*.attn",
        "single_transformer_blocks.*.ff",
        "single_transformer_blocks",
    ),
    Entry("diffusers Wan", WAN, video, "blocks.*.attn1", "blocks.*.ffn", "blocks"),
    Entry("diffusers UNet", UNET, unet(True), "**.attn1", "**.ff", blocks="down_blocks"),
    Entry("diffusers UNet, cross-attention", UNET, unet(True), "**.attn2", part=True),
    Entry("diffusers UNet without text", PLAIN_UNET, unet(False), "**.attentions.*", None, blocks="down_blocks"),
]

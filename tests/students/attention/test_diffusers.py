"""Attention of diffusers: read by its processor, proved, replaced in models as they are called, and refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import segue
from segue.errors import StudentError
from segue.students import LinearAttention, SlidingWindow, Softmax
from segue.students.attention.interfaces import interface_of
from segue.students.attention.joint import JointAttention
from segue.students.attention.module import Operator

diffusers = pytest.importorskip("diffusers", reason="attention of diffusers needs diffusers (pip install segue[diffusers])")
processors = pytest.importorskip("diffusers.models.attention_processor")

SITE = segue.Site("attn")
Made = tuple[nn.Module, dict[str, Any], str]
TEXT = {"encoder_hidden_states": (2, 5, 12), "pooled_projections": (2, 10)}
SIZES: dict[str, Any] = {"attention_head_dim": 8, "num_attention_heads": 2}
STEPS = torch.tensor([1, 500])


def of_text(*names: str) -> dict[str, Tensor]:
    return {name: torch.randn(TEXT[name]) for name in names}


def dit() -> Made:
    model = diffusers.DiTTransformer2DModel(
        **SIZES, in_channels=4, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=10, norm_num_groups=1
    )
    return model, {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": STEPS, "class_labels": STEPS % 7}, "**.attn1"


def pixart(sites: str) -> Made:
    model = diffusers.PixArtTransformer2DModel(
        **SIZES, in_channels=4, num_layers=2, sample_size=8, patch_size=2, cross_attention_dim=16, caption_channels=12
    )
    padding = torch.tensor([[1.0] * 5, [1.0, 1.0, 1.0, 0.0, 0.0]])
    batch = {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": STEPS, **of_text("encoder_hidden_states")}
    added = {"encoder_attention_mask": padding, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    return model, batch | added, sites


def sd3(sites: str = "**.attn") -> Made:
    model = diffusers.SD3Transformer2DModel(
        **SIZES,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=10,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return model, {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": STEPS, **of_text(*TEXT)}, sites


def flux(sites: str) -> Made:
    model = diffusers.FluxTransformer2DModel(
        **SIZES,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=12,
        pooled_projection_dim=10,
        axes_dims_rope=(2, 2, 4),
    )
    places = {"img_ids": torch.rand(16, 3) * 5, "txt_ids": torch.zeros(5, 3)}
    return model, {"hidden_states": torch.randn(2, 16, 4), "timestep": STEPS / 1000, **places, **of_text(*TEXT)}, sites


def aura() -> Made:
    model = diffusers.AuraFlowTransformer2DModel(
        **SIZES,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        joint_attention_dim=12,
        caption_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=16,
    )
    text = of_text("encoder_hidden_states")
    return model, {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": STEPS / 1000, **text}, "**.attn"


def cog_video() -> Made:
    model = diffusers.CogVideoXTransformer3DModel(
        **SIZES,
        in_channels=4,
        out_channels=4,
        time_embed_dim=4,
        text_embed_dim=12,
        num_layers=1,
        sample_width=4,
        sample_height=4,
        sample_frames=5,
        max_text_seq_length=5,
        use_rotary_positional_embeddings=True,
    )
    angles = torch.rand(8, 8)
    batch = {"hidden_states": torch.randn(2, 2, 4, 4, 4), "timestep": STEPS, "image_rotary_emb": (angles.cos(), angles.sin())}
    return model, batch | of_text("encoder_hidden_states"), "**.attn1"


def wan(sites: str) -> Made:
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=16,
        num_layers=1,
        rope_max_seq_len=32,
    )
    return model, {"hidden_states": torch.randn(2, 4, 1, 4, 4), "timestep": STEPS, **of_text("encoder_hidden_states")}, sites


def unet() -> Made:
    model = diffusers.UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    return model, {"sample": torch.randn(2, 3, 8, 8), "timestep": STEPS}, "**.attentions.*"


def conditional_unet(sites: str) -> Made:
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=12,
        in_channels=3,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    text = of_text("encoder_hidden_states")
    return model, {"sample": torch.randn(2, 3, 8, 8), "timestep": STEPS, "encoder_attention_mask": mask, **text}, sites


OWN: dict[str, Callable[[], Made]] = {
    "DiT": dit,
    "PixArt": lambda: pixart("**.attn1"),
    "SD3": sd3,
    "SD3, dual": lambda: sd3("**.attn2"),
    "FLUX": lambda: flux("transformer_blocks.*.attn"),
    "FLUX, single": lambda: flux("single_transformer_blocks.*.attn"),
    "AuraFlow": aura,
    "CogVideoX": cog_video,
    "Wan": lambda: wan("**.attn1"),
    "UNet": unet,
    "conditional UNet": lambda: conditional_unet("**.attn1"),
}
CROSS: dict[str, Callable[[], Made]] = {
    "PixArt": lambda: pixart("**.attn2"),
    "Wan": lambda: wan("**.attn2"),
    "conditional UNet": lambda: conditional_unet("**.attn2"),
}
JOINT = {name: OWN[name] for name in ("SD3", "FLUX", "AuraFlow")}


def started(make: Callable[[], Made], student: Operator) -> tuple[nn.Module, dict[str, Any], segue.Handover, Tensor]:
    """Return a model halfway through a handover, a batch for it, and what it returned before."""
    torch.manual_seed(0)
    model, batch, sites = make()
    model.eval()
    before = model(**batch).sample.detach()
    half = segue.schedules.Constant(alpha=0.5)
    plan = segue.Plan(sites=sites, student=student, schedule=half, guidance=segue.losses.FeatureGuidance(schedule=half))
    return model, batch, segue.replace_(model, plan, total_steps=2), before


@pytest.mark.parametrize("make", [*OWN.values(), *CROSS.values()], ids=[*OWN, *(f"{name}, cross" for name in CROSS)])
def test_softmax_with_its_weights_is_the_attention(make: Callable[[], Made]) -> None:
    model, batch, handover, before = started(make, Softmax())
    with handover.as_student(), torch.no_grad():
        torch.testing.assert_close(model(**batch).sample, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("student", [LinearAttention(), SlidingWindow(window=2)], ids=["linear", "window"])
@pytest.mark.parametrize("make", list(OWN.values()), ids=list(OWN))
def test_an_operator_trains_and_takes_over(make: Callable[[], Made], student: Operator) -> None:
    model, batch, handover, before = started(make, student)
    model.train()
    (model(**batch).sample.square().mean() + handover.aux_loss()).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in handover.parameters())
    model.eval()
    with handover.as_student(), torch.no_grad():
        alone = model(**batch).sample
    assert not torch.allclose(alone, before, rtol=1e-6, atol=1e-7)
    handover.finalize_(force=True)
    torch.manual_seed(0)
    again, _, sites = make()
    segue.replace_(again, segue.Plan(sites=sites, student=student), total_steps=2).finalize_(force=True)
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(**batch).sample, alone, rtol=0, atol=0)


@pytest.mark.parametrize("make", list(CROSS.values()), ids=list(CROSS))
def test_cross_attention_can_be_linear_and_cannot_be_a_window(make: Callable[[], Made]) -> None:
    model, batch, handover, _ = started(make, LinearAttention())
    model.train()
    (model(**batch).sample.square().mean() + handover.aux_loss()).backward()
    assert all(p.grad is not None for p in handover.parameters())
    with pytest.raises(StudentError, match="SlidingWindow cannot be cross-attention"):
        started(make, SlidingWindow(window=2))


@pytest.mark.parametrize("make", list(JOINT.values()), ids=list(JOINT))
def test_both_streams_of_joint_attention_are_blended(make: Callable[[], Made]) -> None:
    model, batch, handover, _ = started(make, SlidingWindow(window=1))
    seam = next(seam for seam in handover.seams.values() if isinstance(seam.student, JointAttention))
    given: list[tuple[Any, ...]] = []
    seam.register_forward_hook(lambda _module, args, kwargs, output: given.append((args, kwargs, output)), with_kwargs=True)
    with torch.no_grad():
        model(**batch)
        ((args, kwargs, blend),) = given
        teacher, student = seam.require_teacher()(*args, **kwargs), seam.student(*args, **kwargs)
    assert len(blend) == len(teacher) == len(student) == 2
    for both, one, other in zip(blend, teacher, student, strict=True):
        assert not torch.allclose(one, other)
        torch.testing.assert_close(both, (one + other) / 2)


def test_a_joint_student_can_be_replaced_in_turn() -> None:
    model, batch, handover, before = started(sd3, Softmax())
    handover.finalize_(force=True)
    again = segue.replace_(model, segue.Plan(sites="**.attn", student=Softmax()), total_steps=2)
    with again.as_student(), torch.no_grad():
        torch.testing.assert_close(model(**batch).sample, before, rtol=1e-4, atol=1e-5)


def attention(**settings: Any) -> Any:
    torch.manual_seed(0)
    return processors.Attention(query_dim=8, heads=2, dim_head=4, **settings).eval()


def test_a_residual_does_not_hide_a_wrong_reading() -> None:
    """What a module adds to its input is compared, not the sum: attention of a UNet may be a thousandth of its residual."""
    module = attention(norm_num_groups=2, residual_connection=True, rescale_output_factor=2.0)
    for part in (module.to_q, module.to_k):  # so that attention weights differ
        nn.init.normal_(part.weight)
    with torch.no_grad():
        for part in (module.to_out[0].weight, module.to_out[0].bias):
            part.mul_(1e-4)
    interface, _ = interface_of(module, SITE)
    assert interface.residual(interface.unpack(torch.ones(1, 8, 2, 2))) is not None

    class Uniform(processors.AttnProcessor2_0):  # type: ignore[misc, name-defined]
        def __call__(self, attn: Any, *args: Any, **kwargs: Any) -> Any:
            weight, attn.to_q.weight.data = attn.to_q.weight.data, torch.zeros_like(attn.to_q.weight)
            try:
                return super().__call__(attn, *args, **kwargs)
            finally:
                attn.to_q.weight.data = weight

    Uniform.__name__ = "AttnProcessor2_0"
    module.set_processor(Uniform())
    with pytest.raises(StudentError, match="returns another result"):
        interface_of(module, SITE)


def test_masks_of_one_head_and_of_all_are_read() -> None:
    module = attention()
    student = Softmax()(module, SITE).eval()
    x, mask = torch.randn(3, 5, 8), torch.zeros(3, 1, 5)
    mask[1, :, 3:] = -10000.0
    for given in (mask, mask.repeat_interleave(2, dim=0)):
        torch.testing.assert_close(student(x, attention_mask=given), module(x, attention_mask=given))
    with pytest.raises(StudentError, match=r"an attention_mask of shape \(3, 1, 4\)"):
        student(x, attention_mask=mask[..., :4])


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        ("SlicedAttnAddedKVProcessor", "Its processor is SlicedAttnAddedKVProcessor, which Segue does not read."),
        ("SanaLinearAttnProcessor2_0", "Its processor is SanaLinearAttnProcessor2_0, linear attention"),
    ],
)
def test_other_processors_are_refused_by_name(processor: str, reason: str) -> None:
    made = getattr(processors, processor)
    module = attention(processor=made(1) if processor.startswith("Sliced") else made())
    with pytest.raises(StudentError, match=reason):
        interface_of(module, SITE)


def test_an_ip_adapter_is_refused_by_name() -> None:
    module = attention(cross_attention_dim=8)
    module.set_processor(processors.IPAdapterAttnProcessor2_0(hidden_size=8, cross_attention_dim=8))
    with pytest.raises(StudentError, match=r"Its processor is IPAdapterAttnProcessor2_0"):
        interface_of(module, SITE)


def test_fused_projections_and_unknown_parts_are_refused() -> None:
    module = attention()
    module.fuse_projections()
    with pytest.raises(StudentError, match=r"Its projections are fused"):
        interface_of(module, SITE)
    with pytest.raises(StudentError, match=r"It has 'norm_cross'"):
        interface_of(attention(cross_attention_norm="layer_norm", cross_attention_dim=8), SITE)


def test_arguments_that_are_not_read_are_refused() -> None:
    student = Softmax()(attention(), SITE)
    with pytest.raises(StudentError, match=r"the argument 'ip_hidden_states'"):
        student(torch.randn(1, 4, 8), ip_hidden_states=torch.zeros(1))
    model, _, _ = sd3()
    joint = Softmax()(model.get_submodule("transformer_blocks.0.attn"), SITE)
    with pytest.raises(StudentError, match=r"an attention_mask"):
        joint(torch.randn(1, 4, 16), torch.randn(1, 3, 16), torch.ones(1, 1, 7))

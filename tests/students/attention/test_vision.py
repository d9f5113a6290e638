"""Attention of vision models: read on grids, in blocks and in windows, with rotations and relative positions, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention, AttentionRope, DiffAttention, RelPosBias
from timm.models import (
    beit,
    cait,
    convit,
    davit,
    edgenext,
    eva,
    fastvit,
    levit,
    maxxvit,
    mobilevit,
    nest,
    pvt_v2,
    swin_transformer,
    swin_transformer_v2,
    tiny_vit,
    tnt,
    twins,
    visformer,
    volo,
    xcit,
)
from timm.models import vision_transformer_relpos as relpos
from timm.models import vision_transformer_sam as sam
from torch import Tensor, nn
from torchvision.models import maxvit
from torchvision.models import swin_transformer as torchvision_swin

import segue
from segue.errors import SegueWarning, StudentError
from segue.sites import Site
from segue.students import LinearAttention, SlidingWindow, Softmax, WindowedLinear
from tests.helpers.models import scramble_

WIDTH = 32


@dataclass(frozen=True)
class Case:
    """A module, and one of its calls."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    call: dict[str, Any] = field(default_factory=dict)
    biased: bool = False  # LinearAttention has to ignore a position bias
    asks: bool = False  # only the first token asks
    reduced: bool = False  # keys are fewer than queries

    def teacher(self) -> nn.Module:
        torch.manual_seed(0)
        teacher = self.make()
        teacher.eval()  # TinyViT's returns nothing
        scramble_(teacher)
        return teacher

    def input(self) -> Tensor:
        return torch.randn(*self.shape, generator=torch.Generator().manual_seed(1))


def rotation(tokens: int, size: int = 8, heads: int | None = None) -> Tensor:
    shape = (tokens, 2 * size) if heads is None else (heads, tokens, 2 * size)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def relative(**settings: Any) -> Callable[..., RelPosBias]:
    return lambda num_heads, **given: RelPosBias(num_heads=num_heads, **settings, **given)


def shift_mask() -> Tensor:
    """The mask of four windows of 2 x 2 that are shifted by one."""
    region = torch.tensor([[0, 0, 0, 1]] * 3 + [[2, 2, 2, 3]])
    numbers = region.view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)
    return -100.0 * (numbers[:, None] != numbers[:, :, None])


SHARED = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(3))
TOKENS, GRID, IMAGE = (2, 6, WIDTH), (2, 2, 3, WIDTH), (2, WIDTH, 2, 3)

CASES = {
    "gate and inner norm": Case(lambda: Attention(WIDTH, 4, gated=True, scale_norm=True, norm_layer=nn.LayerNorm), TOKENS),
    "AttentionRope": Case(lambda: AttentionRope(WIDTH, 4), TOKENS, {"rope": rotation(5)}),
    "AttentionRope, each head": Case(
        lambda: AttentionRope(WIDTH, 4, qk_norm=True, norm_layer=nn.LayerNorm), TOKENS, {"rope": rotation(5, heads=4)}
    ),
    "AttentionRope, grouped": Case(
        lambda: AttentionRope(WIDTH, 4, qkv_fused=False, num_kv_heads=2, num_prefix_tokens=2, rotate_half=True, gated=True),
        TOKENS,
        {"rope": rotation(4)},
    ),
    "EVA": Case(lambda: eva.EvaAttention(WIDTH, 4, norm_layer=nn.LayerNorm), TOKENS, {"rope": rotation(5)}),
    "EVA02": Case(lambda: eva.EvaAttention(WIDTH, 4, qkv_fused=False, norm_layer=nn.LayerNorm), TOKENS, {"rope": rotation(5)}),
    "EVA without rotation": Case(lambda: eva.EvaAttention(WIDTH, 4, scale_norm=False), TOKENS),
    "BEiT": Case(lambda: beit.Attention(WIDTH, 4, qkv_bias=True, window_size=(1, 5)), TOKENS, biased=True),
    "BEiT without relative positions": Case(lambda: beit.Attention(WIDTH, 4, qkv_bias=True), TOKENS),
    "relative positions": Case(
        lambda: relpos.RelPosAttention(WIDTH, 4, rel_pos_cls=relative(window_size=(2, 3))), TOKENS, biased=True
    ),
    "shared relative positions": Case(
        lambda: relpos.RelPosAttention(WIDTH, 4, qk_norm=True), TOKENS, {"shared_rel_pos": SHARED}, biased=True
    ),
    "FastViT": Case(lambda: fastvit.Attention(WIDTH, 8), IMAGE),
    "Visformer": Case(lambda: visformer.Attention(WIDTH, 4), IMAGE),
    "MaxViT, channels first": Case(
        lambda: maxxvit.Attention2d(WIDTH, dim_head=8, rel_pos_cls=relative(window_size=(2, 3))), IMAGE, biased=True
    ),
    "MaxViT, channels last": Case(
        lambda: maxxvit.AttentionCl(WIDTH, dim_head=8, rel_pos_cls=relative(window_size=(2, 3))), GRID, biased=True
    ),
    "VOLO": Case(lambda: volo.Attention(WIDTH, 4), GRID),
    "NesT": Case(lambda: nest.Attention(WIDTH, 4), (2, 3, 4, WIDTH)),
    "DaViT, windows": Case(lambda: davit.WindowAttention(WIDTH, (2, 3), 4), TOKENS),
    "TinyViT": Case(lambda: tiny_vit.Attention(WIDTH, 8, 4, attn_ratio=1, resolution=(2, 3)), TOKENS, biased=True),
    "TNT": Case(lambda: tnt.Attention(WIDTH, WIDTH, 4), TOKENS),
    "CaiT, class token": Case(lambda: cait.ClassAttn(WIDTH, 4), TOKENS, asks=True),
    "VOLO, class token": Case(lambda: volo.ClassAttention(WIDTH, 4), TOKENS, asks=True),
    "Twins, windows": Case(lambda: twins.LocallyGroupedAttn(WIDTH, 4, ws=2), (2, 15, WIDTH), {"size": (3, 5)}),
    "Twins, not reduced": Case(lambda: twins.GlobalSubSampleAttn(WIDTH, 4, sr_ratio=1), TOKENS, {"size": (2, 3)}),
    "PVT v2, not reduced": Case(lambda: pvt_v2.Attention(WIDTH, 4, sr_ratio=1), TOKENS, {"feat_size": (2, 3)}),
    "Twins, reduced": Case(
        lambda: twins.GlobalSubSampleAttn(WIDTH, 4, sr_ratio=2), (2, 24, WIDTH), {"size": (4, 6)}, reduced=True
    ),
    "PVT v2": Case(lambda: pvt_v2.Attention(WIDTH, 4, sr_ratio=2), (2, 24, WIDTH), {"feat_size": (4, 6)}, reduced=True),
    "PVT v2, linear": Case(
        lambda: pvt_v2.Attention(WIDTH, 4, linear_attn=True), (2, 24, WIDTH), {"feat_size": (4, 6)}, reduced=True
    ),
    "Swin": Case(lambda: swin_transformer.WindowAttention(WIDTH, 4, window_size=2), (8, 4, WIDTH), biased=True),
    "Swin, shifted": Case(
        lambda: swin_transformer.WindowAttention(WIDTH, 4, window_size=2), (8, 4, WIDTH), {"mask": shift_mask()}, biased=True
    ),
    "Swin v2, shifted": Case(
        lambda: swin_transformer_v2.WindowAttention(WIDTH, (2, 2), 4), (8, 4, WIDTH), {"mask": shift_mask()}, biased=True
    ),
    "torchvision Swin, shifted": Case(
        lambda: torchvision_swin.ShiftedWindowAttention(WIDTH, [2, 2], [1, 1], 4), (2, 5, 4, WIDTH), biased=True
    ),
    "torchvision Swin v2": Case(
        lambda: torchvision_swin.ShiftedWindowAttentionV2(WIDTH, [2, 2], [1, 1], 4), (2, 4, 6, WIDTH), biased=True
    ),
    "torchvision Swin, one window": Case(
        lambda: torchvision_swin.ShiftedWindowAttention(WIDTH, [4, 4], [2, 2], 4), (2, 4, 4, WIDTH), biased=True
    ),
    "torchvision MaxViT": Case(lambda: maxvit.RelativePositionalMultiHeadAttention(WIDTH, 8, 4), (2, 3, 4, WIDTH), biased=True),
}

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def operators(case: Case) -> list[Any]:
    linear = LinearAttention(ignore=("bias",)) if case.biased else LinearAttention()
    return [linear] if case.asks else [linear, SlidingWindow(window=2)]


@every_case
def test_a_softmax_student_is_its_teacher(case: Case) -> None:
    teacher, x = case.teacher(), case.input()
    expected = teacher(x, **case.call)
    students = [Softmax()(teacher, Site("attn"))]
    students += [] if case.asks else [SlidingWindow(window=60, sinks=0)(teacher, Site("attn"))]
    for student in students:
        torch.testing.assert_close(student(x, **case.call), expected, rtol=1e-4, atol=1e-4)


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.attn, self.call = case.teacher(), case.call

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attn(x, **self.call)
        return y


@every_case
@pytest.mark.filterwarnings("ignore:LinearAttention leaves the position bias:segue.errors.SegueWarning")
def test_operators_train_and_reload(case: Case) -> None:
    for operator in operators(case):
        plan = segue.Plan(sites="attn", student=operator)
        x, model, fresh = case.input(), Model(case), Model(case)
        scramble_(fresh)
        original = model(x)
        handover = segue.replace_(model, plan, total_steps=4)
        torch.testing.assert_close(model(x), original, rtol=1e-4, atol=1e-5)
        handover.step()
        handover.step()
        model.train()(x).square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in handover.parameters())
        handover.finalize_(force=True)
        y = model.eval()(x)
        assert y.shape == original.shape
        assert not torch.allclose(y, original, atol=1e-3)
        segue.replace_(fresh, plan, total_steps=4).finalize_(force=True)
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(fresh.eval()(x), y)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.reduced])
def test_operators_that_need_a_key_for_each_token_refuse_a_reduction(name: str) -> None:
    with pytest.raises(StudentError, match="(?s)WindowedLinear cannot be cross-attention.*or fewer.*Nothing was changed"):
        WindowedLinear()(CASES[name].teacher(), Site("attn"))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.biased])
def test_operators_without_logits_refuse_relative_positions(name: str) -> None:
    teacher = CASES[name].teacher()
    with pytest.raises(StudentError, match="LinearAttention cannot honour the position bias of site 'attn'"):
        LinearAttention()(teacher, Site("attn"))
    with pytest.warns(SegueWarning, match="LinearAttention leaves the position bias of its teacher out"):
        LinearAttention(ignore=("bias",))(teacher, Site("attn"))


def test_a_shared_bias_that_nothing_announces() -> None:
    teacher, x = CASES["BEiT without relative positions"].teacher(), torch.randn(*TOKENS)
    expected = teacher(x, shared_rel_pos_bias=SHARED)
    torch.testing.assert_close(Softmax()(teacher, Site("attn"))(x, shared_rel_pos_bias=SHARED), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(StudentError, match="LinearAttention cannot add a bias to its logits"):
        LinearAttention()(teacher, Site("attn"))(x, shared_rel_pos_bias=SHARED)


@pytest.mark.filterwarnings("ignore:LinearAttention leaves the position bias:segue.errors.SegueWarning")
@pytest.mark.parametrize("name", ["Swin, shifted", "torchvision Swin, shifted"])
def test_linear_attention_stays_inside_a_region(name: str) -> None:
    """A shifted window holds tokens from both edges of the image, which do not see each other."""
    case = CASES[name]
    x, student = case.input(), LinearAttention(ignore=("bias",))(case.teacher(), Site("attn"))
    y = student(x, **case.call)
    changed = x.clone()
    if x.dim() == 3:
        changed[3, 3] += 1.0  # alone in its region of the last window
        same = torch.ones(8, 4, dtype=torch.bool)
        same[3, 3] = False
    else:
        changed[0, 0, 0] += 1.0  # shifted into the last window, with the other three corners
        same = torch.ones(2, 5, 4, dtype=torch.bool)
        same[0, 0, 0] = False
    assert torch.equal(student(changed, **case.call)[same], y[same])
    assert not torch.equal(student(changed, **case.call)[~same], y[~same])


REFUSED = {
    "DaViT, channels": (lambda: davit.ChannelAttention(WIDTH, 4), "attention between channels, not between tokens"),
    "DaViT, channels v2": (lambda: davit.ChannelAttentionV2(WIDTH, 4), "attention between channels, not between tokens"),
    "XCiT": (lambda: xcit.XCA(WIDTH, 4), "attention between channels, not between tokens"),
    "EdgeNeXt": (lambda: edgenext.CrossCovarianceAttn(WIDTH, 4), "attention between channels, not between tokens"),
    "CaiT": (lambda: cait.TalkingHeadAttn(WIDTH, 4), "talking heads"),
    "differential": (lambda: DiffAttention(WIDTH, 4), "difference of two softmax attentions"),
    "VOLO, outlook": (lambda: volo.OutlookAttention(WIDTH, 4), "outlook attention"),
    "MobileViT v2": (lambda: mobilevit.LinearSelfAttention(WIDTH), "linear attention already"),
    "SAM": (
        lambda: sam.Attention(WIDTH, 4, use_rel_pos=True, input_size=(2, 3)),
        "depends on the queries (decomposed relative positions)",
    ),
    "ConViT": (lambda: convit.GPSA(WIDTH, 4), "gated positional attention"),
    "LeViT": (lambda: levit.Attention(WIDTH, 8, 4, resolution=(2, 3)), "Its 'qkv' is LinearNorm, more than a linear layer"),
    "attention pool": (lambda: timm.layers.AttentionPoolLatent(WIDTH, num_heads=4), "pools all tokens by a query of its own"),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_attention_between_tokens_is_refused_with_the_reason(make: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(StudentError) as caught:
        LinearAttention(ignore=("bias",))(make(), Site("blocks.0.attn"))
    wrong, found, hint = str(caught.value).split("\n", 2)
    assert wrong == "Segue cannot read the module at site 'blocks.0.attn' as attention."
    assert reason in found
    assert "class Mine" not in hint


MODELS = {
    "DINOv3": ("vit_small_patch16_dinov3", {}),
    "axial rotation": ("vit_small_patch16_rope_224", {}),
    "mixed rotation": ("vit_small_patch16_rope_mixed_224", {}),
    "EVA02": ("eva02_tiny_patch14_224", {}),
    "BEiT": ("beit_base_patch16_224", {}),
    "shared relative positions": ("vit_srelpos_small_patch16_224", {}),
    "DINOv2, registers": ("vit_base_patch14_reg4_dinov2", {}),
    "DeiT 3": ("deit3_small_patch16_224", {}),
    "SigLIP": ("vit_base_patch16_siglip_224", {}),
}


@pytest.mark.parametrize(("name", "settings"), MODELS.values(), ids=MODELS)
@pytest.mark.filterwarnings("ignore:LinearAttention leaves the position bias:segue.errors.SegueWarning")
def test_models_of_timm(name: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "num_heads": 4, "depth": 1, "num_classes": 3}
    model = timm.create_model(name, pretrained=False, **{**sizes, **settings}).eval()
    scramble_(model)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(images)
        control = copy.deepcopy(model)
        plan = segue.Plan(sites="blocks.*.attn", student=Softmax())
        segue.replace_(control, plan, total_steps=2).finalize_(force=True)
        torch.testing.assert_close(control(images), expected, rtol=1e-3, atol=1e-3)
    plan = segue.Plan(sites="blocks.*.attn", student=LinearAttention(ignore=("bias",)))
    handover = segue.replace_(model, plan, total_steps=2)
    handover.step()
    model.train()(images).square().mean().backward()
    assert all(p.grad is not None for p in handover.parameters())

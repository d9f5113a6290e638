"""Where the features of an output are: real models with features last and with channels first."""

import copy

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import segue
from segue.core.modes import Watch
from segue.errors import PlanError
from segue.losses import CosineGuidance, FeatureAxis, OnTeacherStream
from tests.helpers.tiny import constant

STAGES = {"depths": [1, 1], "num_heads": [2, 4]}


def torchvision_swin() -> nn.Module:
    return torchvision.models.SwinTransformer([4, 4], 16, window_size=[4, 4], num_classes=3, **STAGES)


def timm_swin() -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4)}
    return timm.create_model("swin_tiny_patch4_window7_224", pretrained=False, num_classes=3, **sizes)


def timm_convnext() -> nn.Module:
    return timm.create_model("convnext_tiny", pretrained=False, num_classes=3, depths=(1, 1, 1, 1), dims=(8, 16, 32, 64))


def timm_resnet() -> nn.Module:
    return timm.create_model("resnet18", pretrained=False, num_classes=3, channels=(16, 16, 32, 32))


MODELS = {  # model, sites, image, axis of the features
    "torchvision's Swin, blocks": (torchvision_swin, "features.{1,3}.*", 32, -1),
    "torchvision's Swin, attention": (torchvision_swin, "features.*.*.attn", 32, -1),
    "torchvision's Swin, patches": (torchvision_swin, "features.0", 32, -1),
    "torchvision's Swin, activations": (torchvision_swin, "features.*.*.mlp.1", 32, -1),
    "torchvision's Swin, as wide as high": (torchvision_swin, "features.1.0.attn", 64, -1),  # (1, 16, 16, 16)
    "timm's Swin": (timm_swin, "layers.*.blocks.*", 32, -1),
    "timm's ConvNeXt": (timm_convnext, "stages.*.blocks.*", 64, 1),
    "timm's ConvNeXt, depthwise": (timm_convnext, "stages.*.blocks.*.conv_dw", 64, 1),
    "timm's ConvNeXt, linear layers": (timm_convnext, "stages.*.blocks.*.mlp", 64, -1),
    "timm's ResNet": (timm_resnet, "layer*.1", 64, 1),
    "timm's ResNet, as wide as high": (timm_resnet, "layer1.1", 64, 1),  # (1, 16, 16, 16)
}


class Changed(nn.Module):
    """The teacher's output, and something else added."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = copy.deepcopy(teacher), nn.Parameter(torch.ones(()))

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        output = self.inner(*args)
        return output + self.scale * torch.arange(output.numel()).sin().view_as(output)


def handed(case: str, guidance=None) -> tuple[segue.Handover, torch.Tensor]:
    make, sites, size, _ = MODELS[case]
    torch.manual_seed(0)
    plan = segue.Plan(
        sites=sites,
        student=lambda teacher, site: Changed(teacher),
        guidance=guidance or CosineGuidance(schedule=constant(1.0)),
        schedule=constant(0.5),
    )
    return segue.replace_(make().train(), plan, total_steps=10), torch.randn(1, 3, size, size)


@pytest.mark.parametrize("case", MODELS)
def test_the_cosine_is_over_the_features(case):
    axis = MODELS[case][3]
    handover, images = handed(case)
    handover.model(images)
    pairs = {name: seam.records[0] for name, seam in handover.seams.items()}
    assert all(t.dim() == 4 for t, _ in pairs.values())
    parts = handover.losses()
    for name, (t, s) in pairs.items():
        expected = 1 - F.cosine_similarity(t, s, dim=axis).mean()
        torch.testing.assert_close(parts[f"guidance/{name}"], expected)
    with handover.recording(Watch.PAIR), torch.no_grad(), handover.as_student():
        handover.model.eval()(images)
        pairs = {name: seam.records[0] for name, seam in handover.seams.items()}
    for name, found in handover.similarity(images).items():
        assert found.cosine == pytest.approx(F.cosine_similarity(*pairs[name], dim=axis).mean().item(), abs=1e-5)


def test_a_plan_can_state_the_axis():
    stated = FeatureAxis(axis=2, then=CosineGuidance(schedule=constant(1.0)))
    for guidance in (stated, OnTeacherStream(then=stated)):
        handover, images = handed("torchvision's Swin, blocks", guidance)
        handover.model(images)
        records = {name: seam.records[0] for name, seam in handover.seams.items()}
        if guidance is stated:
            for name, (t, s) in records.items():
                expected = 1 - F.cosine_similarity(t, s, dim=2).mean()
                torch.testing.assert_close(handover.losses()[f"guidance/{name}"], expected)
        assert handover.aux_loss().isfinite()


def test_the_axis_stands_inside_the_stream():
    with pytest.raises(PlanError, match=r"write OnTeacherStream\(then=FeatureAxis"):
        FeatureAxis(then=OnTeacherStream())

import json

import pytest
import torch
from timm.layers import LayerNorm, LayerNorm2d, LayerNormFp32
from torch import Tensor, nn

import segue
from segue.errors import StudentError
from segue.sites import Site
from segue.students import Kaiming, RmsNorm
from tests.helpers.models import bert, build, hf_vit, images, named_images, padded_tokens, sentences, torch_encoder
from tests.students.handing_over import compiled_equals_eager, through_a_handover, timm_vit

SITE = Site("here")
CASES = {
    "timm": (timm_vit, images, "blocks.*.norm{1,2}"),
    "HF ViT": (hf_vit, named_images, "vit.layers.*.layernorm_before"),
    "HF BERT": (bert, sentences, "bert.encoder.**.LayerNorm"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_family_goes_through_a_handover(case, tmp_path):
    make, batch, sites = CASES[case]
    plan = segue.Plan(sites=sites, student=RmsNorm(), teacher_gradient="BERT" in case)
    model = through_a_handover(make, batch(), plan, tmp_path)
    places = segue.sites.select(build(make), sites)
    assert len(places) >= 2
    assert all(isinstance(model.get_submodule(site.name), nn.RMSNorm) for site in places)


@pytest.mark.parametrize("kind", [nn.LayerNorm, LayerNorm, LayerNormFp32])
def test_the_formula(kind):
    teacher = kind(6, eps=1e-3).eval()
    nn.init.normal_(teacher.weight)
    nn.init.normal_(teacher.bias)
    student = RmsNorm()(teacher, SITE)
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(student(x), x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * teacher.weight)
    assert [name for name, _ in student.named_parameters()] == ["weight"]
    assert student.weight is not teacher.weight
    assert student.weight.requires_grad
    assert not student.training


def test_without_a_mean_and_a_bias_the_two_norms_agree():
    teacher = nn.LayerNorm(6)
    nn.init.normal_(teacher.weight)
    x = torch.randn(2, 6)
    x = x - x.mean(-1, keepdim=True)
    torch.testing.assert_close(RmsNorm()(teacher, SITE)(x), teacher(x))


def test_kaiming_begins_at_one():
    teacher = nn.LayerNorm((2, 3))
    nn.init.normal_(teacher.weight)
    student = RmsNorm(init=Kaiming())(teacher, SITE)
    assert student.weight.tolist() == [[1.0] * 3] * 2


def test_a_norm_without_weights_and_one_in_another_dtype():
    plain = RmsNorm()(nn.LayerNorm(6, elementwise_affine=False), SITE)
    assert not list(plain.parameters())
    x = torch.randn(2, 6)
    torch.testing.assert_close(plain(x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    assert RmsNorm()(nn.LayerNorm(6, bias=False, dtype=torch.bfloat16), SITE).weight.dtype == torch.bfloat16


def test_half_precision_under_autocast_raises_no_warning():
    student = RmsNorm()(nn.LayerNorm(6), SITE)
    x = torch.randn(2, 6).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = student(x)
        assert student(x.float()).dtype == torch.float32
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, student(x.float()).bfloat16())


def test_torchs_encoder_does_not_compute_a_layer_norm_in_its_place():
    batch = padded_tokens()
    model = build(torch_encoder)
    plan = segue.Plan(sites="layers.*.norm{1,2}", student=RmsNorm(), teacher_gradient=True)
    handover = segue.replace_(model, plan, total_steps=1)
    with handover.as_student():
        expected = batch.predict(model)
    handover.finalize_(force=True)
    real = batch.mask.bool()
    torch.testing.assert_close(batch.predict(model)[real], expected[real])
    x = torch.randn(1, 4, 32)
    layer = model.layers[0].eval()
    with torch.no_grad():
        attended = layer.norm1(x + layer.self_attn(x, x, x)[0])
        torch.testing.assert_close(layer(x), layer.norm2(attended + layer._ff_block(attended)))


def test_it_compiles_as_one_graph():
    compiled_equals_eager(RmsNorm()(nn.LayerNorm(6), SITE), torch.randn(3, 6))


def test_it_saves_as_data():
    plan = segue.Plan(sites="a", student=RmsNorm(init=Kaiming()))
    assert segue.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


class Centred(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("teacher", "found"),
    [
        (nn.BatchNorm1d(4), "BatchNorm1d, which is not an nn.LayerNorm"),
        (nn.Linear(4, 4), "Linear, which is not an nn.LayerNorm"),
        (LayerNorm2d(4), "LayerNorm2d, which does more than normalise the last dimensions"),
        (Centred(4), "Centred, which does more than normalise the last dimensions"),
    ],
    ids=lambda x: "" if isinstance(x, str) else type(x).__name__,
)
def test_other_modules_are_refused(teacher, found):
    with pytest.raises(StudentError) as error:
        RmsNorm()(teacher, Site("blocks.0.norm1"))
    assert str(error.value) == (
        "RmsNorm() cannot replace the module at site 'blocks.0.norm1'.\n"
        f"  It is {found}.\n"
        "  Hint: choose layer norms over the last dimension, such as 'blocks.*.norm1' or '**.LayerNorm'. Nothing was changed."
    )

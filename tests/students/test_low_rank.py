import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import segue
from segue.errors import PlanError, StudentError
from segue.sites import Site
from segue.students import CopyMatching, Kaiming, LowRankMlp, TruncatedSvd
from segue.students.low_rank import LowRankLinear, is_linear
from tests.helpers.models import bert, build, gpt2, hf_vit, images, llama, named_images, sentences, text
from tests.students.handing_over import compiled_equals_eager, through_a_handover, timm_glu, timm_swiglu, timm_vit

SITE = Site("here")
CASES = {
    "timm Mlp": (timm_vit, images, "blocks.*.mlp"),
    "timm SwiGLU": (timm_swiglu, images, "blocks.*.mlp"),
    "timm GluMlp": (timm_glu, images, "blocks.*.mlp"),
    "HF ViT": (hf_vit, named_images, "vit.layers.*.mlp"),
    "HF GPT-2": (gpt2, text, "transformer.h.*.mlp"),
    "HF Llama": (llama, text, "model.layers.*.mlp"),
    "HF BERT": (bert, sentences, ["bert.encoder.layer.*.intermediate", "bert.encoder.layer.*.output"]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_family_goes_through_a_handover(case, tmp_path):
    make, batch, sites = CASES[case]
    plan = segue.Plan(sites=sites, student=LowRankMlp(rank=4), teacher_gradient="BERT" in case)
    model = through_a_handover(make, batch(), plan, tmp_path)
    inside = [m for site in segue.sites.select(build(make), sites) for m in model.get_submodule(site.name).modules()]
    assert any(isinstance(m, LowRankLinear) for m in inside)
    assert not any(isinstance(m, nn.Linear | Conv1D) for m in inside)


@pytest.mark.parametrize("case", CASES)
def test_at_full_rank_the_student_is_its_teacher(case):
    make, batch, sites = CASES[case]
    model = build(make)
    smallest = min(min(m.weight.shape) for s in segue.sites.select(model, sites) for m in linear_maps(model, s.name))
    plan = segue.Plan(sites=sites, student=LowRankMlp(rank=smallest))
    handover = segue.replace_(model, plan, total_steps=4)
    with handover.as_student():
        students = batch().predict(model)
    with handover.as_teacher():
        teachers = batch().predict(model)
    torch.testing.assert_close(students, teachers, rtol=1e-3, atol=1e-4)


def linear_maps(model: nn.Module, name: str) -> list[nn.Module]:
    return [m for m in model.get_submodule(name).modules() if isinstance(m, nn.Linear | Conv1D)]


@pytest.mark.parametrize(("out", "into", "rank"), [(12, 20, 5), (20, 12, 1), (7, 7, 7), (1, 9, 1)])
def test_the_product_is_the_best_approximation_of_its_rank(out, into, rank):
    teacher = nn.Linear(into, out)
    student = LowRankMlp(rank=rank)(teacher, SITE)
    u, s, vh = torch.linalg.svd(teacher.weight.detach(), full_matrices=False)
    torch.testing.assert_close(student.weight, u[:, :rank] @ s[:rank].diag() @ vh[:rank])
    error = torch.linalg.matrix_norm(teacher.weight - student.weight)
    assert error.item() == pytest.approx(s[rank:].square().sum().sqrt().item(), abs=1e-5)  # Eckart and Young
    torch.testing.assert_close(student.down.norm(dim=1), s[:rank].sqrt())  # shared evenly between the factors
    torch.testing.assert_close(student.up.norm(dim=0), s[:rank].sqrt())
    assert torch.equal(student.bias, teacher.bias)
    x = torch.randn(2, 3, into)
    torch.testing.assert_close(student(x), x @ student.weight.T + teacher.bias)


def test_a_map_stored_the_other_way_round():
    teacher = Conv1D(nf=12, nx=5)
    nn.init.normal_(teacher.bias)
    student = LowRankMlp(rank=5)(teacher, SITE)
    assert (student.nf, student.nx, student.in_features, student.out_features) == (12, 5, 5, 12)
    x = torch.randn(2, 3, 5)
    torch.testing.assert_close(student(x), teacher(x))


def test_directions_that_the_teacher_does_not_use_can_be_learned():
    teacher = nn.Linear(6, 6)
    with torch.no_grad():
        teacher.weight.zero_()[0, 0] = 3.0
    student = LowRankMlp(rank=4)(teacher, SITE)
    torch.testing.assert_close(student.weight, teacher.weight)
    student(torch.randn(5, 6)).square().sum().backward()
    student(torch.randn(5, 6)).sum().backward()
    assert (student.up.grad.norm(dim=0) > 0).all()
    with torch.no_grad():
        teacher.weight.zero_()
    assert LowRankMlp(rank=4)(teacher, SITE).weight.abs().sum() == 0


def test_norms_and_residuals_stay():
    layer = build(bert).bert.encoder.layer[0]
    student = LowRankMlp(rank=3)(layer.output, SITE)
    assert torch.equal(student.LayerNorm.weight, layer.output.LayerNorm.weight)
    assert torch.equal(student.LayerNorm.bias, layer.output.LayerNorm.bias)
    assert student.dense.in_features == 64


def test_a_shared_map_stays_shared():
    shared = nn.Linear(6, 6)
    student = LowRankMlp(rank=2)(nn.Sequential(shared, nn.ReLU(), shared), SITE)
    assert student[0] is student[2]


def test_kaiming_gives_the_product_its_variance():
    student = LowRankMlp(rank=200, init=Kaiming())(nn.Linear(400, 300), SITE)
    assert student.weight.std().item() == pytest.approx((2 / 400) ** 0.5, rel=0.02)
    assert student.bias.count_nonzero() == 0


def test_dtype_mode_and_bias_follow_the_teacher():
    student = LowRankMlp(rank=2)(nn.Linear(6, 4, bias=False, dtype=torch.bfloat16).eval().requires_grad_(False), SITE)
    assert student.down.dtype == student.up.dtype == torch.bfloat16
    assert student.bias is None
    assert not student.training
    assert all(p.requires_grad for p in student.parameters())
    assert LowRankMlp(rank=6)(nn.Linear(6, 6).double(), SITE).weight.dtype == torch.float64


def test_it_compiles_as_one_graph():
    student = LowRankMlp(rank=2)(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)), SITE)
    compiled_equals_eager(student, torch.randn(3, 6))


def test_it_saves_as_data():
    plan = segue.Plan(sites="a", student=LowRankMlp(rank=3, init=Kaiming()))
    assert segue.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_rank_too_high_is_refused_and_says_what_would_save():
    model = build(timm_vit)
    with pytest.raises(StudentError) as error:
        segue.replace_(model, segue.Plan(sites="blocks.*.mlp", student=LowRankMlp(rank=17)), total_steps=1)
    assert str(error.value) == (
        "LowRankMlp(rank=17) cannot replace the module at site 'blocks.0.mlp'.\n"
        "  fc1 (Linear) maps 16 features to 64, so its rank is at most 16.\n"
        "  Hint: give a rank of at most 16; below 12.8 it saves parameters. Nothing was changed."
    )
    assert type(model.blocks[0].mlp).__name__ == "Mlp"


def test_no_linear_layer():
    with pytest.raises(StudentError) as error:
        LowRankMlp(rank=2)(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()), SITE)
    assert "It is Sequential (Conv2d, ReLU), which contains no linear layer." in str(error.value)


class Router(nn.Linear):
    """A linear layer by its class, which returns more than a product, as the routers of experts do."""

    def forward(self, x):
        logits = super().forward(x)
        return logits, logits.topk(2).indices


class Scaled(nn.Linear):
    """A linear layer that computes the same in its own way."""

    def forward(self, x):
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


def test_a_subclass_counts_by_what_it_computes():
    assert not is_linear(Router(8, 4))
    assert is_linear(Scaled(8, 4))
    with pytest.raises(StudentError, match="which contains no linear layer"):
        LowRankMlp(rank=2)(nn.Sequential(Router(8, 4)), SITE)
    teacher = nn.Module()
    teacher.router, teacher.layer = Router(8, 4), Scaled(8, 4)
    student = LowRankMlp(rank=2)(teacher, SITE)
    assert type(student.router) is Router
    assert type(student.layer) is LowRankLinear


def test_a_quantised_map_is_refused():
    teacher = nn.Linear(4, 4)
    teacher.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(StudentError, match="is quantised to torch.int8"):
        LowRankMlp(rank=2)(teacher, SITE)


def test_a_rank_is_a_positive_integer():
    with pytest.raises(PlanError, match=r"LowRankMlp\(rank=...\) must be a positive integer, got 0"):
        LowRankMlp(rank=0)


def test_inits_that_do_not_fit_say_which_do():
    with pytest.raises(StudentError, match=r"use init=TruncatedSvd\(\) for low-rank students"):
        LowRankMlp(rank=2, init=CopyMatching())(nn.Linear(4, 4), SITE)
    with pytest.raises(StudentError) as error:
        segue.students.NarrowMlp(ratio=1, init=TruncatedSvd())(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), SITE)
    assert str(error.value).splitlines()[:2] == ["TruncatedSvd() cannot fill '0'.", "  It is Linear, not a low-rank layer."]

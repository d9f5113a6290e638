import json

import pytest
import torch
from timm.layers import GluMlp, Mlp, SwiGLU, SwiGLUPacked
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from segue.errors import PlanError, StudentError
from segue.sites import Site
from segue.students import CopyMatching, GatedMlp, Kaiming, NarrowMlp, Net2Net, WideMlp
from segue.students.mlp import SwiGlu, hidden_layer
from tests.helpers.models import WIDTH, bert, build, gpt2, hf_vit, images, llama, named_images, scramble_, text
from tests.students.handing_over import compiled_equals_eager, through_a_handover, timm_glu, timm_swiglu, timm_vit

SITE = Site("here")
CASES = {
    "timm Mlp": (timm_vit, images, "blocks.*.mlp"),
    "timm SwiGLU": (timm_swiglu, images, "blocks.*.mlp"),
    "timm GluMlp": (timm_glu, images, "blocks.*.mlp"),
    "HF ViT": (hf_vit, named_images, "vit.layers.*.mlp"),
    "HF GPT-2": (gpt2, text, "transformer.h.*.mlp"),
    "HF Llama": (llama, text, "model.layers.*.mlp"),
}
PLAIN = ("timm Mlp", "HF ViT", "HF GPT-2")
STUDENTS = (NarrowMlp(ratio=0.5), WideMlp(ratio=1.5), GatedMlp())


def sequential(width: int = 6, hidden: int = 12) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, width))


class Gated(nn.Module):
    """Llama's first MLP, with its names, in which the map that leaves stands between the two that enter."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def teachers() -> dict[str, nn.Module]:
    """One MLP of every family; those with hidden 8 leave the shapes no clue."""
    torch.manual_seed(0)
    made = {
        "timm Mlp": Mlp(8, 20),
        "timm Mlp, square": Mlp(8, 8),
        "timm SwiGLU": SwiGLU(8, 20),
        "timm SwiGLU, square": SwiGLU(8, 8),
        "timm GluMlp": GluMlp(8, 20),
        "timm SwiGLUPacked": SwiGLUPacked(8, 20),
        "timm Mlp without bias": Mlp(8, 20, bias=False),
        "Llama's first, square": Gated(8, 8),
        "sequential": sequential(8, 20),
        "HF ViT": build(hf_vit).vit.layers[0].mlp,
        "HF GPT-2": build(gpt2).transformer.h[0].mlp,
        "HF Llama": build(llama).model.layers[0].mlp,
    }
    for teacher in made.values():
        scramble_(teacher.eval())
    return made


TEACHERS = teachers()


def sample(teacher: nn.Module) -> Tensor:
    return torch.randn(2, 3, WIDTH if type(teacher).__module__.startswith("transformers") else 8)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("student", STUDENTS, ids=repr)
@pytest.mark.parametrize("case", CASES)
def test_every_family_goes_through_a_handover(case, student, tmp_path):
    make, batch, sites = CASES[case]
    model = through_a_handover(make, batch(), segue.Plan(sites=sites, student=student), tmp_path)
    if isinstance(student, NarrowMlp):
        assert count(model) < count(build(make))
    if isinstance(student, WideMlp):
        assert count(model) > count(build(make))
    if isinstance(student, GatedMlp) and case in PLAIN:
        assert any(isinstance(module, SwiGlu) for module in model.modules())


@pytest.mark.parametrize("name", TEACHERS)
def test_nothing_is_lost_at_ratio_one(name):
    teacher = TEACHERS[name]
    student = NarrowMlp(ratio=1)(teacher, SITE)
    x = sample(teacher)
    assert torch.equal(student(x), teacher(x))
    assert type(student) is type(teacher)
    assert not {id(p) for p in student.parameters()} & {id(p) for p in teacher.parameters()}


@pytest.mark.parametrize("ratio", [1, 1.35, 2, 3])
@pytest.mark.parametrize("name", TEACHERS)
def test_a_wider_student_begins_as_its_teacher(name, ratio):
    teacher = TEACHERS[name]
    student = WideMlp(ratio=ratio)(teacher, SITE)
    x = sample(teacher)
    torch.testing.assert_close(student(x), teacher(x), rtol=1e-4, atol=1e-4)
    assert (count(student) > count(teacher)) == (ratio > 1)


@pytest.mark.parametrize("name", TEACHERS)
def test_what_narrowing_leaves_out_are_the_weakest_units(name):
    """Zeroing in the teacher what leaves the weakest units gives the student's function."""
    teacher = TEACHERS[name]
    hidden = hidden_layer(teacher, SITE, "a test")
    student = NarrowMlp(ratio=0.4)(teacher, SITE)
    kept = round(0.4 * hidden.size)
    ablated = segue.students.layers.clone(teacher)
    maps = {part: segue.students.projection(ablated.get_submodule(part)).weight for part in hidden.maps}
    score = maps[hidden.leaving].norm(dim=0)
    for part in hidden.entering:
        for rows in maps[part].split(hidden.size):
            score = score * rows.norm(dim=1)
    with torch.no_grad():
        maps[hidden.leaving][:, score.argsort()[: hidden.size - kept]] = 0.0
    x = sample(teacher)
    torch.testing.assert_close(student(x), ablated(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TEACHERS)
def test_hidden_layers_are_found(name):
    hidden = hidden_layer(TEACHERS[name], SITE, "a test")
    assert hidden.gated == any(word in name for word in ("GLU", "Glu", "Llama"))
    assert hidden.blocks == (2 if name in ("timm GluMlp", "timm SwiGLUPacked") else 1)
    if name == "Llama's first, square":
        assert hidden.maps == ("w1", "w3", "w2")


def test_noise_tells_the_copies_apart():
    teacher = TEACHERS["timm Mlp"]
    x = sample(teacher)
    same, apart = WideMlp(ratio=2)(teacher, SITE), WideMlp(ratio=2, init=Net2Net(noise=0.01))(teacher, SITE)
    for student, alike in ((same, True), (apart, False)):
        student(x).square().sum().backward()
        first, second = student.fc1.weight.grad.chunk(2)
        assert torch.allclose(first, second, rtol=1e-6) is alike
        assert torch.equal(*student.fc1.weight.chunk(2)) is alike
    spread = (apart.fc1.weight - same.fc1.weight).std() / teacher.fc1.weight.std()
    assert spread.item() == pytest.approx(0.01, rel=0.2)
    assert torch.equal(apart.fc2.weight, same.fc2.weight)
    torch.testing.assert_close(apart(x), teacher(x), rtol=0.2, atol=0.2)


@pytest.mark.parametrize("name", ["timm Mlp", "HF ViT", "HF GPT-2"])
def test_a_gated_student_has_as_many_weights_as_its_plain_teacher(name):
    teacher = TEACHERS[name]
    assert count(GatedMlp()(teacher, SITE)) == pytest.approx(count(teacher), rel=0.03)


@pytest.mark.parametrize("name", ["timm SwiGLU", "timm GluMlp", "HF Llama", "Llama's first, square"])
def test_a_gated_teacher_keeps_its_kind_and_width(name):
    teacher = TEACHERS[name]
    student = GatedMlp()(teacher, SITE)
    assert type(student) is type(teacher)
    assert {key: value.shape for key, value in student.state_dict().items()} == {
        key: value.shape for key, value in teacher.state_dict().items()
    }
    assert not torch.equal(student(sample(teacher)), teacher(sample(teacher)))


def test_the_gated_formula_and_its_dropout():
    teacher = Mlp(8, 30, drop=(0.25, 0.5)).eval()
    student = GatedMlp()(teacher, SITE)
    x = sample(teacher)
    gate, up, down = student.gate, student.up, student.down
    z = gate(x)
    torch.testing.assert_close(student(x), down(z * torch.sigmoid(z) * up(x)))
    assert (student.hidden_dropout.p, student.dropout.p) == (0.25, 0.5)
    assert gate.weight.std().item() == pytest.approx(0.5, rel=0.2)  # sqrt(2 / 8)
    assert GatedMlp()(build(gpt2).transformer.h[0].mlp, SITE).dropout.p == 0.1


def test_kaiming_draws_anew():
    teacher = TEACHERS["HF GPT-2"]
    student = NarrowMlp(ratio=0.5, init=Kaiming())(teacher, SITE)
    assert (student.c_fc.nf, student.c_fc.nx, student.c_proj.nf, student.c_proj.nx) == (64, 32, 32, 64)
    assert student.c_fc.weight.shape == (32, 64)
    assert student.c_proj.weight.std().item() == pytest.approx((2 / 64) ** 0.5, rel=0.05)
    assert student.c_fc.bias.count_nonzero() == 0


def test_what_others_read_is_true():
    student = NarrowMlp(ratio=0.25)(TEACHERS["HF Llama"], SITE)
    assert (student.intermediate_size, student.hidden_size) == (16, WIDTH)
    assert (student.up_proj.out_features, student.down_proj.in_features) == (16, 16)
    assert student.config is TEACHERS["HF Llama"].config
    assert GatedMlp()(TEACHERS["HF ViT"], SITE).config is TEACHERS["HF ViT"].config


def test_a_norm_before_the_hidden_layer_is_copied_too():
    teacher = TEACHERS["sequential"]
    for student in (NarrowMlp(ratio=0.5)(teacher, SITE), WideMlp(ratio=2)(teacher, SITE)):
        assert torch.equal(student[0].weight, teacher[0].weight)
        assert torch.equal(student[0].bias, teacher[0].bias)
    gated = GatedMlp()(teacher, SITE)
    assert torch.equal(gated[0].weight, teacher[0].weight)
    x = sample(teacher)
    z = gated[0](x)
    torch.testing.assert_close(gated(x), gated[4](F.silu(gated[1].gate(z)) * gated[1].up(z)))


def test_dtypes_modes_and_gradients_follow():
    teacher = Mlp(8, 20).bfloat16().requires_grad_(False).eval()
    for factory in STUDENTS:
        student = factory(teacher, SITE)
        assert {p.dtype for p in student.parameters()} == {torch.bfloat16}
        assert all(p.requires_grad for p in student.parameters())
        assert not student.training


@pytest.mark.parametrize("factory", STUDENTS, ids=repr)
def test_it_compiles_as_one_graph(factory):
    teacher = TEACHERS["timm SwiGLUPacked" if isinstance(factory, NarrowMlp) else "timm Mlp"]
    compiled_equals_eager(factory(teacher, SITE), sample(teacher))


@pytest.mark.parametrize(
    "student", [*STUDENTS, WideMlp(ratio=2, init=Net2Net(noise=0.1)), NarrowMlp(ratio=0.3, init=Kaiming())]
)
def test_it_saves_as_data(student):
    plan = segue.Plan(sites="a", student=student)
    assert segue.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize("part", ["intermediate", "output"])
def test_bert_splits_its_mlp(part):
    model = build(bert)
    plan = segue.Plan(sites=f"bert.encoder.layer.*.{part}", student=NarrowMlp(ratio=0.5))
    with pytest.raises(StudentError) as error:
        segue.replace_(model, plan, total_steps=1)
    sizes, kind = ("32 -> 64", "BertIntermediate") if part == "intermediate" else ("64 -> 32", "BertOutput")
    assert str(error.value) == (
        f"NarrowMlp(ratio=0.5) cannot replace the module at site 'bert.encoder.layer.0.{part}'.\n"
        f"  It is {kind}, in which no hidden layer is found; its linear layers are dense {sizes}.\n"
        "  Hint: an MLP may be split over two modules, such as BERT's `intermediate` and `output` or OPT's `fc1` and `fc2`: "
        "choose the layer that contains both, or use LowRankMlp(rank=...) on either. Nothing was changed."
    )


def test_a_block_names_the_mlp_inside_it():
    with pytest.raises(StudentError, match=r"choose the MLP inside it: 'blocks\.1\.mlp'\. Nothing was changed\."):
        WideMlp(ratio=2)(build(timm_vit).blocks[1], Site("blocks.1"))


class Deep(nn.Module):
    """Three layers of one width, shaped as a gated MLP is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@pytest.mark.parametrize(
    "teacher",
    [
        Deep(),
        nn.Sequential(nn.Linear(8, 20), nn.Softmax(-1), nn.Linear(20, 8)),
        nn.Bilinear(8, 8, 8),
    ],
    ids=["deep", "softmax inside", "no linear map"],
)
def test_what_only_looks_like_an_mlp_is_refused(teacher):
    with pytest.raises(StudentError, match="in which no hidden layer is found"):
        NarrowMlp(ratio=0.5)(teacher, SITE)


@pytest.mark.parametrize(
    "make",
    [
        lambda: NarrowMlp(ratio=0),
        lambda: NarrowMlp(ratio=1.5),
        lambda: WideMlp(ratio=0.5),
        lambda: WideMlp(ratio=float("inf")),
        lambda: GatedMlp(ratio=0.0),
    ],
)
def test_ratios_that_make_no_sense(make):
    with pytest.raises(PlanError, match=r"^\w+\(ratio=...\) must be a .*number.*, got .+\n  It is of type .+\n  Hint: "):
        make()


def test_inits_that_do_not_fit_say_which_do():
    with pytest.raises(StudentError, match=r"CopyMatching\(\) cannot copy.+\n.+\n.+Net2Net\(\) for wider ones"):
        WideMlp(ratio=2, init=CopyMatching())(TEACHERS["timm Mlp"], SITE)
    maps = {"": segue.students.projection(nn.Linear(8, 8))}
    with pytest.raises(StudentError, match=r"Net2Net\(\) cannot copy the teacher's weights to ''"):
        Net2Net()(nn.Linear(8, 4), maps)


def test_finding_the_hidden_layer_leaves_the_teacher_and_the_random_numbers_alone():
    teacher = TEACHERS["timm Mlp"]
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    state = torch.get_rng_state()
    hidden_layer(teacher.train(), SITE, "a test")
    assert teacher.training
    teacher.eval()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())

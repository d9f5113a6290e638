"""Hidden layers beyond two linear layers in a module of one argument: found and resized, or refused with the reason."""

import functools

import pytest
import torch
import transformers
from timm.layers import ConvMlp, GlobalResponseNormMlp, Mlp, SwiGLU
from timm.layers import GatedMlp as TimmGatedMlp
from timm.models.mlp_mixer import SpatialGatingUnit
from timm.models.pvt_v2 import MlpWithDepthwiseConv
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.bloom.modeling_bloom import BloomMLP
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock
from transformers.models.mpt.modeling_mpt import MptMLP
from transformers.models.rwkv.modeling_rwkv import RwkvFeedForward
from transformers.models.segformer.modeling_segformer import SegformerConfig

import segue
from segue.errors import StudentError
from segue.sites import Site
from segue.students import GatedMlp, Kaiming, LowRankMlp, NarrowMlp, Net2Net, Reinit, WideMlp
from segue.students.hidden_layer.search import hidden_layer
from segue.students.layers import clone
from tests.helpers.models import TOKENS, VOCABULARY, WIDTH, bert, scramble_, text
from tests.students.handing_over import compiled_equals_eager, through_a_handover

SITE = Site("here")
EXPERTS = 4


class Interleaved(nn.Module):
    """Gate and value take turns in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(8, 40)
        self.back = nn.Linear(20, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.both(x)
        return self.back(F.silu(y[..., ::2]) * y[..., 1::2])


class Block(nn.Module):
    """ConvNeXt's block, which holds its MLP and a scale itself."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.a, self.act, self.b = nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x).permute(0, 2, 3, 1)
        return x + (self.scale * self.b(self.act(self.a(y)))).permute(0, 3, 1, 2)


class Residual(nn.Module):
    """An activation that is no module, and a second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 20), nn.Linear(20, 8)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self.b(F.relu(self.a(x)).square())


def mixtral(**settings) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    routing = {"num_key_value_heads": 2, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "vocab_size": VOCABULARY}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **routing, **settings))


def bloom() -> nn.Module:
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(hidden_size=WIDTH, n_layer=2, n_head=4, vocab_size=VOCABULARY)
    )


def opt() -> nn.Module:
    sizes = {
        "hidden_size": WIDTH,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": WIDTH,
    }
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=64, dropout=0.0)
    )


def segformer_mlp() -> nn.Module:
    sizes = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4}
    model = transformers.SegformerModel(SegformerConfig(**sizes))
    return next(part for name, part in model.named_modules() if name.endswith(".mlp"))


def config(kind: str, **settings):
    return getattr(transformers, f"{kind}Config")(**settings)


MAKERS = {
    "Bloom": lambda: BloomMLP(config("Bloom", hidden_size=8)),
    "MPT": lambda: MptMLP(config("Mpt", d_model=8, expansion_ratio=2)),
    "residual": Residual,
    "interleaved": Interleaved,
    "RWKV": lambda: RwkvFeedForward(config("Rwkv", hidden_size=8, intermediate_size=20)),
    "norm inside": lambda: Mlp(8, 20, norm_layer=nn.LayerNorm),
    "norm inside, square": lambda: Mlp(8, 8, norm_layer=nn.LayerNorm),
    "gated, norm inside": lambda: SwiGLU(8, 20, norm_layer=nn.LayerNorm),
    "response norm": lambda: GlobalResponseNormMlp(8, 20),
    "1x1 convolutions": lambda: ConvMlp(8, 20),
    "1x1 convolutions, batch norm": lambda: ConvMlp(8, 20, norm_layer=nn.BatchNorm2d),
    "depthwise convolution": segformer_mlp,
    "depthwise convolution, image size": lambda: MlpWithDepthwiseConv(8, 20),
    "gate across tokens": lambda: TimmGatedMlp(8, 40, gate_layer=functools.partial(SpatialGatingUnit, seq_len=5)),
    "block": Block,
    "Mixtral's experts": lambda: MixtralExperts(mixtral().config),
    "Mixtral's block": lambda: MixtralSparseMoeBlock(mixtral().config),
    "GPT-OSS's experts": lambda: GptOssExperts(
        config("GptOss", hidden_size=WIDTH, intermediate_size=24, num_local_experts=EXPERTS, num_experts_per_tok=2)
    ),
    "BERT's layer": lambda: bert().bert.encoder.layer[0],
    "OPT's layer": lambda: opt().model.decoder.layers[0],
    "torch's layer": lambda: nn.TransformerEncoderLayer(8, 2, 20, batch_first=True),
}
INNER = (
    "norm inside",
    "norm inside, square",
    "gated, norm inside",
    "gate across tokens",
    "response norm",
)  # which see all units at once
GATED = ("interleaved", "gated, norm inside", "gate across tokens", "Mixtral's experts", "Mixtral's block", "GPT-OSS's experts")


@functools.cache
def teacher_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    teacher = MAKERS[name]().eval()
    for parameter in teacher.parameters():  # experts start empty
        nn.init.normal_(parameter, std=0.3)
    scramble_(teacher)
    return teacher


def arguments(name: str) -> tuple:
    torch.manual_seed(1)
    if "experts" in name:
        return torch.randn(6, WIDTH), torch.randint(0, EXPERTS, (6, 2)), torch.rand(6, 2)
    if "1x1" in name or name == "block":
        return (torch.randn(2, 8, 3, 4),)
    if name.startswith("depthwise"):
        return (torch.randn(2, 12, 8), *((3, 4) if name == "depthwise convolution" else ((3, 4),)))
    x = torch.randn(2, 5, WIDTH if name in ("Mixtral's block", "BERT's layer", "OPT's layer") else 8)
    return (x, torch.randn_like(x)) if name in ("Bloom", "MPT", "residual") else (x,)


def output(module: nn.Module, name: str) -> Tensor:
    y = module(*arguments(name))
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_is_lost_at_ratio_one(name):
    teacher = teacher_of(name)
    student = NarrowMlp(ratio=1)(teacher, SITE)
    assert torch.equal(output(student, name), output(teacher, name))
    assert type(student) is type(teacher)
    assert not {id(p) for p in student.parameters()} & {id(p) for p in teacher.parameters()}


@pytest.mark.parametrize("ratio", [1.35, 2])
@pytest.mark.parametrize("name", MAKERS)
def test_a_wider_student_begins_as_its_teacher_or_is_refused(name, ratio):
    teacher = teacher_of(name)
    if name in INNER and ratio == 1.35:
        with pytest.raises(StudentError, match=r"sees all hidden units at once.+\n.+give a whole number.+ratio=2"):
            WideMlp(ratio=ratio)(teacher, SITE)
        return
    student = WideMlp(ratio=ratio)(teacher, SITE)
    torch.testing.assert_close(output(student, name), output(teacher, name), rtol=1e-4, atol=1e-4)
    assert hidden_layer(student, SITE, "a test").size == round(ratio * hidden_layer(teacher, SITE, "a test").size)


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in INNER])
def test_what_narrowing_leaves_out_are_the_weakest_units(name):
    """Zeroing in the teacher what leaves the weakest units, of each expert its own, gives the student's function."""
    teacher = teacher_of(name)
    hidden = hidden_layer(teacher, SITE, "a test")
    kept = 16 if hidden.experts else round(0.4 * hidden.size)  # grouped products need a multiple of 8
    ablated = clone(teacher)
    weights = [ablated.get_parameter(axis.name).detach() for axis in hidden.weights]
    for expert in range(max(1, hidden.experts)):
        score = torch.ones(hidden.size)
        for axis, weight in zip(hidden.weights, weights, strict=True):
            matrix = (weight[expert] if hidden.experts else weight).movedim(axis.dim - bool(hidden.experts), 0).flatten(1)
            rows = matrix.unflatten(0, (-1, 2)) if axis.interleaved else matrix.unflatten(0, (axis.rows, -1)).transpose(0, 1)
            score *= rows.norm(dim=-1).prod(-1)
        weakest = score.argsort()[: hidden.size - kept]
        leaving = weights[-1][expert] if hidden.experts else weights[-1]
        leaving.index_fill_(hidden.axes[-1].dim - bool(hidden.experts), weakest, 0.0)
    student = NarrowMlp(ratio=0.4)(teacher, SITE)
    assert hidden_layer(student, SITE, "a test").size == kept
    torch.testing.assert_close(output(student, name), output(ablated, name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MAKERS)
def test_a_gated_student_has_new_weights_in_the_mlp_only_or_is_refused(name):
    teacher = teacher_of(name)
    hidden = hidden_layer(teacher, SITE, "a test")
    assert hidden.gated == (name in GATED)
    if name in ("residual", "RWKV"):  # forward computes it by a function
        with pytest.raises(StudentError, match=r"the activation between .+ -> .+ is no module or attribute"):
            GatedMlp()(teacher, SITE)
        return
    student = GatedMlp()(teacher, SITE)
    y = output(student, name)
    assert y.shape == output(teacher, name).shape
    assert not torch.allclose(y, output(teacher, name), atol=1e-2)
    y.square().sum().backward()
    new = dict(student.named_parameters())
    for key, parameter in teacher.named_parameters():
        owner = key.rpartition(".")[0]
        if owner not in hidden.maps and not hidden.holds(owner):
            assert torch.equal(parameter, new[key]), key
    for key in (key for key in new if "gate" in key):
        assert new[key].grad is not None, key


def test_a_gate_takes_the_place_of_the_activation():
    teacher = teacher_of("Bloom")
    student = GatedMlp(ratio=0.5)(teacher, SITE)
    x, residual = arguments("Bloom")
    gate, up = student.dense_h_to_4h.gate, student.dense_h_to_4h.up
    assert gate.out_features == up.out_features == 16
    assert not torch.equal(gate.weight, up.weight)
    torch.testing.assert_close(student(x, residual), residual + student.dense_4h_to_h(F.silu(gate(x)) * up(x)))


def test_the_fused_kernel_of_torchs_layer_does_not_bring_the_activation_back():
    student = GatedMlp()(teacher_of("torch's layer"), SITE)
    with torch.no_grad():
        fused = output(student, "torch's layer")
    torch.testing.assert_close(fused, output(student, "torch's layer"))


@pytest.mark.parametrize(
    ("make", "sites", "student"),
    [
        (bloom, "transformer.h.*.mlp", GatedMlp()),
        (mixtral, "model.layers.*.mlp.experts", NarrowMlp(ratio=0.5)),
        (opt, "model.decoder.layers.*", NarrowMlp(ratio=0.5)),
    ],
    ids=["Bloom", "Mixtral", "OPT"],
)
def test_models_go_through_a_handover(make, sites, student, tmp_path):
    through_a_handover(make, text(), segue.Plan(sites=sites, student=student, teacher_gradient=True), tmp_path)


@pytest.mark.parametrize("name", ["Bloom", "1x1 convolutions"])
def test_it_compiles_as_one_graph(name):
    compiled_equals_eager(GatedMlp()(teacher_of(name), SITE), *arguments(name))


@pytest.mark.parametrize("name", ["Mixtral's experts", "GPT-OSS's experts"])
def test_experts_are_drawn_one_by_one(name):
    """As one tensor of three dimensions, their fan-in would be the size of a complete matrix."""
    student = Reinit()(teacher_of(name), SITE)
    assert student.gate_up_proj.std().item() == pytest.approx((2 / WIDTH) ** 0.5, rel=0.1)
    assert student.down_proj.std().item() == pytest.approx((2 / 24) ** 0.5, rel=0.1)
    if name.startswith("GPT"):
        assert student.gate_up_proj_bias.count_nonzero() == 0
    narrow = NarrowMlp(ratio=0.5, init=Kaiming())(teacher_of(name), SITE)
    assert narrow.down_proj.std().item() == pytest.approx((2 / 16) ** 0.5, rel=0.1)


def test_noise_between_copies_is_for_linear_layers():
    with pytest.raises(
        StudentError, match=r"adds noise to linear layers.+gate_up_proj is neither\.\n.+Net2Net\(\) without noise"
    ):
        WideMlp(ratio=2, init=Net2Net(noise=0.1))(teacher_of("Mixtral's experts"), SITE)


# Refusals


def refusal(teacher: nn.Module, site: str = "here", student=NarrowMlp(ratio=0.5)) -> str:  # noqa: B008
    with pytest.raises(StudentError) as error:
        student(teacher, Site(site))
    return str(error.value)


def test_half_an_mlp_names_the_layer_around_it():
    assert refusal(opt().model.decoder.layers[0].fc1, "model.decoder.layers.0.fc1") == (
        "NarrowMlp(ratio=0.5) cannot replace the module at site 'model.decoder.layers.0.fc1'.\n"
        "  It is Linear, in which no hidden layer is found; its linear layers are itself 32 -> 48.\n"
        "  Hint: an MLP may be split over two modules, such as BERT's `intermediate` and `output` or OPT's `fc1` and `fc2`: "
        "choose the layer that contains both, or use LowRankMlp(rank=...) on either. Nothing was changed."
    )


def test_several_mlps_are_named():
    block = nn.Sequential(nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 8)), Mlp(8, 12))
    found = refusal(block, "block")
    assert "; it contains MLPs that are modules of their own.\n" in found
    assert "choose the MLP inside it: 'block.0' or 'block.1'." in found


def test_two_hidden_layers_are_named():
    deep = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 8))
    assert "; it has 2 hidden layers: 0 -> 2, 2 -> 4.\n" in refusal(deep)


def test_a_change_of_the_output_is_said():
    softmax = nn.Sequential(nn.Linear(8, 20), nn.Softmax(-1), nn.Linear(20, 8))
    assert "; with every unit between 0 -> 2 twice it returns something else.\n" in refusal(softmax)


class Strict(nn.Module):
    """An MLP that is called in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 20), nn.Linear(20, 8)

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        return self.b(F.relu(self.a(x + state["shift"])))


def test_what_the_module_raises_is_shown():
    found = refusal(Strict())
    assert "; called with a tensor (1, 6, 8), a tensor (1, 6, 8) it raises IndexError: " in found
    assert LowRankMlp(rank=2)(Strict(), SITE)


class Unused(nn.Module):
    """Two layers that fit, and of which the output does not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 20), nn.Linear(20, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.b(F.relu(self.a(x)))


def test_units_without_an_effect_are_no_proof():
    assert "; its output does not depend on the units between a -> b.\n" in refusal(Unused())


class SingleHead(nn.Module):
    """Attention with one head: its values are linear, so that doubling them changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o((self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x))


def test_the_values_of_an_attention_are_no_hidden_layer():
    assert "in which no hidden layer is found" in refusal(SingleHead())


def test_the_search_leaves_the_teacher_and_the_random_numbers_alone():
    teacher = teacher_of("Mixtral's experts")
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    torch.manual_seed(TOKENS)
    state = torch.get_rng_state()
    hidden_layer(teacher, SITE, "a test")
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())

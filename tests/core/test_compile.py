"""torch.compile: one graph while the weight moves, one more after takeover, and the numbers of eager code."""

import gc
import weakref

import pytest
import timm
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import segue
from segue.core.seam import Seam
from segue.errors import HandoverError, StudentError
from segue.gates import Bernoulli, Blend, GumbelSoftmax
from segue.losses import FeatureGuidance, LogitDistillation
from segue.schedules import Staggered
from segue.students import LinearAttention, WindowedLinear
from tests.helpers import tiny
from tests.helpers.tiny import needs_inductor, same_bits
from tests.students.attention import tiny_attention  # noqa: F401  registers the attention of tiny.Net
from tests.students.cases import OPERATORS, REPRESENTATIVES

pytestmark = pytest.mark.slow

GATES = [Blend(), Bernoulli()]  # a soft coin is a blend to the graph; it has the test of the graph's own backward
EXTRAS = {
    "plain": {},
    "guidance": {"guidance": FeatureGuidance()},
    "distillation": {"distill": LogitDistillation()},
}
TOTAL = 20  # aggr20 takes over at step 4

# torch.compile itself asks for the .grad of a tensor that comes from another graph
between_graphs = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def vit(depth: int) -> nn.Module:
    torch.manual_seed(0)
    size = {"img_size": 32, "patch_size": 8, "depth": depth, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", **size).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attn.proj.weight"):
                parameter.mul_(10)  # a teacher whose outputs matter
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.arange(4)


def begin(model: nn.Module, total: int = TOTAL, **settings) -> segue.Handover:
    return segue.replace_(model, segue.Plan(**{"sites": "blocks.*.attn", **settings}), total_steps=total)


def compiled(model: nn.Module, backend: str = "eager"):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, fullgraph=True, backend=counter), counter


def gradients(handover: segue.Handover, call, data=None) -> list[torch.Tensor]:
    """Return the loss and every gradient of one step, and take it."""
    images, labels = data or batch()
    parameters = list(handover.parameters())
    loss = F.cross_entropy(call(images), labels) + handover.aux_loss()
    found = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter -= 0.01 * gradient / gradient.norm().clamp_min(1)
    handover.step()
    return [loss.detach(), *found]


def assert_same_step(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Compare up to the rounding of the largest gradient: some are zero (those of attention's key biases) but for rounding."""
    scale = max(x.abs().max().item() for x in expected)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * scale)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: type(gate).__name__)
def test_one_graph_for_the_anneal_and_one_after(gate, extra):
    eager, handover = begin(vit(2), gate=gate, **EXTRAS[extra]), begin(model := vit(2), gate=gate, **EXTRAS[extra])
    call, counter = compiled(model)
    graphs = []
    for _ in range(7):
        expected = gradients(eager, eager.model)
        assert_same_step(gradients(handover, call), expected)
        graphs.append(counter.frame_count)
    assert graphs == [1, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(("operator", "family"), REPRESENTATIVES[::2], ids=["Performer", "WindowedLinear"])
def test_an_operator_is_one_graph_for_the_anneal_and_one_after(operator, family):
    runs = [segue.replace_(family.build().train(), family.plan(OPERATORS[operator]), total_steps=TOTAL) for _ in range(2)]
    batch = family.batch()
    call, counter = compiled(runs[1].model)
    graphs = []
    for _ in range(6):
        losses = [batch.loss(model) for model in (runs[0].model, call)]
        expected, found = (torch.autograd.grad(loss, list(run.parameters())) for loss, run in zip(losses, runs, strict=True))
        assert_same_step([losses[1].detach(), *found], [losses[0].detach(), *expected])
        graphs.append(counter.frame_count)
        for run in runs:
            run.step()
    assert graphs == [1, 1, 1, 1, 2, 2]


def test_the_graphs_own_backward_gives_the_gradients_of_eager_code():
    settings = {"gate": GumbelSoftmax(), "guidance": FeatureGuidance(), "distill": LogitDistillation()}
    eager, handover = begin(vit(2), **settings), begin(model := vit(2), **settings)
    call, counter = compiled(model, "aot_eager")
    graphs = []
    for _ in range(6):
        assert_same_step(gradients(handover, call), gradients(eager, eager.model))
        graphs.append(counter.frame_count)
    assert graphs == [1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("student", [LinearAttention(), WindowedLinear(window=4)], ids=lambda student: type(student).__name__)
def test_the_backward_pass_of_an_operator_compiles_in_the_anneal_and_in_the_finished_model(student):
    """The views in the backward pass of its projections must fit the layout that the kernels really give to gradients."""
    runs = [begin(vit(1), student=student) for _ in range(2)]
    call, _ = compiled(runs[1].model, "aot_eager")
    for _ in range(5):
        assert_same_step(gradients(runs[1], call), gradients(runs[0], runs[0].model))
    images, labels = batch()
    steps = []
    for run, forward in zip(runs, (runs[0].model, call), strict=True):
        run.finalize_()
        parameters = list(run.model.parameters())
        loss = F.cross_entropy(forward(images), labels)
        steps.append([loss.detach(), *torch.autograd.grad(loss, parameters)])
    assert_same_step(steps[1], steps[0])


def test_the_ends_are_either_side_bit_for_bit():
    model = vit(1).eval()
    handover = begin(model)
    call, counter = compiled(model, "aot_eager")
    images, _ = batch()
    assert_ends_are_views(handover, lambda: call(images))
    assert counter.frame_count == 3


def test_compiled_evaluation_uses_the_mean_of_the_gate():
    handover = begin(model := tiny.Net(), gate=Bernoulli(), schedule=tiny.constant(0.3))
    call, _ = compiled(model.eval())
    x, _ = tiny.batch()
    found = call(x)
    torch.testing.assert_close(found, model(x))
    with handover.as_student():
        assert not torch.allclose(found, model(x))


def assert_ends_are_views(handover: segue.Handover, call) -> None:
    found = {}
    for weight in (0.0, 0.3, 1.0):
        for seam in handover.seams.values():
            seam.set_weight(weight, weight)
        with torch.no_grad():
            found[weight] = call()
    with torch.no_grad(), handover.as_teacher():
        teacher = call()
    with torch.no_grad(), handover.as_student():
        student = call()
    assert same_bits(found[0.0], teacher)
    assert same_bits(found[1.0], student)
    assert not same_bits(found[0.3], teacher)
    assert not same_bits(found[0.3], student)


@needs_inductor
def test_inductor_keeps_the_ends_the_gradients_and_one_graph():
    settings = {"guidance": FeatureGuidance(), "student": LinearAttention()}
    eager, handover = begin(tiny.Net(depth=1).train(), **settings), begin(model := tiny.Net(depth=1).train(), **settings)
    call, counter = compiled(model, "inductor")
    for _ in range(6):
        expected = gradients(eager, eager.model, tiny.batch())
        assert_same_step(gradients(handover, call, tiny.batch()), expected)
    assert counter.frame_count == 2

    handover = begin(model := tiny.Net(depth=1).eval())
    call, _ = compiled(model, "inductor")
    assert_ends_are_views(handover, lambda: call(tiny.batch()[0]))


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_the_ends_hold_in_a_training_graph_whatever_the_other_side_returns(weight):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    handover = segue.replace_(model, segue.Plan(sites="0"), total_steps=10)
    seam = handover.seams["0"]
    with torch.no_grad():
        (seam.student if weight == 0.0 else seam.teacher).weight.fill_(torch.inf)
    call, _ = compiled(model, "aot_eager")
    x = torch.randn(3, 4)
    seam.set_weight(weight, weight)
    blend = call(x)
    with handover.as_teacher() if weight == 0.0 else handover.as_student():
        assert same_bits(blend, call(x))
    assert blend.isfinite().all()


class Chain(nn.Module):
    def __init__(self, sites: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(sites))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


@pytest.mark.parametrize(
    ("sites", "settings"),
    [
        (6, {"schedule": Staggered(overlap=0.0)}),
        (5, {"schedule": Staggered(order="back"), "release": True}),
        (6, {"schedule": Staggered(), "guidance": FeatureGuidance(schedule=Staggered())}),
    ],
    ids=["one by one", "with release", "with guidance"],
)
def test_a_staggered_handover_with_evaluations_stays_below_the_recompile_limit(sites, settings):
    """At the limit fullgraph raises; without it torch would run the rest of the training uncompiled.

    A recompile for each of five sites, in training and in evaluation, is beyond the limit of eight.
    """
    model = Chain(sites)
    handover = begin(model, total=30, sites="layers.*", **settings)
    call, counter = compiled(model)
    x = torch.randn(5, 4)
    for _ in range(32):
        model.train()
        (call(x).square().mean() + handover.aux_loss()).backward()
        model.eval()
        with torch.no_grad():
            call(x)
        if handover.steps_done < 30:
            handover.step()
    assert all(seam.state.closed_in_graph for seam in handover.seams.values())
    assert 4 < counter.frame_count <= torch._dynamo.config.recompile_limit


def test_a_model_compiled_in_place_distils_through_its_own_compiled_code():
    eager, handover = begin(vit(1), distill=LogitDistillation()), begin(model := vit(1), distill=LogitDistillation())
    counter = CompileCounterWithBackend("eager")
    model.compile(fullgraph=True, backend=counter)
    graphs = []
    for _ in range(6):
        assert_same_step(gradients(handover, model), gradients(eager, eager.model))
        graphs.append(counter.frame_count)
    assert graphs == [2, 2, 2, 2, 3, 3]  # the original's own pass is a graph too


@between_graphs
@pytest.mark.parametrize("extra", ["plain", "guidance"])
def test_blocks_compiled_one_by_one_share_their_graphs(extra):
    """Regional compilation: one code for twelve blocks, so nothing in it may depend on the site."""
    eager, handover = (begin(tiny.Net(depth=12).train(), **EXTRAS[extra]) for _ in range(2))
    counter = CompileCounterWithBackend("eager")
    for block in handover.model.blocks:
        block.compile(fullgraph=True, backend=counter)
    graphs = []
    for _ in range(6):
        expected = gradients(eager, eager.model, tiny.batch())
        assert_same_step(gradients(handover, handover.model, tiny.batch()), expected)
        graphs.append(counter.frame_count)
    assert graphs == [2, 2, 2, 2, 4, 4]  # the first block's input needs no gradient, which is a graph of its own


@between_graphs
def test_blocks_wrapped_by_compile_are_finalized():
    handover = begin(model := tiny.Net().train(), total=1)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="eager")
    x, _ = tiny.batch()
    model(x).sum().backward()
    handover.step()
    with torch.no_grad(), handover.as_student():
        student = model(x)
    handover.finalize_()
    assert not [name for name, module in model.named_modules() if isinstance(module, Seam)]
    assert same_bits(model(x).detach(), student)


def test_similarity_and_verify_see_through_a_model_compiled_in_place():
    images, _ = batch()
    expected = begin(vit(1)).similarity(images)
    handover = begin(model := vit(1))
    model.compile(fullgraph=True, backend="eager")
    for site, measures in handover.similarity(images).items():
        assert measures == pytest.approx(expected[site], rel=1e-4)
    assert handover.verify(images).passed


def test_takeover_frees_the_teachers_of_a_compiled_model():
    handover = begin(model := vit(1), release=True)
    teachers = [weakref.ref(p) for p in handover.seams["blocks.0.attn"].teacher.parameters()]
    call, counter = compiled(model)
    alive = []
    for _ in range(6):
        gradients(handover, call)
        gc.collect()
        alive.append(any(teacher() is not None for teacher in teachers))
    assert alive == [True, True, True, False, False, False]
    assert counter.frame_count == 2


@pytest.fixture
def side_effects_not_replayed():
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        yield


def checkpointed(**settings) -> segue.Handover:
    model = vit(2)
    model.set_grad_checkpointing(True)
    return begin(model, **settings)


def test_checkpointing_without_guidance_compiles():
    eager, handover = checkpointed(), checkpointed()
    call, counter = compiled(handover.model, "aot_eager")
    for _ in range(2):
        assert_same_step(gradients(handover, call), gradients(eager, eager.model))
    assert counter.frame_count == 1


@pytest.mark.usefixtures("side_effects_not_replayed")
def test_checkpointing_with_guidance_compiles_once_torch_is_told_not_to_replay():
    eager, handover = checkpointed(guidance=FeatureGuidance()), checkpointed(guidance=FeatureGuidance())
    call, counter = compiled(handover.model, "aot_eager")
    for _ in range(2):
        assert_same_step(gradients(handover, call), gradients(eager, eager.model))
    assert counter.frame_count == 1


def test_checkpointing_with_guidance_in_one_graph_is_refused_with_the_setting_that_helps():
    handover = checkpointed(guidance=FeatureGuidance())
    call, _ = compiled(handover.model)
    with pytest.raises(HandoverError) as caught:
        call(batch()[0])
    asked, found, hint = str(caught.value).splitlines()[:3]
    assert "guidance" in asked
    assert "activation checkpointing" in found
    assert "torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True" in hint


@between_graphs
def test_checkpointing_with_guidance_in_several_graphs_gives_the_gradients_of_eager_code():
    eager, handover = checkpointed(guidance=FeatureGuidance()), checkpointed(guidance=FeatureGuidance())
    call = torch.compile(handover.model, backend="eager")
    for _ in range(3):
        assert_same_step(gradients(handover, call), gradients(eager, eager.model))


def test_a_student_that_does_not_fit_is_named_in_one_graph_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    segue.replace_(model, segue.Plan(sites="0", student=lambda teacher, site: nn.Linear(4, 3)), total_steps=10)
    call, _ = compiled(model)
    with pytest.raises(Exception, match=r"the student at site '0' must return what its teacher returns"):
        call(torch.randn(2, 4))
    with pytest.raises(StudentError, match=r"shape \(2, 4\), the student shape \(2, 3\)"):
        model(torch.randn(2, 4))

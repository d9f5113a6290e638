"""Precision: casts, autocast, and ends that hold bit for bit in every type of number."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import segue
from segue.gates import Bernoulli, Blend, GumbelSoftmax
from segue.losses import FeatureGuidance, LogitDistillation
from segue.schedules import Constant
from tests.helpers.tiny import SITES, Net, batch, same_bits, start
from tests.students.cases import OPERATORS, REPRESENTATIVES

GATES = [Blend(), Bernoulli(), GumbelSoftmax()]
TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NARROW = [torch.bfloat16, torch.float16]
ALPHAS = [0.9 + 0.001 * i for i in range(101)]


class Says(nn.Module):
    """Answer every call with one number, in the type of the module or in one of its own."""

    def __init__(self, value: float, answers: torch.dtype | None = None) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))
        self.answers = answers

    def forward(self, x):
        return self.value.to(self.answers or self.value.dtype).expand(x.shape).clone()


def meeting(teacher: nn.Module, student: nn.Module, alpha: float) -> nn.Sequential:
    """Return a model whose only layer hands over from one module to another, at a given alpha."""
    model = nn.Sequential(teacher)
    plan = segue.Plan(sites="0", student=lambda *_: student, schedule=Constant(alpha=alpha))
    segue.replace_(model, plan, total_steps=2)
    return model


def engines(model: nn.Module):
    """Yield the model's two ways through a seam: numbers in eager code, buffers in a compiled graph."""
    torch._dynamo.reset()
    return {"eager": model, "compiled": torch.compile(model, fullgraph=True, backend="eager")}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("other", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("mine", [1.5, -0.0])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_ends_are_one_side_bit_for_bit(dtype, other, mine, alpha):
    teacher, student = (mine, other) if alpha == 1.0 else (other, mine)
    model = meeting(Says(teacher), Says(student), alpha).to(dtype)
    for training in (True, False):
        assert same_bits(model.train(training)(torch.ones(3, dtype=dtype)), torch.full((3,), mine, dtype=dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_the_ends_of_a_compiled_blend_are_one_side_bit_for_bit(dtype):
    model = meeting(Says(-0.0), Says(torch.nan), alpha=0.5).to(dtype)
    seam, compiled = model[0], engines(model)["compiled"]
    x = torch.ones(3, dtype=dtype)
    seam.set_weight(0.0, 0.0)
    assert same_bits(compiled(x), torch.full((3,), -0.0, dtype=dtype))
    with torch.no_grad():
        seam.teacher.value.fill_(torch.inf)
        seam.student.value.fill_(-0.0)
    seam.set_weight(1.0, 1.0)
    assert same_bits(compiled(x), torch.full((3,), -0.0, dtype=dtype))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_101_alphas_stay_101_blends_in_half_precision(dtype, engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256)).to(dtype)
    handover = segue.replace_(model, segue.Plan(sites="0"), total_steps=10)
    seam, call, x = handover.seams["0"], engines(model)[engine], torch.randn(32, 16, dtype=dtype)
    with torch.no_grad():
        teacher, student = seam.teacher(x).float(), seam.student(x).float()
        blends = []
        for alpha in ALPHAS:
            seam.set_weight(1 - alpha, 1 - alpha)
            blends.append(call(x))
            assert same_bits(blends[-1], torch.lerp(teacher, student, torch.tensor(1 - alpha)).to(dtype))
    assert len({blend.view(torch.int16).numpy().tobytes() for blend in blends}) == 101


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half, nn.Module.double, lambda m: m.to("cpu", torch.bfloat16)])
def test_a_cast_in_the_middle_of_the_anneal_leaves_the_weights_alone(cast):
    handover = start(segue.Plan(sites=SITES, gate=GumbelSoftmax()), total_steps=50)
    handover.step()
    seams = list(handover.seams.values())
    before = [(seam.student_weight.item(), seam.student_mean.item()) for seam in seams]
    cast(handover.model)
    assert [(seam.student_weight.item(), seam.student_mean.item()) for seam in seams] == before
    assert {x.dtype for seam in seams for x in (seam.student_weight, seam.student_mean)} == {torch.float32}
    assert len({weight for weight, _ in before}) == len(seams)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: type(gate).__name__)
def test_a_cast_model_verifies_and_trains_through_takeover(dtype, gate):
    plan = segue.Plan(sites=SITES, gate=gate, guidance=FeatureGuidance(), distill=LogitDistillation())
    handover = start(plan)
    model = handover.model.to(dtype)
    x, y = batch()
    x = x.to(dtype)
    handover.verify(x)
    optimizer = torch.optim.SGD(handover.parameters(), lr=0.05)
    for _ in range(4):
        logits = model(x)
        assert logits.dtype == dtype
        auxiliary = handover.aux_loss()
        assert auxiliary.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        (F.cross_entropy(logits, y) + auxiliary).backward()
        assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in handover.parameters())
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
    assert set(handover.alphas.values()) == {0.0}


@pytest.mark.parametrize("cast", [True, False], ids=["cast", "autocast"])
@pytest.mark.parametrize(("operator", "family"), REPRESENTATIVES, ids=[name for name, _ in REPRESENTATIVES])
def test_an_operator_trains_through_takeover_in_bfloat16(operator, family, cast):
    plan = family.plan(OPERATORS[operator], guidance=FeatureGuidance())
    handover = segue.replace_(family.build().train(), plan, total_steps=10)
    batch = family.batch()
    if cast:
        handover.model.bfloat16()
        batch = replace(batch, args=tuple(x.bfloat16() for x in batch.args))
    optimizer = torch.optim.SGD(handover.parameters(), lr=0.05)
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not cast):
            loss = batch.loss(handover.model) + handover.aux_loss(batch.mask)
        loss.backward()
        wanted = torch.bfloat16 if cast else torch.float32
        assert all(p.grad.dtype == wanted and p.grad.isfinite().all() for p in handover.parameters())
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
    assert set(handover.alphas.values()) == {0.0}


def test_float64_is_blended_in_float64():
    model = meeting(Says(1.0), Says(2.0), alpha=1 / 3).double()
    assert model(torch.ones(1, dtype=torch.float64)).item() == pytest.approx(5 / 3, abs=1e-15)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: type(gate).__name__)
def test_autocast_trains_float32_students_on_blends_made_in_float32(dtype, gate):
    handover = start(segue.Plan(sites=SITES, gate=gate, guidance=FeatureGuidance()), total_steps=10)
    handover.step()
    model, seam = handover.model, handover.seams["blocks.0.attn"]
    x, y = batch()
    seen = {}
    hooks = [
        module.register_forward_hook(lambda _, inputs, output, key=key: seen.__setitem__(key, output))
        for key, module in {"teacher": seam.teacher, "student": seam.student, "seam": seam}.items()
    ]
    with torch.autocast("cpu", dtype=dtype):
        loss = F.cross_entropy(model(x), y) + handover.aux_loss()
    loss.backward()
    for hook in hooks:
        hook.remove()
    assert loss.dtype == torch.float32
    assert {output.dtype for output in seen.values()} == {dtype}
    weight = torch.tensor(seam.state.weight)
    expected = torch.lerp(seen["teacher"].float(), seen["student"].float(), weight).to(dtype)
    assert same_bits(seen["seam"], expected)
    assert all(p.grad.dtype == torch.float32 for p in handover.parameters())
    assert any(p.grad.any() for p in handover.parameters())


@pytest.mark.parametrize("dtype", NARROW)
def test_under_autocast_the_views_are_the_ends_and_verify_holds(dtype):
    handover = start()
    x, _ = batch()
    with torch.autocast("cpu", dtype=dtype), torch.no_grad():
        original = Net()(x)
        assert original.dtype == dtype
        assert same_bits(handover.model(x), original)
        with handover.as_teacher():
            assert same_bits(handover.model(x), original)
        handover.verify(x)
        with handover.as_student():
            student = handover.model(x)
        for seam in handover.seams.values():
            seam.set_weight(1.0, 1.0)
        assert same_bits(handover.model(x), student)


def test_what_is_measured_under_autocast_takes_no_gradient_from_the_training_after_it():
    """Autocast keeps its casts of the weights until it ends, those that were made without gradients too."""
    handover = start(total_steps=10)
    handover.step()
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert handover.verify(x).passed
        handover.similarity(x)
        loss = F.cross_entropy(handover.model(x), y)
    loss.backward()
    assert all(p.grad.any() for p in handover.parameters())


@pytest.mark.parametrize(("theirs", "ours"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_where_autocast_gives_two_types_the_teachers_wins(theirs, ours, engine):
    model = meeting(Says(0.1, answers=theirs), Says(0.7, answers=ours), alpha=0.5)
    t, s = torch.tensor(0.1).to(theirs), torch.tensor(0.7).to(ours).to(theirs)
    call = engines(model)[engine]
    for weight, expected in {0.0: t, 0.5: torch.lerp(t.float(), s.float(), 0.5).to(theirs), 1.0: s}.items():
        model[0].set_weight(weight, weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert same_bits(call(torch.ones(2)), expected.expand(2))


def test_without_autocast_two_types_are_a_mistake():
    model = meeting(Says(0.1), Says(0.7, answers=torch.bfloat16), alpha=0.5)
    with pytest.raises(segue.errors.StudentError) as caught:
        model(torch.ones(2))
    assert str(caught.value).splitlines()[:2] == [
        "the student at site '0' must return what its teacher returns.",
        "  At output the teacher gives torch.float32, the student torch.bfloat16.",
    ]

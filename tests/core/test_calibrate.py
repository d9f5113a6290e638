"""Calibration: students come nearer to their teachers on samples they were not fitted to, and a failure changes nothing."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import segue
from segue.errors import DataError, HandoverError, StudentError
from segue.students import Fourier, LeastSquares, LinearAttention, Performer, Softmax, WindowedLinear
from tests.helpers.models import CASES, VOCABULARY, Batch, build, llama, mlp, rows
from tests.helpers.tiny import SITES, Net, batch

CASE = {case.name: case for case in CASES}
COPIES = 12  # of a case's batch, with other numbers


def begin(name: str, student, **settings) -> tuple[segue.Handover, object]:
    case = CASE[name]
    plan = segue.Plan(sites=case.sites, student=student, **settings)
    return segue.replace_(case.build().eval(), plan, total_steps=2), many(case.batch())


def many(batch: Batch, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def other(x: torch.Tensor) -> torch.Tensor:
        shape = (COPIES * len(x), *x.shape[1:])
        if x.is_floating_point():
            return torch.randn(shape, generator=generator)
        return torch.randint(VOCABULARY, shape, generator=generator)

    kwargs = {name: x.repeat(COPIES, 1) if "mask" in name else other(x) for name, x in batch.kwargs.items()}
    return replace(batch, args=tuple(map(other, batch.args)), kwargs=kwargs)


@pytest.mark.parametrize("student", [LinearAttention(feature_map="relu"), Performer(features=16), Fourier()])
def test_students_come_nearer_to_their_teachers(student):
    handover, batch = begin("timm vit_tiny", student)
    fitted = handover.calibrate([batch.args[0][:2], batch.args[0][2:]])
    assert list(fitted) == [site.name for site in handover.sites]
    assert all(fit.after < fit.before for fit in fitted.values())


def far(handover: segue.Handover, batch: Batch, name: str, stream: str) -> float:
    """Measure token by token: relative to the teacher's output there, or in its sample if that is larger."""
    found: list[torch.Tensor] = []
    seam = handover.seams[name]
    shown, view = (seam.teacher, handover.as_teacher) if stream == "teacher" else (seam.student, handover.as_student)

    def compare(_module, args, kwargs, _output):
        handle.remove()  # or it would hear itself
        found.extend(side(*args, **kwargs)[0] for side in (seam.teacher, seam.student))

    handle = shown.register_forward_hook(compare, with_kwargs=True)
    with view():
        batch.predict(handover.model)
    teacher, student = (x.double() for x in found)
    square = teacher.square().sum(-1)
    size = torch.maximum(square, square.mean(1, keepdim=True))
    return (((student - teacher).square().sum(-1) / size).sum() / (square / size).sum()).sqrt().item()


@pytest.mark.parametrize("stream", ["teacher", "student"])
def test_what_is_said_of_the_fit_is_what_is_then_measured(stream):
    handover, batch = begin("HF ViT", LinearAttention(feature_map="relu"))
    others = many(CASE["HF ViT"].batch(), seed=2)
    first, *_ = names = [site.name for site in handover.sites]
    before = {name: far(handover, batch, name, stream) for name in names}
    fitted = handover.calibrate([batch.kwargs], LeastSquares(stream=stream))
    assert fitted[first].before == pytest.approx(before[first], rel=1e-3)
    if stream == "teacher":  # which does not depend on the fits before
        assert {name: fit.before for name, fit in fitted.items()} == pytest.approx(before, rel=1e-3)
    for name, fit in fitted.items():
        assert fit.after < fit.before
        assert fit.after == pytest.approx(far(handover, others, name, stream), rel=0.05)  # on images it was not fitted to


def test_batches_that_can_be_read_only_once_serve_every_site():
    handover, batch = begin("HF ViT", LinearAttention())
    pixels = batch.kwargs["pixel_values"]
    once = handover.calibrate({"pixel_values": part} for part in pixels.split(8))
    again, _ = begin("HF ViT", LinearAttention())
    assert once == again.calibrate([{"pixel_values": part} for part in pixels.split(8)])


def test_a_perfect_student_stays_perfect():
    handover, batch = begin("HF Llama", Softmax())
    fitted = handover.calibrate([batch.kwargs], LeastSquares(ridge=1e-9))
    assert all(fit.after < 1e-3 for fit in fitted.values())


def test_padding_does_not_count():
    handover, batch = begin("HF GPT-2", LinearAttention())
    handover.calibrate([batch.kwargs])
    weights = [seam.student.output.weight.clone() for seam in handover.seams.values()]
    other, batch = begin("HF GPT-2", LinearAttention())
    ids = batch.kwargs["input_ids"].where(batch.kwargs["attention_mask"].bool(), 3)
    other.calibrate([{**batch.kwargs, "input_ids": ids}])
    for weight, seam in zip(weights, other.seams.values(), strict=True):
        torch.testing.assert_close(seam.student.output.weight, weight)
    every, batch = begin("HF GPT-2", LinearAttention())
    every.calibrate([batch.kwargs], mask=lambda batch: None)
    assert not torch.allclose(next(iter(every.seams.values())).student.output.weight, weights[0])


def test_a_students_own_linear_map_is_named():
    def student(teacher, site):
        return nn.Sequential(nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 16))

    handover = segue.replace_(build(mlp), segue.Plan(sites="2", student=student), total_steps=2)
    fitted = handover.calibrate([rows().args[0]], LeastSquares(output="2"))
    assert fitted["2"].after < fitted["2"].before
    with pytest.raises(StudentError, match="has no linear layer '1'; its linear layers are 0, 2"):
        handover.calibrate([rows().args[0]], LeastSquares(output="1"))
    with pytest.raises(StudentError, match="has no output_projection; its linear layers are 0, 2"):
        handover.calibrate([rows().args[0]])
    before = handover.seams["2"].student[0].weight.clone()
    with pytest.raises(StudentError, match="something comes after it"):
        handover.calibrate([rows().args[0]], LeastSquares(output="0"))
    assert torch.equal(handover.seams["2"].student[0].weight, before)


def test_a_site_that_the_batches_never_reach_is_named():
    class PassesBy(nn.Sequential):
        def forward(self, x):
            return self[0](x)

    model = PassesBy(nn.Linear(4, 4), nn.Linear(4, 4))
    handover = segue.replace_(model, segue.Plan(sites="*", student=lambda t, s: nn.Linear(4, 4)), total_steps=2)
    with pytest.raises(HandoverError, match="does not call site '1'"):
        handover.calibrate([torch.randn(40, 4)], LeastSquares(output=""))
    ignoring = segue.Plan(sites="*", student=lambda t, s: nn.Linear(4, 4), unreached="ignore")
    handover = segue.replace_(PassesBy(nn.Linear(4, 4), nn.Linear(4, 4)), ignoring, total_steps=2)
    with pytest.raises(HandoverError, match="the model does not call site '1'"):
        handover.calibrate([torch.randn(40, 4)], LeastSquares(output=""))


def test_the_batches_are_read_without_dropout_whatever_the_mode():
    def fitted(mode: bool) -> torch.Tensor:
        def student(teacher, site):
            linear = nn.Linear(8, 8)
            torch.nn.init.eye_(linear.weight)
            return linear

        model = Net(dropout=0.5).train(mode)
        handover = segue.replace_(model, segue.Plan(sites=SITES, student=student, backbone="train"), total_steps=2)
        handover.calibrate([batch()[0]], LeastSquares(output=""))
        assert model.training == mode
        return handover.seams["blocks.2.attn"].student.weight

    assert torch.equal(fitted(True), fitted(False))


def test_bert_has_no_output_projection_inside_its_site():
    handover, batch = begin("HF BERT", LinearAttention())
    with pytest.raises(StudentError, match=r"attention\.self"):
        handover.calibrate([batch.kwargs])


def test_released_teachers_cannot_be_asked():
    handover, batch = begin("timm vit_tiny", LinearAttention(), release=True)
    CASE["timm vit_tiny"].batch().loss(handover.model.train())
    handover.step()
    handover.step()
    with pytest.raises(HandoverError, match="released"):
        handover.calibrate([batch.args[0]])


def test_the_model_is_as_before_but_for_the_projections():
    handover, batch = begin("timm vit_tiny", LinearAttention())
    handover.model.train()
    modes = [module.training for module in handover.model.modules()]
    state = {name: value.clone() for name, value in handover.model.state_dict().items()}
    handover.calibrate([batch.args[0]])
    assert [module.training for module in handover.model.modules()] == modes
    changed = {name for name, value in handover.model.state_dict().items() if not torch.equal(value, state[name])}
    assert changed == {f"{site.name}.student.output.{part}" for site in handover.sites for part in ("weight", "bias")}
    assert not any(module._forward_hooks for seam in handover.seams.values() for module in seam.modules())


def test_no_batches_are_named_as_what_they_are():
    handover, _ = begin("HF ViT", LinearAttention())
    with pytest.raises(DataError, match=r"^there are no batches\.\n"):
        handover.calibrate([])


def test_a_fit_that_fails_later_leaves_every_student_as_it_was():
    def student(teacher, site):
        last = nn.Linear(8, 8)
        return last if site.index < 2 else nn.Sequential(last, nn.Tanh())

    handover = segue.replace_(Net(), segue.Plan(sites=SITES, student=student), total_steps=2)
    before = {name: value.clone() for name, value in handover.model.state_dict().items()}
    method = ByPlace({0: LeastSquares(), 1: LeastSquares(), 2: LeastSquares(output="0")})
    with pytest.raises(StudentError, match="something comes after it"):
        handover.calibrate([batch(size=16)[0]], method)
    assert all(torch.equal(value, before[name]) for name, value in handover.model.state_dict().items())
    assert not any(module._forward_hooks for seam in handover.seams.values() for module in seam.modules())


@dataclass(frozen=True)
class ByPlace:
    """A method of one's own: another one at each place."""

    methods: dict
    stream: str = "student"

    def observer(self, teacher, student, site):
        return self.methods[site.index].observer(teacher, student, site)


class MeanOfTeacher:
    """A method of one's own, which observes the teacher's inside and sets a bias."""

    stream = "teacher"

    def observer(self, teacher, student, site):
        return MeanObserver(teacher)


class MeanObserver:
    def __init__(self, teacher):
        self.teacher, self.total, self.count, self.calls = teacher, torch.zeros(8), torch.zeros(()), 0

    def hooks(self):
        return [self.teacher.register_forward_hook(lambda *_: setattr(self, "calls", self.calls + 1))]

    def observe(self, teacher, student, mask):
        self.total += teacher.sum((0, 1))
        self.count += teacher.shape[0] * teacher.shape[1]

    def sums(self):
        return [self.total, self.count]

    def fit(self, parameters):
        assert self.calls == 2  # one for each batch
        assert set(parameters) == {"weight", "bias"}
        return {"bias": self.total / self.count}, 1.0, 0.5


def test_a_method_decides_what_it_observes_and_what_it_fits():
    handover = segue.replace_(Net(), segue.Plan(sites=SITES, student=lambda t, s: nn.Linear(8, 8)), total_steps=2)
    x = batch(size=16)[0]
    fitted = handover.calibrate([x[:8], x[8:]], MeanOfTeacher())
    assert {(fit.before, fit.after) for fit in fitted.values()} == {(1.0, 0.5)}
    with torch.no_grad(), handover.as_teacher() as model:
        outputs = []
        handle = handover.seams["blocks.2.attn"].teacher.register_forward_hook(lambda m, a, out: outputs.append(out))
        model.eval()(x)
        handle.remove()
    torch.testing.assert_close(handover.seams["blocks.2.attn"].student.bias.detach(), outputs[0].mean((0, 1)))
    with pytest.raises(HandoverError, match="method"):
        handover.calibrate([x], object())


PERIODS, LENGTH = (2, 9), 48


def periodic(count: int, seed: int) -> torch.Tensor:
    """Sequences that repeat their first few tokens: the next one must be looked up."""
    generator = torch.Generator().manual_seed(seed)
    period = torch.randint(*PERIODS, (count, 1), generator=generator)
    first = torch.randint(20, (count, LENGTH), generator=generator)
    return first.gather(1, torch.arange(LENGTH) % period)


@pytest.fixture(scope="module")
def trained():
    """A language model of two layers that has learned to look tokens up."""
    model = build(lambda: llama(vocab_size=20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(200):
        ids = periodic(32, step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.parametrize("samples", [2, 4, 8, 16])
def test_a_calibrated_language_model_is_not_worse_than_the_swap(trained, samples):
    model = copy.deepcopy(trained)
    ids = periodic(32, seed=1000)
    with torch.no_grad():
        original = model(ids).logits.log_softmax(-1)
    plan = segue.Plan(sites="model.layers.*.self_attn", student=WindowedLinear(window=4))
    handover = segue.replace_(model, plan, total_steps=2)

    def divergence() -> float:
        with torch.no_grad(), handover.as_student():
            found = model(ids).logits.log_softmax(-1)
        return (original.exp() * (original - found)).sum(-1).mean().item()

    before = divergence()
    fitted = handover.calibrate([periodic(samples, seed=2000)])
    after = divergence()
    assert after <= 1.02 * before
    assert (after == before) == all(fit.after == fit.before for fit in fitted.values())
    if samples >= 16:
        assert after < before

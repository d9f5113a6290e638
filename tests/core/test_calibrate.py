"""Least squares: the closed form against torch's solver, on the teacher's own stream, in one process and in two."""

import pytest
import torch
from torch import nn

import segue
from segue.errors import DataError, HandoverError, StudentError
from segue.students import Fourier, LeastSquares, LinearAttention, Performer, Softmax
from segue.students.initialisation import RegressionSums
from tests.helpers.models import CASES, build, mlp, rows
from tests.helpers.tiny import SITES, Net, batch

CASE = {case.name: case for case in CASES}


def begin(name: str, student, **settings) -> tuple[segue.Handover, object]:
    case = CASE[name]
    plan = segue.Plan(sites=case.sites, student=student, **settings)
    return segue.replace_(case.build().eval(), plan, total_steps=2), case.batch()


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_solution_is_the_least_squares_solution(with_bias):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(50, n, generator=generator, dtype=torch.float64) for n in (7, 3))
    sums = RegressionSums(7, 3, torch.device("cpu"))
    for part in range(0, 50, 20):
        sums.add(x[part : part + 20], y[part : part + 20], torch.zeros_like(y[part : part + 20]))
    weight, bias, left = sums.solve(0.0, with_bias)
    design = torch.cat([x, torch.ones(50, 1, dtype=x.dtype)], 1) if with_bias else x
    expected = torch.linalg.lstsq(design, y).solution
    torch.testing.assert_close(weight, expected[:7].T)
    if with_bias:
        torch.testing.assert_close(bias, expected[7])
    assert left == pytest.approx((design @ expected - y).square().sum().item())


def test_the_ridge_is_relative_to_the_features():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(50, n, generator=generator, dtype=torch.float64) for n in (7, 3))
    sums, larger = RegressionSums(7, 3, torch.device("cpu")), RegressionSums(7, 3, torch.device("cpu"))
    sums.add(x, y, y)
    larger.add(100 * x, y, y)
    penalty = 0.1 * (x.square().sum(0)).mean() * torch.eye(7, dtype=x.dtype)
    torch.testing.assert_close(sums.solve(0.1, False)[0].T, torch.linalg.solve(x.T @ x + penalty, x.T @ y))
    torch.testing.assert_close(larger.solve(0.1, False)[0] * 100, sums.solve(0.1, False)[0])


@pytest.mark.parametrize("student", [LinearAttention(), Performer(features=16), Fourier()])
def test_students_come_nearer_to_their_teachers(student):
    handover, batch = begin("timm vit_tiny", student)
    fitted = handover.calibrate([batch.args[0][:2], batch.args[0][2:]])
    assert list(fitted) == [site.name for site in handover.sites]
    assert all(fit.after < 0.8 * fit.before for fit in fitted.values())


def test_what_is_said_of_the_fit_is_what_is_then_measured():
    handover, batch = begin("HF ViT", LinearAttention(feature_map="relu"))
    teachers: dict[str, list[torch.Tensor]] = {}
    students: dict[str, list[torch.Tensor]] = {}

    def listen() -> list:
        def ask(name: str):
            def hook(_teacher, args, kwargs, output):
                teachers[name] = [output[0]]
                students[name] = [handover.seams[name].student(*args, **kwargs)[0]]

            return hook

        return [seam.teacher.register_forward_hook(ask(name), with_kwargs=True) for name, seam in handover.seams.items()]

    def measured() -> dict[str, float]:
        handles = listen()
        with torch.no_grad(), handover.as_teacher():
            batch.predict(handover.model)
        for handle in handles:
            handle.remove()
        return {n: ((students[n][0] - t).norm() / t.norm()).item() for n, (t,) in teachers.items()}

    before = measured()
    fitted = handover.calibrate([batch.kwargs], LeastSquares(ridge=1e-6))
    after = measured()
    for name, fit in fitted.items():
        assert fit.before == pytest.approx(before[name], rel=1e-3)
        assert fit.after == pytest.approx(after[name], rel=2e-2)


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
        handover.calibrate([torch.ones(2, 4)], LeastSquares(output=""))
    ignoring = segue.Plan(sites="*", student=lambda t, s: nn.Linear(4, 4), unreached="ignore")
    handover = segue.replace_(PassesBy(nn.Linear(4, 4), nn.Linear(4, 4)), ignoring, total_steps=2)
    with pytest.raises(HandoverError, match="the model does not call site '1'"):
        handover.calibrate([torch.ones(2, 4)], LeastSquares(output=""))


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
    batch.loss(handover.model.train())
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

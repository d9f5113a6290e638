import pytest
import torch
from torch.nn import functional as F

import segue
from segue.errors import PlanError
from segue.losses import (
    CkaGuidance,
    CosineGuidance,
    FeatureAxis,
    FeatureGuidance,
    GramGuidance,
    LogitDistillation,
    OnTeacherStream,
    PredictionDistillation,
    weight_at,
)
from segue.sites import Site
from segue.training.teacher_cache import top_probabilities
from tests.helpers.tiny import SITES, batch, constant, start

GUIDANCES = [FeatureGuidance(), FeatureGuidance(scale="paper"), CosineGuidance(), GramGuidance(), CkaGuidance()]
MASK = torch.tensor([[1, 1, 1, 0, 0]] * 4 + [[1, 1, 1, 1, 1]] * 4)


def guided(guidance, alpha=0.5, **settings):
    return start(segue.Plan(sites=SITES, guidance=guidance, schedule=constant(alpha), **settings))


def on_stream(handover, x, name="blocks.1.attn"):
    """Compute both outputs at a site by hand, on the stream of the blend."""
    caught = {}
    seam = handover.seams[name]
    hook = seam.register_forward_pre_hook(lambda module, args: caught.update(x=args[0].detach()))
    handover.model(x)
    hook.remove()
    handover.auxiliary.clear()
    return seam.teacher(caught["x"]), seam.student(caught["x"])


def test_feature_guidance_is_equation_3_summed_over_sites():
    handover = guided(FeatureGuidance(scale="paper", weight=0.1, schedule=constant(1.0)))
    x, _ = batch()
    pairs = [on_stream(handover, x, name) for name in handover.seams]
    expected = 0.1 * sum(((s - t) ** 2).sum(-1).mean() for t, s in pairs)
    handover.model(x)
    torch.testing.assert_close(handover.aux_loss(), expected)


def test_relative_guidance_agrees_on_every_split_of_a_batch():
    handover = guided(FeatureGuidance(schedule=constant(1.0)))
    x, _ = batch()

    def loss(part, mask):
        handover.model(part)
        return handover.aux_loss(mask).item()

    whole = loss(x, MASK)
    halves = (loss(x[:4], MASK[:4]) + loss(x[4:], MASK[4:])) / 2
    assert whole == pytest.approx(halves, rel=1e-6)


@pytest.mark.parametrize("guidance", GUIDANCES, ids=repr)
def test_guidance_pulls_the_student_to_the_teacher(guidance):
    handover = guided(guidance, alpha=1.0)
    optimizer = torch.optim.Adam(handover.parameters(), lr=1e-2)
    x, _ = batch()
    losses = []
    for _ in range(8):  # the schedule of the guidance stands still because step() is not called
        handover.model(x)
        loss = handover.aux_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("guidance", GUIDANCES, ids=repr)
def test_guidance_is_zero_for_equal_outputs_and_has_finite_gradients(guidance):
    t = torch.randn(3, 4, 5)
    s = t.clone().requires_grad_()
    loss = guidance(t, s, None)
    assert loss.item() == pytest.approx(0.0, abs=1e-5)
    loss.backward()
    assert s.grad.isfinite().all()


def test_padding_is_left_out():
    handover = guided(FeatureGuidance(scale="paper", schedule=constant(1.0)), alpha=1.0)
    x, _ = batch()
    t, s = on_stream(handover, x, "blocks.0.attn")
    expected = (((s - t) ** 2).sum(-1) * MASK).sum(1) / MASK.sum(1)
    handover.model(x)
    torch.testing.assert_close(handover.losses(MASK)["guidance/blocks.0.attn"], expected.mean())


def test_logit_distillation_is_hintons():
    t, s = torch.randn(6, 4), torch.randn(6, 4)
    p, q = F.softmax(t / 4, -1), F.softmax(s / 4, -1)
    expected = (p * (p.log() - q.log())).sum(-1).mean() * 16
    torch.testing.assert_close(LogitDistillation()(t, s, None), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_are_compared_in_float32_at_least(dtype):
    t, s = (10 * torch.randn(2, 6, 50, generator=torch.Generator().manual_seed(0))).to(dtype)
    loss = LogitDistillation()(t, s, None)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.item() == pytest.approx(LogitDistillation()(t.double(), s.double(), None).item(), rel=1e-5)


@pytest.mark.parametrize("teacher", ["logits", "top probabilities"])
def test_logits_of_a_large_vocabulary_are_compared_in_pieces_with_the_same_derivatives(teacher, monkeypatch):
    t, s = torch.randn(2, 3, 5, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    s.requires_grad_()
    given = top_probabilities(t / 2, 4) if teacher == "top probabilities" else t
    loss_of = LogitDistillation(temperature=2.0)

    def derivatives():
        value = loss_of(given, s, None)
        (first,) = torch.autograd.grad(value, s, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), s)
        (alone,) = torch.autograd.grad(loss_of(given, s, None), s)
        return value, loss_of(given, s.detach(), None), first, alone, second

    expected = derivatives()
    rows = []
    compare = LogitDistillation._divergence
    monkeypatch.setattr(LogitDistillation, "_divergence", lambda self, s, *t: rows.append(len(s)) or compare(self, s, *t))
    monkeypatch.setattr(segue.similarity, "PIECE", 2 * 20)
    torch.testing.assert_close(derivatives(), expected)
    assert rows[:8] == [2] * 7 + [1]


def test_distillation_per_token_leaves_padding_out():
    t, s = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    loss = LogitDistillation()(t, s, mask)
    s[0, 2] = 100
    torch.testing.assert_close(LogitDistillation()(t, s, mask), loss)


def test_prediction_distillation_is_the_mean_squared_error():
    t, s = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(PredictionDistillation()(t, s, None), F.mse_loss(s, t))
    halves = PredictionDistillation()(t.bfloat16(), s.bfloat16(), None)
    torch.testing.assert_close(halves, F.mse_loss(s.bfloat16().float(), t.bfloat16().float()))


def test_predictions_per_token_leave_padding_out():
    t, s = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    loss = PredictionDistillation()(t, s, mask)
    s[0, 2] = 100
    torch.testing.assert_close(PredictionDistillation()(t, s, mask), loss)


def test_every_time_step_counts_alike_in_relative_guidance():
    """Features of a diffusion model grow or shrink with the noise; a sample's own scale does not change its share."""
    t, s = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    by_step = torch.tensor([0.01, 1.0, 100.0]).view(3, 1, 1)
    torch.testing.assert_close(FeatureGuidance()(t * by_step, s * by_step, None), FeatureGuidance()(t, s, None))
    one_bad = FeatureGuidance()(t * by_step, torch.cat([0 * s[:1], t[1:]]) * by_step, None)  # only where features are small
    torch.testing.assert_close(one_bad, torch.tensor(1 / 3))


def test_a_plain_function_is_a_guidance():
    handover = guided(lambda t, s, mask: (t - s).abs().mean(), alpha=0.5)
    handover.model(batch()[0])
    assert handover.aux_loss().item() > 0
    assert weight_at(lambda t, s, mask: 0, 0.1, Site("x")) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: FeatureGuidance(weight=-1.0),
            r"FeatureGuidance\(weight=...\) must be a finite number of at least 0, got -1.0.",
        ),
        (lambda: FeatureGuidance(weight=float("nan")), "got nan."),
        (lambda: FeatureGuidance(scale="sum"), r"FeatureGuidance\(scale=...\) must be 'relative' or 'paper', got 'sum'."),
        (
            lambda: LogitDistillation(temperature=0.0),
            r"LogitDistillation\(temperature=...\) must be a positive number of at most 1000, got 0.0.",
        ),
        (lambda: LogitDistillation(weight=float("inf")), r"LogitDistillation\(weight=...\) must be a finite number"),
    ],
)
def test_impossible_losses_are_refused(make, says):
    with pytest.raises(PlanError, match=says):
        make()


def test_a_weight_that_is_no_number_is_refused():
    class Heavy:
        weight = "heavy"

        def __call__(self, t, s, mask):
            return (t - s).mean()

    with pytest.raises(PlanError, match="the weight of a loss must be a number, got str"):
        weight_at(Heavy(), 0.0, Site("x"))


def test_a_wrapper_passes_weight_and_schedule_on():
    wrapped = OnTeacherStream(then=FeatureGuidance(weight=3.0, schedule=constant(0.5)))
    assert weight_at(wrapped, 0.0, Site("x")) == 1.5
    inside = OnTeacherStream(then=FeatureAxis(axis=1, then=FeatureGuidance(weight=3.0, schedule=constant(0.5))))
    assert weight_at(inside, 0.9, Site("x")) == weight_at(inside.then, 0.9, Site("x")) == 1.5

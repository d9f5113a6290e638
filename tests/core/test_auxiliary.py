"""The auxiliary losses: what they are computed from, when they end, and what is refused."""

import pytest
import torch
from torch import nn

import segue
from segue.errors import HandoverError, PlanError
from segue.losses import (
    CkaGuidance,
    CosineGuidance,
    FeatureGuidance,
    LogitDistillation,
    OnTeacherStream,
    PredictionDistillation,
    weight_at,
)
from segue.schedules import Hold
from segue.sites import Site
from tests.helpers.tiny import SITES, Net, batch, constant, optimizer_for, same_bits, start, train


def guided(guidance, alpha=0.5, **settings):
    return start(segue.Plan(sites=SITES, guidance=guidance, schedule=constant(alpha), **settings))


def test_the_named_parts_add_up_and_can_be_read_again():
    plan = segue.Plan(sites=SITES, guidance=FeatureGuidance(), distill=LogitDistillation(), schedule=constant(0.5))
    handover = start(plan)
    handover.model(batch()[0])
    total = handover.aux_loss()
    parts = handover.losses()
    assert list(parts) == [*(f"guidance/blocks.{i}.attn" for i in range(3)), "distill"]
    torch.testing.assert_close(total, sum(parts.values()))


@pytest.mark.parametrize("distill", [None, LogitDistillation()], ids=["guidance", "and distillation"])
def test_a_task_without_weight_leaves_no_parameter_without_a_gradient(distill):
    """Guidance does not reach a head that trains, which DDP waits for, and it may end inside a phase without a task."""
    phases = (segue.phases.Phase(name="guided", task=0.0, guidance=lambda progress, site: float(progress < 0.5)),)
    plan = segue.Plan(sites=SITES, phases=phases, guidance=FeatureGuidance(), distill=distill, train="all")
    handover = start(plan, total_steps=4)
    x, y = batch()
    for _ in range(4):
        task = handover.weighted(nn.functional.cross_entropy(handover.model(x), y))
        assert task.item() == 0
        assert task.requires_grad == (distill is None)
        (task + handover.aux_loss()).backward()
        assert all(parameter.grad is not None for parameter in handover.parameters())
        handover.step()


def test_distillation_compares_with_the_original_model():
    handover = start(segue.methods.distillation(sites=SITES))
    x, _ = batch()
    with handover.as_teacher(), torch.no_grad():
        theirs = handover.model(x)
    ours = handover.model(x)
    torch.testing.assert_close(handover.aux_loss(), LogitDistillation()(theirs, ours, None))


def test_distillation_compares_with_the_original_in_evaluation_even_where_the_backbone_trains():
    handover = start(segue.methods.distillation(sites=SITES, backbone="train"), dropout=0.5)
    x, _ = batch()
    with torch.no_grad():
        theirs = Net(dropout=0.5).eval()(x)
    ours = handover.model(x)
    torch.testing.assert_close(handover.aux_loss(), LogitDistillation()(theirs, ours, None))
    assert handover.model.blocks[0].mlp.training


def test_distillation_from_a_backbone_that_trains_along_keeps_a_frozen_copy():
    handover = start(segue.methods.distillation(sites=SITES, train="all"))
    x, _ = batch()
    with handover.as_teacher(), torch.no_grad():
        original = handover.model(x)
    train(handover, optimizer_for(handover), 3)
    ours = handover.model(x)
    torch.testing.assert_close(handover.aux_loss(), LogitDistillation()(original, ours, None))


def test_distillation_from_a_frozen_copy_outlives_released_teachers():
    plan = segue.Plan(sites=SITES, distill=LogitDistillation(), train="all", release=True)
    handover = start(plan)
    train(handover, optimizer_for(handover), steps=6)  # takeover is at 2
    assert all(seam.teacher is None for seam in handover.seams.values())
    handover.model(batch()[0])
    assert handover.losses()["distill"].item() > 0


def test_distillation_takes_logits_where_the_user_says():
    plan = segue.Plan(sites=SITES, schedule=constant(0.0), distill=LogitDistillation(logits=lambda output: output[:, :2]))
    handover = start(plan)
    x, _ = batch()
    with handover.as_teacher(), torch.no_grad():
        theirs = handover.model(x)
    ours = handover.model(x)
    torch.testing.assert_close(handover.aux_loss(), LogitDistillation()(theirs[:, :2], ours[:, :2], None))


def test_a_users_own_pass_of_the_teacher_is_not_distilled():
    def loss(looks: bool) -> float:
        handover = start(segue.Plan(sites=SITES, schedule=constant(0.0), distill=LogitDistillation()))
        handover.model(batch()[0])
        if looks:
            with handover.as_teacher():
                handover.model(batch(1)[0])
        found = handover.aux_loss().item()
        assert found > 0
        torch.testing.assert_close(handover.similarity(), handover.similarity(batch()[0]))  # of the last training input
        return found

    assert loss(looks=True) == loss(looks=False)


class WithFeatures(Net):
    """Return the features first, and the logits by name."""

    def forward(self, x):
        features = 10 * x.mean(1)
        return {"features": features, "logits": super().forward(x)}


def test_distillation_takes_the_logits_of_a_dictionary():
    plan = segue.Plan(sites=SITES, schedule=constant(0.0), distill=LogitDistillation())
    handover, x = segue.replace_(WithFeatures().train(), plan, total_steps=10), batch()[0]
    with handover.as_teacher(), torch.no_grad():
        theirs = handover.model(x)["logits"]
    ours = handover.model(x)["logits"]
    torch.testing.assert_close(handover.aux_loss(), LogitDistillation()(theirs, ours, None))


class Denoiser(Net):
    """Return a prediction as diffusers does: by name, after something else."""

    def forward(self, x):
        return {"variance": 10 * x.mean(1), "sample": super().forward(x)}


@pytest.mark.parametrize("pick", [None, lambda output: output["variance"]], ids=["sample", "own"])
def test_predictions_are_distilled(pick):
    plan = segue.Plan(sites=SITES, schedule=constant(0.0), distill=PredictionDistillation(weight=2.0, prediction=pick))
    handover, x = segue.replace_(Denoiser().train(), plan, total_steps=10), batch()[0]
    with handover.as_teacher(), torch.no_grad():
        theirs = handover.model(x)
    ours, name = handover.model(x), "sample" if pick is None else "variance"
    torch.testing.assert_close(handover.aux_loss(), 2 * (ours[name] - theirs[name]).square().mean())


def test_a_prediction_that_is_no_tensor_is_refused():
    plan = segue.Plan(sites=SITES, schedule=constant(0.0), distill=PredictionDistillation(prediction=lambda output: "noise"))
    handover = start(plan)
    handover.model(batch()[0])
    text = r"PredictionDistillation\(prediction=...\) must return a floating tensor, got str."
    with pytest.raises(PlanError, match=text):
        handover.aux_loss()


def test_on_teacher_stream_compares_with_a_full_teacher_pass():
    handover = start(segue.methods.fitnets(sites=SITES))
    x, _ = batch()
    caught = {}
    with torch.no_grad():
        for view, side in ((handover.as_teacher, "teacher"), (handover.as_student, "student")):
            module = getattr(handover.seams["blocks.2.attn"], side)
            hook = module.register_forward_hook(lambda m, args, output, side=side: caught.update({side: output}))
            with view():
                handover.model(x)
            hook.remove()
    handover.model(x)
    part = handover.losses()["guidance/blocks.2.attn"]
    expected = FeatureGuidance()(caught["teacher"], caught["student"], None)
    torch.testing.assert_close(part, expected)


def test_on_teacher_stream_keeps_to_the_original_when_the_backbone_trains_along():
    plan = segue.methods.fitnets(sites=SITES, train="all", distill=LogitDistillation())
    handover = start(plan, total_steps=50)
    x, _ = batch()
    caught = []
    with handover.as_teacher(), torch.no_grad():
        hook = handover.seams["blocks.2.attn"].teacher.register_forward_hook(lambda m, args, output: caught.append(output))
        handover.model(x)
        hook.remove()
    train(handover, optimizer_for(handover), 3)
    hook = handover.seams["blocks.2.attn"].student.register_forward_hook(lambda m, args, output: caught.append(output))
    handover.model(x)
    hook.remove()
    expected = FeatureGuidance()(*caught, None) * weight_at(plan.guidance, handover.progress, Site("x"))
    torch.testing.assert_close(handover.losses()["guidance/blocks.2.attn"], expected)


SPLITS = [(8,), (1, 7), (5, 0, 3), (2, 3, 3)]
PADDING = torch.tensor([[1, 1, 1, 0, 0]] * 3 + [[1, 1, 1, 1, 1]] * 4 + [[1, 0, 0, 0, 0]])


def parts_of(sizes, guidance, mask):
    """The losses and gradients of forwards of these sizes over the same samples."""
    plan = segue.Plan(sites=SITES, guidance=guidance, distill=LogitDistillation(), schedule=constant(0.5))
    handover = start(plan)
    for part in batch()[0].split(list(sizes)):
        handover.model(part)
    handover.aux_loss(mask).backward()
    parts = {name: part.item() for name, part in handover.losses(mask).items()}
    return parts, [parameter.grad for parameter in handover.parameters()]


@pytest.mark.parametrize("mask", [None, PADDING], ids=["no mask", "mask"])
@pytest.mark.parametrize("guidance", [FeatureGuidance(), FeatureGuidance(scale="paper"), CosineGuidance()], ids=repr)
@pytest.mark.parametrize("sizes", SPLITS[1:], ids=str)
def test_forwards_of_unequal_size_are_one_forward_over_all(sizes, guidance, mask):
    whole, gradients = parts_of(SPLITS[0], guidance, mask)
    found, split_gradients = parts_of(sizes, guidance, mask)
    assert found == pytest.approx(whole, rel=1e-5)
    for one, other in zip(split_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_similarity_weighs_forwards_by_their_samples():
    handover, (x, _) = start(), batch()
    whole = handover.similarity(x)
    with handover.comparing() as found:
        for part in x.split([1, 0, 7]):
            handover.model(part)
    for name in whole:
        assert found[name].cosine == pytest.approx(whole[name].cosine, rel=1e-5)


@pytest.mark.parametrize("guidance", [FeatureGuidance(), CkaGuidance(), OnTeacherStream(), lambda t, s, mask: (t - s).mean()])
def test_an_empty_batch_has_no_auxiliary_loss(guidance):
    handover = start(segue.Plan(sites=SITES, guidance=guidance, distill=LogitDistillation(), schedule=constant(0.5)))
    handover.model(batch()[0][:0])
    loss = handover.aux_loss()
    assert loss.item() == 0.0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in handover.parameters())
    handover.step()
    with pytest.raises(PlanError, match="outputs without samples cannot be compared"):
        handover.similarity(batch()[0][:0])


def test_a_guidance_that_is_no_number_is_refused():
    handover = guided(lambda t, s, mask: (t - s).abs())
    handover.model(batch()[0])
    with pytest.raises(PlanError, match="average or sum it"):
        handover.aux_loss()


def test_the_target_never_moves_even_where_the_gradient_passes_the_teacher():
    handover = guided(FeatureGuidance(schedule=constant(1.0)), teacher_gradient=True)
    handover.model(batch()[0])
    records = [record for seam in handover.seams.values() for record in seam.records]
    assert not any(t.requires_grad for t, _ in records)
    assert all(s.requires_grad for _, s in records)


class InPlace(nn.Module):
    """Change what the site returns, in place or in a copy."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.in_place = in_place

    def forward(self, x):
        output = self.layer(x)
        return output.mul_(3) if self.in_place else output * 3


@pytest.mark.parametrize("schedule", [Hold(fraction=1.0), constant(0.0)], ids=["returns the teacher", "returns the student"])
def test_code_that_changes_the_output_of_a_site_in_place_does_not_change_what_was_recorded(schedule):
    losses = []
    for in_place in (True, False):
        torch.manual_seed(0)
        plan = segue.Plan(sites="layer", guidance=FeatureGuidance(schedule=constant(1.0)), schedule=schedule)
        handover = segue.replace_(InPlace(in_place).train(), plan, total_steps=10)
        handover.model(torch.ones(2, 4))
        losses.append(handover.aux_loss())
    assert same_bits(*losses)


@pytest.mark.parametrize(
    "loss", [{"guidance": FeatureGuidance(schedule=constant(1.0))}, {"distill": LogitDistillation()}], ids=str
)
def test_two_forwards_before_one_backward_are_averaged(loss):
    handover = start(segue.Plan(sites=SITES, schedule=constant(0.5), **loss))
    (a, _), (b, _) = batch(0), batch(1)
    handover.model(a)
    first = handover.aux_loss().item()
    handover.model(b)
    second = handover.aux_loss().item()
    handover.model(a)
    handover.model(b)
    assert handover.aux_loss().item() == pytest.approx((first + second) / 2)


def test_aux_loss_is_zero_where_there_is_nothing_to_learn():
    assert start().aux_loss().item() == 0
    handover = guided(FeatureGuidance())
    handover.model.eval()
    handover.model(batch()[0])
    assert handover.aux_loss().item() == 0
    handover.model.train()
    with torch.no_grad():
        handover.model(batch()[0])
        assert handover.aux_loss().item() == 0


def test_forgetting_the_auxiliary_loss_is_noticed():
    handover = guided(FeatureGuidance())
    handover.model(batch()[0])
    with pytest.raises(HandoverError) as error:
        handover.step()
    assert str(error.value) == (
        "aux_loss() is missing before step().\n"
        "  The plan has guidance or distillation, and a training forward has recorded outputs for it.\n"
        "  Hint: add it to the loss: loss = task_loss + handover.aux_loss()."
    )


def test_asking_before_a_forward_is_an_error():
    with pytest.raises(HandoverError, match="No training forward"):
        guided(FeatureGuidance()).aux_loss()


def test_a_step_forgets_the_forwards_before_it():
    handover = guided(FeatureGuidance(schedule=constant(1.0)))
    handover.model(batch()[0])
    handover.aux_loss().backward()
    handover.model(batch(1)[0])  # for a look at the outputs, without a loss
    handover.step()
    with pytest.raises(HandoverError, match="No training forward"):
        handover.aux_loss()
    handover.model(batch()[0])
    alone = handover.aux_loss().item()
    fresh = guided(FeatureGuidance(schedule=constant(1.0)))
    fresh.model(batch()[0])
    assert alone == pytest.approx(fresh.aux_loss().item(), rel=1e-6)


def test_guidance_ends_with_its_schedule_and_the_teacher_with_it():
    handover = start(segue.methods.dcr_dfg(sites=SITES))
    train(handover, optimizer_for(handover), 2)  # aggr20 over 10 steps
    calls = []
    for seam in handover.seams.values():
        seam.teacher.register_forward_hook(lambda *_: calls.append(1))
    handover.model(batch()[0])
    assert handover.losses() == {}
    assert calls == []


def test_guidance_outlives_takeover_while_lambda_is_positive():
    handover = guided(FeatureGuidance(schedule=constant(1.0)), alpha=0.0)
    x, _ = batch()
    output = handover.model(x)
    assert handover.aux_loss().item() > 0
    with handover.as_student():
        assert torch.equal(output, handover.model(x))

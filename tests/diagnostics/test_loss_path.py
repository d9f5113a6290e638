"""Proposition 4: the loss from a teacher's output to its student's, against models put together by hand."""

import copy

import pytest
import torch
from torch import nn

import segue
from segue.diagnostics import loss_path
from segue.diagnostics.loss_path import tails
from segue.errors import DataError, HandoverError, PlanError, SiteError
from segue.gates import Bernoulli, Blend, GumbelSoftmax
from segue.schedules import Linear, Staggered
from tests.diagnostics import reference
from tests.diagnostics.test_curvature import quartic, whole_hessian
from tests.helpers import models


def measured(of, alpha=0.5, **settings):
    return loss_path(of.handover, of.batches, of.loss, alpha, **settings)


@pytest.mark.parametrize("make", [reference.vit, reference.bert])
def test_the_ends_are_the_losses_with_this_sites_teacher_and_student(make):
    of = make(gate=Bernoulli())
    found = measured(of, 0.4, points=3)
    count = len(of.batches)
    for site, path in found.sites.items():
        for share, loss in zip((0.0, 0.5, 1.0), path.losses, strict=True):
            weights = {**dict.fromkeys(of.sites, 0.6), site: share}
            expected = sum(of.loss_at(weights, index) for index in range(count)) / count
            assert loss == pytest.approx(expected, rel=1e-12)
        assert abs(path.losses[0] - path.losses[-1]) > 1e-6
    assert found.weights == (0.0, 0.5, 1.0)
    assert found.batches == count


def test_the_others_stay_at_the_true_means_of_their_gates():
    of = reference.vit(width=4, batches=1, gate=GumbelSoftmax())
    found = measured(of, 0.9, points=2)
    mean = GumbelSoftmax()(0.9, None)
    assert mean == pytest.approx(0.184, abs=5e-4)
    for site, path in found.sites.items():
        assert path.losses[1] == pytest.approx(of.loss_at({**dict.fromkeys(of.sites, mean), site: 1.0}, 0), rel=1e-6)


@pytest.mark.parametrize("make", [reference.vit, lambda **settings: reference.narrow(quartic, **settings)])
def test_the_bound_is_the_largest_gradient_on_the_grid_times_the_way(make):
    of = make(gate=Bernoulli(), batches=2)
    points = 5
    found = measured(of, 0.7, points=points)
    for site, path in found.sites.items():
        steepest, bounds, rises, distances = [], [], [], []
        for index in range(2):
            psi, teacher, student = of.tail(site, dict.fromkeys(of.sites, 0.3), index)
            norms, losses = [], []
            for point in range(points):
                y = (teacher + point / (points - 1) * (student - teacher)).requires_grad_(True)
                loss = psi(y)
                norms.append(torch.autograd.grad(loss, y)[0].norm().item())
                losses.append(loss.item())
            distance = (student - teacher).norm().item()
            steepest.append(max(norms))
            distances.append(distance)
            bounds.append([max(norms) * point / (points - 1) * distance for point in range(points)])
            rises.append([abs(loss - losses[0]) for loss in losses])
        assert path.lipschitz == pytest.approx(max(steepest), rel=1e-10)
        assert path.distance == pytest.approx(sum(distances) / 2, rel=1e-12)
        assert path.bounds == pytest.approx([sum(pair) / 2 for pair in zip(*bounds, strict=True)], rel=1e-10)
        assert path.rises == pytest.approx([sum(pair) / 2 for pair in zip(*rises, strict=True)], rel=1e-8, abs=1e-15)
        assert path.ratio == pytest.approx(max(r / b for r, b in zip(path.rises[1:], path.bounds[1:], strict=True)))


@pytest.mark.parametrize("make", [reference.vit, reference.bert])
def test_on_real_models_the_rise_keeps_below_the_bound(make):
    found = measured(make(gate=Blend()), points=9)
    for path in found.sites.values():
        assert path.rises[0] == path.bounds[0] == 0.0
        assert all(rise <= bound for rise, bound in zip(path.rises, path.bounds, strict=True))
        assert 0 < path.ratio <= 1


def test_a_linear_loss_meets_its_bound_only_along_its_gradient():
    of = reference.narrow(lambda y, target: (y * target).sum(), batches=1, gate=Blend())
    path = measured(of, points=3).sites["site"]
    (_, direction) = of.batches[0]
    _, teacher, student = of.tail("site", {"site": 0.5}, 0)
    across = student - teacher
    assert path.lipschitz == pytest.approx(direction.norm().item(), rel=1e-12)
    cosine = (direction * across).sum().abs() / direction.norm() / across.norm()
    assert path.ratio == pytest.approx(cosine.item(), rel=1e-9)
    assert path.rises[1] == pytest.approx(path.rises[2] / 2, rel=1e-9)


def test_a_student_that_is_its_teacher_goes_nowhere():
    of = reference.narrow(quartic, gate=Blend(), student=lambda teacher, site: copy.deepcopy(teacher))
    path = measured(of, points=3).sites["site"]
    assert path.distance == path.ratio == 0.0
    assert path.rises == path.bounds == (0.0, 0.0, 0.0)


def test_without_alpha_the_others_stand_where_the_running_handover_has_them():
    of = reference.vit(width=4, batches=1, schedule=Staggered(then=Linear(start=0.9, end=0.1)))
    of.handover.resume_at(9)
    alphas = of.handover.alphas
    assert len(set(alphas.values())) == 2
    for site, path in measured(of, None, points=2).sites.items():
        weights = {name: 1 - alpha for name, alpha in alphas.items()}
        assert path.losses[0] == pytest.approx(of.loss_at({**weights, site: 0.0}, 0), rel=1e-12)
        assert path.losses[1] == pytest.approx(of.loss_at({**weights, site: 1.0}, 0), rel=1e-12)


def test_patterns_choose_sites():
    of = reference.vit(width=4, batches=1)
    found = measured(of, points=2, sites=("blocks.1.attn",))
    assert found.sites == {"blocks.1.attn": measured(of, points=2).sites["blocks.1.attn"]}


def test_what_cannot_be_measured_is_refused():
    of = reference.vit(depth=1, width=4, batches=1)
    for points in (0, 1):
        with pytest.raises(PlanError, match=rf"points=...\) must be an integer of at least 2, got {points}"):
            measured(of, points=points)
    with pytest.raises(SiteError, match="'attn' matches none"):
        measured(of, sites="attn")
    with pytest.raises(PlanError, match=r"alpha=...\) must be a number from 0 to 1"):
        measured(of, -0.5)
    of.batches = []
    with pytest.raises(DataError, match="`batches` is empty"):
        measured(of)


def test_it_prints_a_table_with_a_line_for_each_site():
    found = measured(reference.vit(width=4, batches=1), points=3)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in str(found).splitlines()]
    assert rows[0] == ["site", "loss with the teacher", "with the student", "L", "distance", "rise / bound"]
    for row, (name, path) in zip(rows[2:], found.sites.items(), strict=True):
        assert row[0] == name
        numbers = (path.losses[0], path.losses[-1], path.lipschitz, path.distance, path.ratio)
        assert [float(cell) for cell in row[1:]] == pytest.approx(numbers, rel=5e-3)


@pytest.mark.parametrize("make", [reference.vit, reference.bert, lambda **s: reference.narrow(quartic, **s)])
def test_a_tail_is_the_loss_of_a_model_in_which_the_site_returns_y(make):
    of = make(gate=Bernoulli())
    weights = {name: 0.25 + 0.5 * index for index, name in enumerate(of.sites)}
    with tails(of.handover, weights) as tail:
        for site in of.sites:
            found = tail(site, of.batches[0], of.loss)
            psi, teacher, student = of.tail(site, weights, 0)
            torch.testing.assert_close(found.teacher, teacher, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found.student, student, rtol=1e-12, atol=1e-12)
            assert found.distance == pytest.approx((student - teacher).norm().item(), rel=1e-12)
            y = torch.randn(teacher.shape, generator=torch.Generator().manual_seed(0), dtype=teacher.dtype)
            assert found(y).item() == pytest.approx(psi(y).item(), rel=1e-12)
            assert found.value(0.3) == pytest.approx(psi(teacher + 0.3 * (student - teacher)).item(), rel=1e-12)
            loss, slope = found.slope(0.3)
            leaf = (0.7 * teacher + 0.3 * student).requires_grad_(True)
            assert loss == pytest.approx(found.value(0.3), rel=1e-12)
            assert slope == pytest.approx(torch.autograd.grad(psi(leaf), leaf)[0].norm().item(), rel=1e-10)


def test_the_ends_of_the_segment_are_teacher_and_student_bit_for_bit():
    of = reference.vit(width=4)
    with tails(of.handover, dict.fromkeys(of.sites, 0.5)) as tail:
        found = tail(of.sites[0], of.batches[0], of.loss)
        assert torch.equal(found.at(0.0), found.teacher)
        assert torch.equal(found.at(1.0), found.student)
        assert found.at(0.5).is_leaf
        assert found.at(0.5).requires_grad


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_its_curvature_is_the_hessian_at_that_share(share):
    of = reference.narrow(quartic, gate=Bernoulli())
    with tails(of.handover, {"site": 0.5}) as tail:
        found = tail("site", of.batches[0], of.loss)
        psi, teacher, student = of.tail("site", {"site": 0.5}, 0)
        matrix = whole_hessian(psi, teacher + share * (student - teacher))
        product = found.curvature(share)
        for index in range(3):  # as often as one likes
            vector = torch.randn(teacher.shape, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
            expected = (matrix @ vector.reshape(-1)).reshape(vector.shape)
            torch.testing.assert_close(product(vector), expected, rtol=1e-9, atol=1e-10)


def test_where_the_loss_is_linear_its_curvature_is_nothing():
    of = reference.narrow(lambda y, target: (y * target).sum())
    with tails(of.handover, {"site": 0.5}) as tail:
        vector = torch.ones(2, 4, dtype=torch.float64)
        assert not tail("site", of.batches[0], of.loss).curvature(0.5)(vector).any()


def test_it_works_without_gradients_around_it_and_asks_no_parameter_for_one():
    of = reference.vit(width=4)
    asked = {name: p.requires_grad for name, p in of.handover.model.named_parameters()}
    with torch.no_grad(), tails(of.handover, dict.fromkeys(of.sites, 0.5)) as tail:
        assert not any(p.requires_grad for p in of.handover.model.parameters())
        assert tail(of.sites[0], of.batches[0], of.loss).slope(0.5)[1] > 0
    assert {name: p.requires_grad for name, p in of.handover.model.named_parameters()} == asked


def test_a_failing_loss_leaves_everything_as_it_was():
    of = reference.vit(width=4)
    seam = of.handover.seams[of.sites[0]]
    before = seam.state.weight, seam.state.mean, seam.training, of.handover.model.training

    def fails(model, batch):
        model(batch[0])
        raise RuntimeError("no loss today")

    def fails_in_tail():
        with tails(of.handover, dict.fromkeys(of.sites, 0.7)) as tail:
            found = tail(of.sites[0], of.batches[0], of.loss)
            found.loss_fn = fails
            found.slope(0.5)

    with pytest.raises(RuntimeError, match="no loss today"):
        fails_in_tail()
    assert (seam.state.weight, seam.state.mean, seam.training, of.handover.model.training) == before
    assert not seam._forward_hooks
    assert any(p.requires_grad for p in of.handover.model.parameters())


def test_a_site_that_a_forward_passes_by_is_refused():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    plan = segue.Plan(sites="*used", unreached="ignore")
    handover = segue.replace_(models.build(Skipping), plan, total_steps=2)
    with (
        tails(handover, dict.fromkeys(handover.seams, 0.5)) as tail,
        pytest.raises(HandoverError, match="must be called once per forward, got 0 calls"),
    ):
        tail("unused", torch.ones(1, 2), lambda model, batch: model(batch).sum())

"""Proposition 4: the loss from a teacher's output to its student's, against models put together by hand."""

import copy

import pytest
import torch

from segue.diagnostics import loss_path
from segue.errors import DataError, PlanError, SiteError
from segue.gates import Bernoulli, Blend, GumbelSoftmax
from segue.schedules import Linear, Staggered
from tests.diagnostics import reference
from tests.diagnostics.test_curvature import quartic


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
    assert found.shares == (0.0, 0.5, 1.0)
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
        with pytest.raises(PlanError, match=rf"loss_path\(points={points}\) was asked for"):
            measured(of, points=points)
    with pytest.raises(SiteError, match="'attn' matched none"):
        measured(of, sites="attn")
    with pytest.raises(PlanError, match="alpha is the teacher's share"):
        measured(of, -0.5)
    of.batches = []
    with pytest.raises(DataError, match="No minibatch was given"):
        measured(of)


def test_it_prints_a_table_with_a_line_for_each_site():
    found = measured(reference.vit(width=4, batches=1), points=3)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in str(found).splitlines()]
    assert rows[0] == ["site", "loss with the teacher", "with the student", "L", "distance", "rise / bound"]
    for row, (name, path) in zip(rows[2:], found.sites.items(), strict=True):
        assert row[0] == name
        numbers = (path.losses[0], path.losses[-1], path.lipschitz, path.distance, path.ratio)
        assert [float(cell) for cell in row[1:]] == pytest.approx(numbers, rel=5e-3)

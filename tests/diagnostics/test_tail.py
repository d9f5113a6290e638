"""The tail: the loss by what a site returns, against models put together by hand."""

import pytest
import torch
from torch import nn

import segue
from segue.diagnostics.tail import tails
from segue.errors import HandoverError
from segue.gates import Bernoulli
from tests.diagnostics import reference
from tests.diagnostics.test_curvature import quartic, whole_hessian
from tests.helpers import models


@pytest.mark.parametrize("make", [reference.vit, reference.bert, lambda **s: reference.narrow(quartic, **s)])
def test_it_is_the_loss_of_a_model_in_which_the_site_returns_y(make):
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
        pytest.raises(HandoverError, match="calls that site 0 times"),
    ):
        tail("unused", torch.ones(1, 2), lambda model, batch: model(batch).sum())

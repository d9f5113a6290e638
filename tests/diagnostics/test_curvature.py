"""Proposition 3: the bias of mixing at random, against whole Hessians and models put together by hand."""

import copy
import math

import pytest
import torch
from torch.autograd.functional import hessian
from torch.nn.attention import SDPBackend, sdpa_kernel

from segue.diagnostics import curvature_bias
from segue.diagnostics.curvature import largest_curvature
from segue.errors import DataError, HandoverError, PlanError, SiteError
from segue.gates import Bernoulli, Blend, GumbelSoftmax
from tests.diagnostics import reference
from tests.diagnostics.reference import ThreeWeights
from tests.helpers import models


def measured(of, alpha=0.5, **settings):
    return curvature_bias(of.handover, of.batches, of.loss, alpha, **settings)


def quartic(y, target):
    """A loss whose curvature changes along the way, with eigenvalues of both signs."""
    return ((y - target) ** 4).mean() - 2 * (y[:, 0] * y[:, 1]).sum() + y.prod()


def concave(y, target):
    """A loss whose largest curvature is negative."""
    return -3 * y[0, 0] ** 2 + (y**2).sum() / 2 + (y * target).sum()


def whole_hessian(psi, y):
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        return hessian(psi, y).reshape(y.numel(), y.numel())


def by_hand(of, site, weights, index, p, points):
    """Return bias, M, the curvature along the segment, and its length, from whole Hessians."""
    psi, teacher, student = of.tail(site, weights, index)
    across = student - teacher
    bias = abs(p * psi(student) + (1 - p) * psi(teacher) - psi(teacher + p * across)).item()
    largest = along = 0.0
    for point in range(points):
        matrix = whole_hessian(psi, teacher + point / (points - 1) * across)
        largest = max(largest, torch.linalg.eigvalsh(matrix).abs().max().item())
        d = across.reshape(-1)
        along = max(along, (d @ matrix @ d).abs().item() / (d @ d).item())
    return bias, largest, along, across.norm().item()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("loss", [quartic, concave])
def test_bias_and_curvature_are_those_of_whole_hessians_at_the_same_points(loss, p):
    of = reference.narrow(loss, batches=1, gate=Bernoulli())
    found = measured(of, 1 - p, points=5).sites["site"]
    bias, largest, along, distance = by_hand(of, "site", {"site": p}, 0, p, 5)
    assert found.bias == pytest.approx(bias, rel=1e-9)
    assert found.curvature == pytest.approx(largest, rel=1e-6)
    assert found.along == pytest.approx(along, rel=1e-9)
    assert found.distance == pytest.approx(distance, rel=1e-12)
    assert found.bound == pytest.approx(largest / 2 * p * (1 - p) * distance**2, rel=1e-6)
    assert found.along_bound == pytest.approx(along / 2 * p * (1 - p) * distance**2, rel=1e-9)
    assert found.ratio == pytest.approx(bias / found.bound, rel=1e-6)
    assert found.curvature_error <= 1e-6 * largest


def test_on_a_vision_transformer_with_every_site_at_its_mean():
    of = reference.vit(width=4, batches=2, gate=Bernoulli())
    p = 0.3
    found = measured(of, 1 - p, points=3)
    for site in of.sites:
        each = [by_hand(of, site, dict.fromkeys(of.sites, p), index, p, 3) for index in range(2)]
        one = found.sites[site]
        bounds = [largest / 2 * p * (1 - p) * distance**2 for _, largest, _, distance in each]
        assert one.bias == pytest.approx(sum(bias for bias, *_ in each) / 2, rel=1e-9)
        assert one.bound == pytest.approx(sum(bounds) / 2, rel=1e-5)
        assert one.curvature == pytest.approx(max(largest for _, largest, _, _ in each), rel=1e-5)
        assert one.along == pytest.approx(max(along for _, _, along, _ in each), rel=1e-9)
        assert one.distance == pytest.approx(sum(distance for *_, distance in each) / 2, rel=1e-12)
        ratios = [bias / bound for (bias, *_), bound in zip(each, bounds, strict=True)]
        assert one.ratio == pytest.approx(max(ratios), rel=1e-5)
        assert abs(ratios[0] / ratios[1] - 1) > 0.01


@pytest.mark.parametrize("make", [reference.vit, reference.bert])
def test_on_real_models_the_bias_keeps_below_both_bounds(make):
    of = make(gate=Bernoulli())
    for one in measured(of, 0.4, points=5, iterations=8).sites.values():
        assert 0 < one.bias <= one.along_bound <= one.bound
        assert 0 < one.along <= one.curvature
        assert one.ratio <= 1


def test_a_quadratic_loss_has_the_bias_of_its_bound_along_the_segment():
    of = reference.narrow(lambda y, target: ((y - target) ** 2 * torch.arange(1.0, 5.0)).sum(), gate=Bernoulli())
    for p in (0.1, 0.5):
        one = measured(of, 1 - p, points=3).sites["site"]
        assert one.bias == pytest.approx(one.along_bound, rel=1e-9)
        assert one.curvature == pytest.approx(2 * 4, rel=1e-6)
        assert one.bias < one.bound
    same = reference.narrow(lambda y, target: ((y - target) ** 2).sum(), gate=Bernoulli())
    one = measured(same, 0.3, points=2).sites["site"]
    assert one.bias == pytest.approx(one.bound, rel=1e-9)  # where all curvatures are one, nothing is lost
    assert one.ratio == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize(("gate", "p"), [(ThreeWeights(), 0.4), (GumbelSoftmax(), 0.3)])
def test_a_soft_gate_has_the_bias_of_its_own_variance(gate, p):
    of = reference.narrow(lambda y, target: ((y - target) ** 2).sum(), batches=1, gate=gate)
    one = measured(of, 1 - p, points=2).sites["site"]
    outcomes = gate.outcomes(1 - p) if hasattr(gate, "outcomes") else gate.nodes(1 - p)
    mean = math.fsum(w * c for w, c in outcomes)
    r_variance = math.fsum(c * (w - mean) ** 2 for w, c in outcomes)
    assert one.bias == pytest.approx(r_variance * one.distance**2, rel=1e-9)
    assert one.bound == pytest.approx(r_variance * one.distance**2, rel=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 1.0])
def test_a_blend_has_no_bias(alpha):
    of = reference.vit(width=4, batches=1, gate=Blend())
    for one in measured(of, alpha, points=2, iterations=2).sites.values():
        assert one.bias == one.bound == one.along_bound == one.ratio == 0.0
        assert one.curvature > 0


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_coin_that_can_fall_on_one_side_only_has_no_bias(alpha):
    of = reference.vit(width=4, batches=1, gate=Bernoulli())
    for one in measured(of, alpha, points=2, iterations=2).sites.values():
        assert one.bias == one.bound == one.ratio == 0.0


def test_a_linear_loss_has_no_curvature():
    of = reference.narrow(lambda y, target: (y * target).sum(), gate=Bernoulli())
    one = measured(of, points=3).sites["site"]
    assert one.curvature == one.curvature_error == one.along == one.bound == one.ratio == 0.0
    assert one.bias < 1e-12
    assert one.distance > 0


def test_a_student_that_is_its_teacher_has_no_bias():
    of = reference.narrow(quartic, gate=Bernoulli(), student=lambda teacher, site: copy.deepcopy(teacher))
    one = measured(of, points=2).sites["site"]
    assert one.bias == one.distance == one.along == one.bound == 0.0
    assert one.curvature > 0


def test_without_alpha_the_shares_are_those_of_the_running_handover():
    of = reference.vit(width=4, batches=1, gate=Bernoulli(), alpha=0.2)
    assert measured(of, None, points=2, iterations=3) == measured(of, 0.2, points=2, iterations=3)
    assert measured(of, None, points=2, iterations=3) != measured(of, 0.4, points=2, iterations=3)


def test_patterns_choose_sites():
    of = reference.vit(width=4, batches=1, gate=Bernoulli())
    found = measured(of, points=2, iterations=3, sites="blocks.1.*")
    assert list(found.sites) == ["blocks.1.attn"]
    assert found.sites["blocks.1.attn"] == measured(of, points=2, iterations=3).sites["blocks.1.attn"]
    assert (found.points, found.iterations, found.batches) == (2, 3, 1)


def test_a_site_that_is_called_more_than_once_is_refused():
    original = models.build(models.SharedLayers).double()
    batch = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double(), torch.arange(4))
    of = reference.begin(original, [batch], sites="layers.*", gate=Bernoulli())
    with pytest.raises(HandoverError, match=r"site 'layers.0' must be called once per forward, got 3 calls"):
        measured(of)


def test_what_cannot_be_measured_is_refused():
    of = reference.vit(depth=1, width=4, batches=1, gate=Bernoulli())
    for settings in ({"points": 0}, {"iterations": 0}):
        with pytest.raises(PlanError, match=r"curvature_bias\(\w+=...\) must be a positive integer, got 0"):
            measured(of, **settings)
    with pytest.raises(SiteError, match="'attn' matches none"):
        measured(of, sites="attn")
    with pytest.raises(PlanError, match=r"alpha=...\) must be a number from 0 to 1"):
        measured(of, 2.0)
    of.batches = []
    with pytest.raises(DataError, match="`batches` is empty"):
        measured(of)


def spectrum(values, seed=0):
    """Make a symmetric matrix with these eigenvalues."""
    values = torch.as_tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))
    return q @ torch.diag(values) @ q.T


def random_matrix(size, seed):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return (matrix + matrix.T) / 2


MATRICES = {
    **{f"random, size {size}, seed {seed}": random_matrix(size, seed) for size in (1, 2, 5, 50) for seed in range(3)},
    "repeated eigenvalues": spectrum([3.0] * 5 + [-1.0] * 5),
    "both signs alike": spectrum([4.0, -4.0, 1.0, 0.0]),
    "a negative one is largest": spectrum([1.0, 2.0, -9.0, 3.0, 0.5, 0.1]),
    "one value": spectrum([2.5] * 6),
    "rank one": spectrum([0.0] * 11 + [7.0]),
    "tiny": 1e-9 * spectrum([1.0, -2.0, 3.0]),
    "nothing": torch.zeros(7, 7, dtype=torch.float64),
}


@pytest.mark.parametrize("name", MATRICES)
def test_lanczos_finds_the_largest_absolute_eigenvalue(name):
    matrix = MATRICES[name]
    values = torch.linalg.eigvalsh(matrix)
    found = largest_curvature(lambda v: matrix @ v, matrix[0], iterations=60)
    assert found.value == pytest.approx(values.abs().max().item(), rel=1e-5, abs=1e-14)
    assert (values.abs() - found.value).abs().min() <= found.error + 1e-8


@pytest.mark.parametrize("iterations", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_the_error_of_lanczos_is_honest_when_it_is_stopped_early(iterations, seed):
    matrix = random_matrix(50, seed)
    values = torch.linalg.eigvalsh(matrix)
    found = largest_curvature(lambda v: matrix @ v, matrix[0], iterations=iterations, seed=seed)
    assert min((values - sign * found.value).abs().min() for sign in (1, -1)) <= found.error + 1e-8
    assert found.value <= values.abs().max() + 1e-8
    assert found.error > 1e-3  # and it does not claim to be done


def test_lanczos_takes_no_more_products_than_it_was_given_and_stops_when_it_knows():
    calls = []
    matrix = random_matrix(50, 0)
    largest_curvature(lambda v: calls.append(1) or matrix @ v, matrix[0], iterations=7)
    assert len(calls) == 7
    calls.clear()
    largest_curvature(lambda v: calls.append(1) or 2 * v, matrix[0], iterations=7)
    assert len(calls) == 1


def test_lanczos_keeps_the_shape_and_type_of_what_it_multiplies():
    seen = []
    largest_curvature(lambda v: seen.append((v.shape, v.dtype)) or 3 * v, torch.zeros(2, 3, 4), iterations=2)
    assert seen == [((2, 3, 4), torch.float32)]


def test_it_prints_a_table_with_a_line_for_each_site():
    found = measured(reference.vit(width=4, batches=1, gate=Bernoulli()), points=2, iterations=3)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in str(found).splitlines()]
    assert found._repr_markdown_() == str(found)  # a notebook shows the table
    assert rows[0] == ["site", "bias", "bound", "ratio", "curvature M", "its error", "distance"]
    for row, (name, site) in zip(rows[2:], found.sites.items(), strict=True):
        assert row[0] == name
        numbers = (site.bias, site.bound, site.ratio, site.curvature, site.curvature_error, site.distance)
        assert [float(cell) for cell in row[1:]] == pytest.approx(numbers, rel=5e-3)

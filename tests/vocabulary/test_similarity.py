import re

import pytest
import torch
from torch import nn

from segue import similarity
from segue.errors import PlanError

torch.manual_seed(0)
T = torch.randn(4, 6, 5, dtype=torch.float64)
S = torch.randn(4, 6, 5, dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]])


def test_cosine_is_the_mean_over_tokens():
    expected = sum((T[b, n] @ S[b, n] / (T[b, n].norm() * S[b, n].norm())).item() for b in range(4) for n in range(6)) / 24
    assert similarity.cosine(T, S).item() == pytest.approx(expected)


def test_squared_error_is_equation_3_for_one_site():
    expected = [sum(((S[b, n] - T[b, n]) ** 2).sum().item() for n in range(6)) / 6 for b in range(4)]
    assert similarity.squared_error(T, S).tolist() == pytest.approx(expected)


def test_relative_error_divides_each_sample_by_its_own_teacher():
    expected = [((S[b] - T[b]).square().sum() / T[b].square().sum()).item() for b in range(4)]
    assert similarity.relative_error(T, S).tolist() == pytest.approx(expected)
    assert similarity.relative_error(T * 1000, S * 1000).tolist() == pytest.approx(expected)


def test_linear_cka_equals_the_kernel_definition():
    x, y = T.flatten(0, 1), S.flatten(0, 1)
    centre = torch.eye(24, dtype=torch.float64) - 1 / 24
    k, m = centre @ x @ x.T @ centre, centre @ y @ y.T @ centre
    hsic = (k * m).sum() / ((k * k).sum() * (m * m).sum()).sqrt()
    assert similarity.linear_cka(T, S).item() == pytest.approx(hsic.item())


def test_linear_cka_does_not_see_rotation_and_scale():
    rotation = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    assert similarity.linear_cka(T, 3 * T @ rotation).item() == pytest.approx(1.0)


def test_gram_error_is_the_relative_distance_of_second_moments():
    x, y = T.flatten(0, 1), S.flatten(0, 1)
    a, b = x.T @ x, y.T @ y
    expected = (torch.linalg.matrix_norm(b - a) / torch.linalg.matrix_norm(a)).square().item()
    assert similarity.gram_error(T, S).item() == pytest.approx(expected)


def test_equal_outputs_are_equal_by_every_measure():
    same = similarity.measure(T, T.clone())
    assert same == pytest.approx((1.0, 1.0, 0.0, 0.0))


@pytest.mark.parametrize(
    "measure",
    [
        similarity.cosine,
        similarity.linear_cka,
        similarity.gram_error,
        lambda t, s, m: similarity.relative_error(t, s, m).sum(),
        lambda t, s, m: similarity.squared_error(t, s, m).sum(),
    ],
)
def test_padding_changes_nothing(measure):
    t, s = T.clone(), S.clone()
    before = measure(t, s, MASK)
    t[MASK == 0], s[MASK == 0] = float("nan"), float("inf")
    assert measure(t, s, MASK).item() == before.item()
    assert measure(t, s, MASK.bool()).item() == before.item()
    assert measure(T, S, MASK).item() != measure(T, S, None).item()


def test_a_mask_gives_what_the_short_sequences_give():
    whole = similarity.relative_error(T, S, MASK)
    short = similarity.relative_error(T[1:2, :3], S[1:2, :3])
    assert whole[1].item() == pytest.approx(short.item())


def test_shapes_are_read_as_stated():
    image = torch.randn(2, 3, 4, 4)
    assert similarity.as_tokens(image).shape == (2, 16, 3)
    assert torch.equal(similarity.as_tokens(image)[1, 5], image[1, :, 1, 1])
    assert similarity.as_tokens(torch.randn(2, 7)).shape == (2, 1, 7)
    assert similarity.as_tokens(torch.randn(7)).shape == (1, 1, 7)
    assert similarity.as_tokens(torch.randn(2, 3, 4, 5, 6)).shape == (2, 60, 6)
    assert similarity.as_tokens(torch.randn(2, 7).bfloat16()).dtype == torch.float32


def test_a_wrong_mask_is_refused():
    with pytest.raises(PlanError, match=r"\(batch, tokens\) = \(4, 6\)"):
        similarity.cosine(T, S, torch.ones(4, 5))


Z, W = torch.complex(T, S), torch.complex(S.flip(0), T.flip(1))


def test_complex_vectors_are_compared_by_the_real_part_of_the_hermitian_product():
    expected = sum(
        (torch.vdot(Z[b, n], W[b, n]).real / (Z[b, n].norm() * W[b, n].norm())).item() for b in range(4) for n in range(6)
    )
    assert similarity.cosine(Z, W).item() == pytest.approx(expected / 24)
    assert similarity.cosine(Z, Z * 3).item() == pytest.approx(1.0)
    assert similarity.cosine(Z, Z * 1j).item() == pytest.approx(0.0, abs=1e-15)
    assert similarity.squared_error(Z, W).tolist() == pytest.approx((W - Z).abs().square().sum(-1).mean(1).tolist())
    energy = Z.abs().square().sum((1, 2))
    assert similarity.relative_error(Z, W).tolist() == pytest.approx(((W - Z).abs().square().sum((1, 2)) / energy).tolist())


def test_complex_second_moments_are_hermitian():
    x, y = Z.flatten(0, 1), W.flatten(0, 1)
    a, b = x.conj().T @ x, y.conj().T @ y
    expected = (torch.linalg.matrix_norm(b - a) / torch.linalg.matrix_norm(a)).square().item()
    assert similarity.gram_error(Z, W).item() == pytest.approx(expected)
    unitary = torch.linalg.qr(torch.complex(torch.randn(5, 5).double(), torch.randn(5, 5).double())).Q
    assert similarity.linear_cka(Z, 3 * Z @ unitary).item() == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_output_differs_from_its_conjugate(dtype):
    z = Z.to(dtype)
    found = similarity.measure(z, z.conj())
    cosine = ((z.real.square() - z.imag.square()).sum(-1) / z.abs().square().sum(-1)).mean()
    assert found.cosine == pytest.approx(cosine.item(), abs=1e-6)
    assert found.cka < 0.9
    assert found.gram_distance > 0.1
    assert found.relative_error == pytest.approx(
        (4 * z.imag.square()).sum((1, 2)).div(z.abs().square().sum((1, 2))).mean().sqrt()
    )
    assert similarity.measure(z, z.clone()) == pytest.approx((1.0, 1.0, 0.0, 0.0), abs=1e-3)


def test_a_complex_output_without_imaginary_part_is_the_real_one():
    assert similarity.measure(T.to(Z.dtype), S.to(Z.dtype)) == pytest.approx(similarity.measure(T, S))


LAYERS = {
    "linear": (nn.Linear(3, 8), (2, 7, 7, 8), -1),
    "norm": (nn.LayerNorm(8), (2, 7, 7, 8), -1),
    "norm, all sizes equal": (nn.LayerNorm(8), (2, 8, 8, 8), -1),
    "convolution": (nn.Conv2d(3, 8, 1), (2, 8, 7, 7), 1),
    "convolution, all sizes equal": (nn.Conv2d(3, 8, 1), (2, 8, 8, 8), 1),
    "batch norm, all sizes equal": (nn.BatchNorm2d(8), (2, 8, 8, 8), 1),
    "convolution, then linear and back": (nn.Sequential(nn.Conv2d(8, 8, 1), nn.Linear(8, 8)), (2, 8, 7, 5), 1),
    "convolution, then features last": (nn.Sequential(nn.Conv2d(3, 8, 1), nn.LayerNorm(8)), (2, 7, 7, 8), -1),
    "convolution over a sequence": (nn.Conv1d(3, 8, 1), (2, 8, 50), 1),
    "convolution over a volume": (nn.Conv3d(3, 8, 1), (2, 8, 4, 5, 6), 1),
    "tokens": (nn.Linear(3, 8), (2, 50, 8), -1),
    "as many tokens as features": (nn.Linear(3, 8), (2, 8, 8), -1),
    "positions": (nn.Embedding(50, 8), (2, 50, 8), -1),
    "tokens mixed by a linear layer": (nn.Linear(8, 8), (2, 8, 50), -1),
    "no layer, four dimensions": (nn.ReLU(), (2, 7, 7, 8), 1),
    "no layer, three dimensions": (nn.ReLU(), (2, 7, 8), -1),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_the_layers_tell_where_the_features_are(layer):
    module, shape, axis = LAYERS[layer]
    assert similarity.feature_axis([module], torch.zeros(shape)) == axis


def test_a_module_without_parameters_asks_those_around_it():
    around = nn.Sequential(nn.Linear(3, 8), nn.GELU())
    assert similarity.feature_axis([around[1], around], torch.zeros(2, 7, 7, 8)) == -1


def test_moved_features_are_compared_as_features():
    t, s = torch.randn(2, 2, 7, 7, 8).unbind()
    expected = torch.nn.functional.cosine_similarity(t, s, dim=-1).mean()
    moved = [similarity.move_features(x, -1) for x in (t, s)]
    torch.testing.assert_close(similarity.cosine(*moved), expected)
    assert similarity.move_features(t[:, 0], 1).shape == (2, 8, 7)
    assert similarity.move_features(t[:, 0, 0], -1).shape == (2, 8)
    for axis in (0, 4, -4, 7):
        with pytest.raises(PlanError, match=f"axis {axis} cannot hold the features"):
            similarity.move_features(t, axis)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_floor_changes_no_ordinary_value(dtype):
    for exponent in range(-4, 5):
        t, s = (T * 10.0**exponent).to(dtype), (S * 10.0**exponent).to(dtype)
        x, y = similarity.as_tokens(t), similarity.as_tokens(s)
        plain = (y - x).square().sum(-1).mean(1) / x.square().sum(-1).mean(1)
        assert torch.equal(similarity.relative_error(t, s), plain)
        a, b = x.flatten(0, 1).T @ x.flatten(0, 1), y.flatten(0, 1).T @ y.flatten(0, 1)
        assert torch.equal(similarity.gram_error(t, s), (b - a).square().sum() / a.square().sum())


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_a_teacher_of_zeros_gives_finite_errors_and_gradients(dtype, size):
    t, s = (T * size).to(dtype), S.to(dtype, copy=True).requires_grad_()
    relative = similarity.relative_error(t, s)
    assert relative.tolist() == pytest.approx((S.square().sum((1, 2)) / 30 / similarity.FLOOR**2).tolist(), rel=0.02)
    total = relative.sum() + similarity.gram_error(t, s) + similarity.linear_cka(t, s) + similarity.cosine(t, s)
    total.backward()
    assert s.grad.isfinite().all()
    assert similarity.relative_error(t, t.clone()).tolist() == [0.0] * 4


@pytest.mark.parametrize("shape", [(0, 6, 5), (4, 0, 5), (0, 5), (0, 3, 4, 4)])
def test_outputs_without_samples_are_refused(shape):
    assert similarity.samples(torch.zeros(shape)) == 0
    for measure in (similarity.cosine, similarity.relative_error, similarity.gram_error, similarity.linear_cka):
        with pytest.raises(PlanError, match="outputs without samples cannot be compared"):
            measure(torch.zeros(shape), torch.zeros(shape))


@pytest.mark.parametrize("value", [torch.zeros(0), torch.ones(3), torch.tensor(1.0)])
def test_an_average_needs_tokens(value):
    with pytest.raises(PlanError, match=rf"one number per token.\n  It has shape {re.escape(str(tuple(value.shape)))}"):
        similarity.average(value, None)

import pytest
import torch

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

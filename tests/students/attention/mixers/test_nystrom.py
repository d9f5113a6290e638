"""Nystrom: its settings, its formula, its inverse, and how near it comes to softmax."""

import math

import pytest
import torch
from torch import Tensor

from segue.errors import PlanError
from segue.students import AttentionSpec, Nystrom, Softmax
from segue.students.attention.mixers.nystrom import pseudo_inverse
from tests.students.attention.mixers.checks import assert_softmax, attention_spec, inputs
from tests.students.attention.mixers.formulas import logits, prepared, softmax_weights, zero

SETTINGS = {"nystrom": Nystrom(landmarks=6, iterations=4)}
SLACK = 10  # the iteration lets errors grow where the landmarks are nearly alike


def naive(operator, spec, mixer, q, k, v, token_mask, causal):
    """Rebuild softmax attention from landmarks: means over the tokens of each segment, empty segments left out."""
    k, v, token_mask, seen = prepared(q, k, v, token_mask, causal)
    if q.shape[2] <= operator.landmarks:
        return softmax_weights(logits(spec, q, k), seen) @ v
    return torch.stack([naive_row(operator, spec, q[b], k[b], v[b], token_mask[b]) for b in range(q.shape[0])])


def naive_row(operator: Nystrom, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor) -> Tensor:
    tokens, real = q.shape[1], token_mask.nonzero().flatten().tolist()
    if not real:
        return torch.zeros_like(q)
    segments = [[t for t in real if t * operator.landmarks // tokens == i] for i in range(operator.landmarks)]
    segments = [members for members in segments if members]
    marks_q, marks_k = (torch.stack([x[:, members].mean(1) for members in segments], dim=1) for x in (q, k))
    everything = torch.ones(1, 1, 1, dtype=torch.bool)

    def attention(a: Tensor, b: Tensor) -> Tensor:
        return softmax_weights(logits(spec, a[None], b[None]), everything)[0]

    to_marks = attention(q, marks_k)  # (heads, tokens, landmarks)
    inverse = torch.stack([iterated_inverse(a, operator.iterations) for a in attention(marks_q, marks_k)])
    from_marks = attention(marks_q, k[:, real])
    result = to_marks @ inverse @ from_marks @ v[:, real]
    return result.where(token_mask[:, None], zero())


def iterated_inverse(a: Tensor, iterations: int) -> Tensor:
    """Run Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4 from A^T / (|A|_1 |A|_inf), as Nystromformer does."""
    one = torch.eye(a.shape[0], dtype=a.dtype)
    z = a.T / (torch.linalg.matrix_norm(a, 1) * torch.linalg.matrix_norm(a, math.inf))
    for _ in range(iterations):
        z = z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z))) / 4
    return z


@pytest.mark.parametrize("tokens", [1, 31, 32])
def test_with_a_landmark_for_every_token_it_is_softmax(tokens):
    assert_softmax(Nystrom(landmarks=32), tokens, False)


def test_it_approaches_softmax_as_landmarks_grow():
    spec = attention_spec(heads=2, key_heads=2)
    q, k, v, _ = inputs(1, spec, 256)
    steps = torch.arange(256)[:, None] / 40
    q, k = (0.1 * x + 3 * torch.cat([steps.sin(), steps.cos(), steps.new_zeros(256, 5)], -1) for x in (q, k))  # smooth in time
    q, k, v = q.double(), k.double(), v.double()
    right = Softmax().mixer(spec)(q, k, v)
    few, more, many = ((Nystrom(landmarks=n).mixer(spec)(q, k, v) - right).norm() / right.norm() for n in (2, 8, 16))
    assert few > 4 * more > 12 * many
    assert many < 0.01


def test_the_iteration_approaches_the_pseudo_inverse():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 2, 8, 8, generator=generator, dtype=torch.float64).softmax(-1)
    a = 0.5 * weights + 0.5 * torch.eye(8, dtype=torch.float64)
    right = torch.linalg.pinv(a)
    far, near = ((pseudo_inverse(a, n) - right).abs().max().item() for n in (2, 8))
    assert far > 1e-2
    assert near < 1e-12
    flat = a[..., :7, :7].new_zeros(3, 2, 8, 8)
    flat[..., :7, :7] = a[..., :7, :7]  # a landmark without tokens
    torch.testing.assert_close(pseudo_inverse(flat, 10), torch.linalg.pinv(flat))
    for one, inverse in zip(a.flatten(0, 1), pseudo_inverse(a, 3).flatten(0, 1), strict=True):
        torch.testing.assert_close(iterated_inverse(one, 3), inverse)


@pytest.mark.parametrize(
    ("settings", "says"), [({"landmarks": True}, "landmarks=.* got True"), ({"iterations": 0}, "iterations=.* got 0")]
)
def test_a_count_must_be_positive(settings, says):
    with pytest.raises(PlanError, match=says):
        Nystrom(**settings)

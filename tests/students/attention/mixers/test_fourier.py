"""Fourier: its settings, its formula, and what an orthonormal transform promises."""

import math

import pytest
import torch
from torch import Tensor
from transformers.models.fnet.modeling_fnet import FNetBasicFourierTransform, FNetConfig

from segue.errors import PlanError
from segue.sites import Site
from segue.students import Fourier
from tests.students.attention.mixers.checks import attention_spec, inputs
from tests.students.attention.mixers.formulas import prepared

SETTINGS = {"fourier": Fourier(), "fourier, width": Fourier(across="width")}


def naive(operator, spec, mixer, q, k, v, token_mask, causal):
    """Return the real part of D_tokens v D_size, with D the unitary matrices of the discrete Fourier transform."""
    v = prepared(q, k, v, token_mask, causal)[1].to(torch.complex128)
    tokens, heads, size = dft_matrix(v.shape[2]), v.shape[1], v.shape[3]
    if operator.across == "head":
        return torch.einsum("ut,bhtd,de->bhue", tokens, v, dft_matrix(size)).real
    features = dft_matrix(heads * size).unflatten(0, (heads, size)).unflatten(2, (heads, size))
    return torch.einsum("ut,bhtd,hdge->bgue", tokens, v, features).real


def dft_matrix(n: int) -> Tensor:
    place = torch.arange(n, dtype=torch.float64)
    turns = torch.outer(place, place).remainder(n) / n
    return torch.polar(torch.full_like(turns, n**-0.5), -2 * math.pi * turns)


def test_it_is_orthonormal():
    spec = attention_spec(heads=2, key_heads=2)
    mixer, (q, k, v, _) = Fourier().mixer(spec), inputs(2, spec, 30)
    v = v.double()
    real, imaginary = mixer(q, k, v), torch.fft.fft2(v, norm="ortho").imag
    assert (real.square().sum() + imaginary.square().sum()).item() == pytest.approx(v.square().sum().item())
    mirrored = v.flip(2, 3).roll((1, 1), (2, 3))
    torch.testing.assert_close(mixer(q, k, real), (v + mirrored) / 2)  # the transform of a transform is the mirror image


def without_projections(**settings) -> torch.nn.Module:
    """Build a student of a torch module of width 8 whose projections change nothing."""
    student = Fourier(**settings)(torch.nn.MultiheadAttention(8, 2, batch_first=True), Site("attn"))
    for linear in (student.value, student.output):
        torch.nn.init.eye_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
    return student


def test_across_the_width_it_is_fnets_own():
    x = torch.randn(3, 6, 8)
    student = without_projections(across="width")
    expected = FNetBasicFourierTransform(FNetConfig(hidden_size=8))(x)[0]  # not orthonormal
    torch.testing.assert_close(expected, torch.fft.fft2(x).real)
    found, _ = student(x, x, x, need_weights=False)
    torch.testing.assert_close(found * math.sqrt(6 * 8), expected)
    per_head, _ = without_projections()(x, x, x, need_weights=False)
    assert not torch.allclose(per_head, found, atol=0.1)


def test_padding_counts_as_zeros_across_the_width():
    x, padded = torch.randn(2, 5, 8), torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    student = without_projections(across="width")
    found, _ = student(x, x, x, key_padding_mask=padded, need_weights=False)
    expected = torch.fft.fft2(x.masked_fill(padded[..., None], 0.0), norm="ortho").real
    torch.testing.assert_close(found, expected)


def test_another_word_for_across_is_refused():
    with pytest.raises(PlanError, match=r"Fourier\(across=...\) must be 'head' or 'width', got 'heads'.\n.*\n.*write 'head'."):
        Fourier(across="heads")


def test_it_needs_neither_queries_nor_keys():
    spec = attention_spec()
    mixer, (q, k, v, _) = Fourier().mixer(spec), inputs(1, spec, 5)
    assert mixer.uses == ("value",)
    assert torch.equal(mixer(q, k, v), mixer(torch.zeros_like(q), torch.zeros_like(k), v))

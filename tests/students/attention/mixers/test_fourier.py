"""Fourier: its settings, its formula, and what an orthonormal transform promises."""

import math

import pytest
import torch
from torch import Tensor

from segue.students import Fourier
from tests.students.attention.mixers.checks import attention_spec, inputs
from tests.students.attention.mixers.formulas import prepared

SETTINGS = {"fourier": Fourier()}


def naive(operator, spec, mixer, q, k, v, token_mask, causal):
    """Return the real part of D_tokens v D_size, with D the unitary matrices of the discrete Fourier transform."""
    v = prepared(q, k, v, token_mask, causal)[1]
    over_tokens, over_size = (dft_matrix(n) for n in v.shape[2:])
    return torch.einsum("ut,bhtd,de->bhue", over_tokens, v.to(torch.complex128), over_size).real


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


def test_it_needs_neither_queries_nor_keys():
    spec = attention_spec()
    mixer, (q, k, v, _) = Fourier().mixer(spec), inputs(1, spec, 5)
    assert mixer.uses == ("value",)
    assert torch.equal(mixer(q, k, v), mixer(torch.zeros_like(q), torch.zeros_like(k), v))

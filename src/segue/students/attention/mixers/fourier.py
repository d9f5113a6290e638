"""Fourier mixing: a two-dimensional Fourier transform of the values, without queries and keys (FNet)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from segue.students.attention.mixer import Mixer, repeat_heads
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec

__all__ = ["Fourier"]


class FourierMixer(Mixer):
    """The real part of the orthonormal Fourier transform of the values over tokens and head size.

    Padding counts as zeros: its content changes nothing, its length does.
    """

    uses = ("value",)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool) -> Tensor:
        spectrum: Tensor = torch.fft.fft2(repeat_heads(v, q.shape[1]), norm="ortho")
        return spectrum.real


@dataclass(frozen=True, kw_only=True)
class Fourier(Operator):
    """FNet's mixing between the value and the output projection; no queries and keys, no weights of its own."""

    cost = "n d log(n d)"
    paper = "https://arxiv.org/abs/2105.03824"
    mixer_class = FourierMixer

    def mixer(self, spec: AttentionSpec) -> Mixer:
        return FourierMixer()

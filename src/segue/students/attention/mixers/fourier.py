"""Fourier mixing: values meet in a two-dimensional Fourier transform, without queries and keys (FNet)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from segue.students.attention.mixer import Mixer, every_head
from segue.students.attention.module import Operator
from segue.students.attention.spec import Geometry


class FourierMixer(Mixer):
    """The real part of the orthonormal Fourier transform of the values over tokens and head size.

    Padding counts as zeros: what it holds changes nothing, but how much of it there is does.
    """

    uses = ("value",)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool) -> Tensor:
        spectrum: Tensor = torch.fft.fft2(every_head(v, q.shape[1]), norm="ortho")
        return spectrum.real


@dataclass(frozen=True, kw_only=True)
class Fourier(Operator):
    """FNet's mixing between the value and the output projection; no queries and keys, no weights of its own."""

    def mixer(self, geometry: Geometry) -> Mixer:
        return FourierMixer()

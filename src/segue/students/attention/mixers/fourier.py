"""Fourier mixing: a two-dimensional Fourier transform of the values, without queries and keys (FNet)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from segue.border import checked
from segue.students.attention.mixer import Mixer, repeat_heads
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec

__all__ = ["Fourier"]


class FourierMixer(Mixer):
    """The real part of the orthonormal Fourier transform of the values over tokens and features: those of a head, or of all.

    Padding counts as zeros: its content changes nothing, its length does.
    """

    uses = ("value",)

    def __init__(self, across: Literal["head", "width"]) -> None:
        super().__init__()
        self.across = across

    def mix(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool) -> Tensor:
        v = repeat_heads(v, q.shape[1])
        if self.across == "head":
            return _transform(v)
        width = v.transpose(1, 2).flatten(2)  # (batch, tokens, heads * head size)
        return _transform(width).view(*width.shape[:2], v.shape[1], v.shape[3]).transpose(1, 2)


def _transform(x: Tensor) -> Tensor:
    spectrum: Tensor = torch.fft.fft2(x, norm="ortho")
    return spectrum.real


@checked
@dataclass(frozen=True, kw_only=True)
class Fourier(Operator):
    """Fourier mixing between the value and the output projection; no queries and keys, no weights of its own.

    across="head", the default: each head is transformed by itself, as other operators mix.
    across="width": one transform of all heads together, which is FNet's.
    """

    cost = "n d log(n d)"
    paper = "https://arxiv.org/abs/2105.03824"
    mixer_class = FourierMixer

    across: Literal["head", "width"] = "head"

    def mixer(self, spec: AttentionSpec) -> Mixer:
        return FourierMixer(self.across)

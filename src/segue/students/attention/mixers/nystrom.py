"""Nystrom attention: the softmax matrix rebuilt from the rows and columns of a few landmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from segue.students.attention.mixer import Mixer, every_head, softmax_where
from segue.students.attention.module import Operator, positive
from segue.students.attention.spec import Geometry


class NystromMixer(Mixer):
    """softmax(q k'^T) pinv(softmax(q' k'^T)) softmax(q' k^T) v, where q' and k' are means over segments of the sequence.

    A sequence of no more tokens than landmarks gets softmax attention itself.
    """

    def __init__(self, landmarks: int, iterations: int, scale: float) -> None:
        super().__init__()
        self.landmarks, self.iterations, self.scale = landmarks, iterations, scale

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool) -> Tensor:
        k, v = every_head(k, q.shape[1]), every_head(v, q.shape[1])
        tokens, q = q.shape[2], q * self.scale
        seen = None if keep is None else keep[:, None, None, :]  # (batch, 1, 1, tokens)
        if tokens <= self.landmarks:
            return softmax_where(q @ k.transpose(-1, -2), seen) @ v
        segment = torch.arange(tokens, device=q.device) * self.landmarks // tokens
        members = segment == torch.arange(self.landmarks, device=q.device)[:, None]  # (landmarks, tokens)
        if seen is not None:
            members = members & seen
        sizes = members.sum(-1, keepdim=True)
        means = members.to(q.dtype) / sizes.clamp_min(1)
        filled = (sizes > 0) if seen is not None else None  # (batch, 1, landmarks, 1)
        if seen is not None:
            q = q.masked_fill(~seen.transpose(-1, -2), 0.0)  # padding may hold anything
        q_marks, k_marks = means @ q, means @ k
        columns = None if filled is None else filled.transpose(-1, -2)
        to_marks = softmax_where(q @ k_marks.transpose(-1, -2), columns)
        between = softmax_where(q_marks @ k_marks.transpose(-1, -2), columns)
        if filled is not None:
            between = between.masked_fill(~filled, 0.0)
        from_marks = softmax_where(q_marks @ k.transpose(-1, -2), seen)
        return to_marks @ (pseudo_inverse(between, self.iterations) @ (from_marks @ v))


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """Approach the Moore-Penrose inverse by an iteration of the third order that needs only products."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    largest_row, largest_column = a.abs().sum(-1).amax(-1), a.abs().sum(-2).amax(-1)
    z = a.transpose(-1, -2) / (largest_row * largest_column).clamp_min(1e-30)[..., None, None]
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az)))
    return z


@dataclass(frozen=True, kw_only=True)
class Nystrom(Operator):
    """Softmax attention approximated through `landmarks` segment means; the inverse takes `iterations` steps."""

    landmarks: int = 64
    iterations: int = 6

    def mixer(self, geometry: Geometry) -> Mixer:
        landmarks, iterations = positive("landmarks", self.landmarks), positive("iterations", self.iterations)
        return NystromMixer(landmarks, iterations, geometry.logit_scale)

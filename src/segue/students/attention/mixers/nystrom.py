"""Nystrom attention: the softmax matrix reconstructed from the rows and columns of a few landmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from segue.border import PositiveInt, checked
from segue.students.attention.mixer import Mixer, masked_softmax, repeat_heads
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec

__all__ = ["Nystrom"]


class NystromMixer(Mixer):
    """softmax(q k'^T) pinv(softmax(q' k'^T)) softmax(q' k^T) v, where q' and k' are means over segments of the sequence.

    A sequence that is not longer than the number of landmarks gets softmax attention itself. For the keys of another sequence,
    q' is k': a mean over queries would show a decoder's tokens those that follow.
    """

    supports_cross = True

    def __init__(self, landmarks: int, iterations: int, scale: float) -> None:
        super().__init__()
        self.landmarks, self.iterations, self.scale = landmarks, iterations, scale

    def mix(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool) -> Tensor:
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        tokens, q = q.shape[2], q * self.scale
        visible = None if token_mask is None else token_mask[:, None, None, :]  # (batch, 1, 1, tokens)
        if tokens <= self.landmarks:
            return masked_softmax(q @ k.transpose(-1, -2), visible) @ v
        if visible is not None:
            q = q.masked_fill(~visible.transpose(-1, -2), 0.0)  # padding may hold anything
        means, filled = self._segments(k, visible)
        return self._through_landmarks(q, k, v, means @ q, means @ k, visible, filled)

    def mix_across(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, **bias: Tensor) -> Tensor:
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        visible = None if token_mask is None else token_mask[:, None, None, :]
        if k.shape[2] <= self.landmarks:
            return masked_softmax(self.scale * q @ k.transpose(-1, -2), visible) @ v
        means, filled = self._segments(k, visible)
        landmarks = means @ k
        return self._through_landmarks(self.scale * q, k, v, self.scale * landmarks, landmarks, visible, filled)

    def _segments(self, k: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return what takes the mean of each segment, and which segments are not padding alone, (batch, 1, landmarks, 1)."""
        tokens = k.shape[2]
        segment = torch.arange(tokens, device=k.device) * self.landmarks // tokens
        members = segment == torch.arange(self.landmarks, device=k.device)[:, None]  # (landmarks, tokens)
        if visible is not None:
            members = members & visible
        sizes = members.sum(-1, keepdim=True)
        return members.to(k.dtype) / sizes.clamp_min(1), (sizes > 0) if visible is not None else None

    def _through_landmarks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_landmarks: Tensor,
        k_landmarks: Tensor,
        visible: Tensor | None,
        filled: Tensor | None,
    ) -> Tensor:
        columns = None if filled is None else filled.transpose(-1, -2)
        to_landmarks = masked_softmax(q @ k_landmarks.transpose(-1, -2), columns)
        between = masked_softmax(q_landmarks @ k_landmarks.transpose(-1, -2), columns)
        if filled is not None:
            between = between.masked_fill(~filled, 0.0)
        from_landmarks = masked_softmax(q_landmarks @ k.transpose(-1, -2), visible)
        return to_landmarks @ (pseudo_inverse(between, self.iterations) @ (from_landmarks @ v))


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """Approximate the Moore-Penrose inverse by an iteration of third order that needs only products."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    largest_row, largest_column = a.abs().sum(-1).amax(-1), a.abs().sum(-2).amax(-1)
    z = a.transpose(-1, -2) / (largest_row * largest_column).clamp_min(1e-30)[..., None, None]
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az)))
    return z


@checked
@dataclass(frozen=True, kw_only=True)
class Nystrom(Operator):
    """Softmax attention approximated through `landmarks` segment means; the inverse takes `iterations` steps."""

    cost = "n landmarks d"
    paper = "https://arxiv.org/abs/2102.03902"
    mixer_class = NystromMixer

    landmarks: PositiveInt = 64
    iterations: PositiveInt = 6

    def mixer(self, spec: AttentionSpec) -> Mixer:
        landmarks, iterations = self.landmarks, self.iterations
        return NystromMixer(landmarks, iterations, spec.logit_scale)

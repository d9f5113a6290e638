"""How similar two outputs are: the one place with these formulas.

Outputs are read as (batch, tokens, features). Four dimensions are read as a convolution's (batch, channels, height, width),
two as one token per sample; in all other shapes the last dimension holds the features. Sums are taken in float32 at least.
A mask of shape (batch, tokens) is true, or 1, where a token counts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from segue.errors import PlanError


class Similarity(NamedTuple):
    """What `handover.similarity` measures at one site."""

    cosine: float
    cka: float
    gram_distance: float
    relative_error: float


def measure(teacher: Tensor, student: Tensor, mask: Tensor | None = None) -> Similarity:
    """Take all four measures at once."""
    return Similarity(
        cosine(teacher, student, mask).item(),
        linear_cka(teacher, student, mask).item(),
        gram_error(teacher, student, mask).sqrt().item(),
        relative_error(teacher, student, mask).mean().sqrt().item(),
    )


def cosine(teacher: Tensor, student: Tensor, mask: Tensor | None = None) -> Tensor:
    """Average the cosine of each token's two feature vectors."""
    t, s = as_tokens(teacher), as_tokens(student)
    alike: Tensor = torch.nn.functional.cosine_similarity(t, s, dim=-1)
    return average(alike, mask).mean()


def squared_error(teacher: Tensor, student: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return each sample's squared L2 distance per token, averaged over its tokens: (batch,)."""
    t, s = as_tokens(teacher), as_tokens(student)
    return average((s - t).square().sum(-1), mask)


def relative_error(teacher: Tensor, student: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return each sample's squared error divided by its own teacher's mean square: (batch,)."""
    energy = average(as_tokens(teacher).square().sum(-1), mask)
    return squared_error(teacher, student, mask) / energy.clamp_min(torch.finfo(energy.dtype).tiny)


def gram_error(teacher: Tensor, student: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compare the feature Gram matrices X'X: their squared distance over the teacher's squared norm."""
    t, s = _rows(teacher, mask), _rows(student, mask)
    gram_t, gram_s = t.T @ t, s.T @ s
    return (gram_s - gram_t).square().sum() / gram_t.square().sum().clamp_min(torch.finfo(t.dtype).tiny)


def linear_cka(teacher: Tensor, student: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return linear centred kernel alignment over all tokens of the batch, 1 for equal up to rotation and scale."""
    t, s = _rows(teacher, mask), _rows(student, mask)
    t, s = t - t.mean(0), s - s.mean(0)
    across = (t.T @ s).square().sum()
    norms: Tensor = torch.linalg.matrix_norm(t.T @ t) * torch.linalg.matrix_norm(s.T @ s)
    return across / norms.clamp_min(torch.finfo(t.dtype).tiny)


def as_tokens(output: Tensor) -> Tensor:
    """Read an output as (batch, tokens, features) in float32 at least."""
    x = output if output.dtype == torch.float64 else output.float()
    if x.dim() == 4:
        return x.flatten(2).transpose(1, 2)
    if x.dim() < 2:
        return x.reshape(1, 1, -1)
    return x.reshape(x.shape[0], -1, x.shape[-1])


def average(per_token: Tensor, mask: Tensor | None) -> Tensor:
    """Average each sample over the tokens that count: (batch, tokens) -> (batch,)."""
    if mask is None:
        return per_token.mean(1)
    counts = _checked(mask, per_token).to(per_token.dtype)
    # where, not *: a padded token may hold inf or NaN
    return torch.where(counts > 0, per_token, 0).sum(1) / counts.sum(1).clamp_min(1)


def _rows(output: Tensor, mask: Tensor | None) -> Tensor:
    x = as_tokens(output)
    if mask is None:
        return x.flatten(0, 1)
    return x[_checked(mask, x).bool()]


def _checked(mask: Tensor, tokens: Tensor) -> Tensor:
    if mask.shape != tokens.shape[:2]:
        raise PlanError(
            f"the mask has shape {tuple(mask.shape)}.",
            f"The outputs at this site have (batch, tokens) = {tuple(tokens.shape[:2])}.",
            "give one value per token, 1 where it counts and 0 where it is padding.",
        )
    return mask

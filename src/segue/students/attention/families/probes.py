"""What the proof calls a module with: masks, rotations and biases that change what it returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from segue.students.attention.spec import AttentionSpec


def some_masks(x: Tensor, causal: bool) -> Iterator[Tensor | None]:
    """Yield masks in the forms that modules take, which hide two tokens of padding, and the future where a module is causal."""
    batch, tokens = x.shape[:2]
    kept = torch.ones(batch, tokens, dtype=torch.bool, device=x.device)
    kept[-1, -2:] = False
    seen = kept[:, None, None, :].expand(batch, 1, tokens, tokens)
    seen = seen.tril() if causal else seen
    yield torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill_(~seen, torch.finfo(x.dtype).min)
    yield seen
    yield seen[:, 0]
    yield kept
    yield None


def some_bias(spec: AttentionSpec, x: Tensor, seed: int) -> Tensor:
    """Return something to add to the logits, different for every head and pair of tokens."""
    tokens = x.shape[1]
    pairs = torch.arange(1.0 * spec.heads * tokens * tokens, device=x.device).add(seed).square().cos()
    return pairs.view(1, spec.heads, tokens, tokens).to(x.dtype)


def some_angles(module: nn.Module, spec: AttentionSpec, x: Tensor, rotation: str) -> Any:
    """Return cos and sin, or complex numbers, of different angles at every token, for as many features as are rotated."""
    config = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None)
    part = getattr(config, "partial_rotary_factor", None) or (
        rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    )
    pairs = int(spec.head_size * (part or 1.0)) // 2
    angles = torch.linspace(0.0, 3.0, x.shape[1] * pairs, device=x.device).view(1, x.shape[1], -1)
    if rotation == "complex":
        return torch.polar(torch.ones_like(angles[0]), angles[0])
    if rotation == "complex by sequence":
        return torch.polar(torch.ones_like(angles), angles).expand(x.shape[0], -1, -1)
    angles = angles.repeat(1, 1, 1 if rotation == "own of half the angles" else 2)
    angles = angles[0] if rotation == "own of one sequence" else angles.expand(x.shape[0], -1, -1)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

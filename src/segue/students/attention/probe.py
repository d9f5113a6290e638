"""Misreading: refuse an attention module that looks like a family and is not, before a student is made for it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.errors import StudentError
from segue.students.attention.spec import Geometry, rotated


def refuse_misread(module: nn.Module, geometry: Geometry) -> None:
    """Refuse a module whose logits are capped, that rotates otherwise, or whose answer is not that of what was read."""
    capped = getattr(module, "attn_logit_softcapping", None)
    if capped is not None:  # too gentle for three tokens to show
        raise _misread(module, f"Its logits are capped at {capped}, which the interface does not read.")
    if not _rotates_by_halves(module):
        raise _misread(module, "Its rotary embedding is not the rotation by halves of Llama.")
    _refuse_other_answer(module, geometry)


def _rotates_by_halves(module: nn.Module) -> bool:
    """Compare the family's own rotation with ours, and read whether it rotates whole heads."""
    theirs = getattr(sys.modules.get(type(module).__module__), "apply_rotary_pos_emb", None)
    if theirs is None:
        return True
    size = 2 * (int(module.head_dim) // 2)  # type: ignore[arg-type]
    x = torch.linspace(-1.0, 1.0, 3 * size).view(1, 1, 3, size)
    angles = torch.linspace(0.0, 2.0, 3 * size).view(1, 3, size)
    try:
        found = theirs(x, x, angles.cos(), angles.sin())[0]
    except Exception:
        return False
    ours = rotated(x, angles.cos(), angles.sin())
    return _rotated_share(module.config) == 1.0 and found.shape == ours.shape and torch.allclose(found, ours, atol=1e-5)


def _rotated_share(config: Any) -> float:
    """Read which share of each head is rotated."""
    rope = getattr(config, "rope_parameters", None)
    share = getattr(config, "partial_rotary_factor", None)
    if share is None and isinstance(rope, dict):
        share = rope.get("partial_rotary_factor")
    return 1.0 if share is None else float(share)


@torch.no_grad()
def _refuse_other_answer(module: nn.Module, geometry: Geometry) -> None:
    """Call the module on three tokens, and refuse it unless attention with what was read gives the same answer.

    Without a mask some backends are causal and some are not, so either will do.
    """
    like, size = geometry.query.weight, geometry.head_size
    if like.is_meta:
        return
    x = torch.arange(3.0 * geometry.width, device=like.device).square().sin().view(1, 3, -1)
    angles = torch.linspace(0.0, 3.0, 3 * (size // 2), device=like.device).view(1, 3, -1).repeat(1, 1, 2)
    rotary = (angles.cos().to(like.dtype), angles.sin().to(like.dtype)) if geometry.rotary else None
    training, module.training = module.training, False
    try:
        steepness = _logits(geometry, x.to(like.dtype), rotary).std().clamp_min(1e-6)
        x = (x * (2 / steepness.float()).sqrt().clamp(1, 1e3)).to(like.dtype)  # so that what attends to what matters
        theirs = module(x, attention_mask=None, **({"position_embeddings": rotary} if rotary else {}))[0].float()
        ours = [_softmax_attention(geometry, x, rotary, causal).float() for causal in (False, True)]
    except Exception as error:
        raise _misread(module, f"Called as Llama's attention is, it raised {type(error).__name__}.") from error
    finally:
        module.training = training
    tolerance = 1e-3 if like.dtype in (torch.float32, torch.float64) else 5e-2
    if not any((y - theirs).norm() <= tolerance * theirs.norm() for y in ours):
        raise _misread(module, "Its answer is not that of softmax attention with its projections, norms and rotation.")


def _misread(module: nn.Module, found: str) -> StudentError:
    return StudentError(
        f"an attention student was to be made for {type(module).__name__}.",
        found,
        "teach Segue this kind (segue.students.teach). Nothing was changed.",
    )


def _queries_and_keys(geometry: Geometry, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> list[Tensor]:
    found = []
    for part, norm in ((geometry.query, geometry.query_norm), (geometry.key, geometry.key_norm)):
        y = F.linear(x, *part).view(*x.shape[:2], -1, geometry.head_size)
        y = (y if norm is None else norm(y)).transpose(1, 2)
        found.append(y if rotary is None else rotated(y, *rotary))
    return found


def _logits(geometry: Geometry, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    q, k = _queries_and_keys(geometry, x, rotary)
    k = k.repeat_interleave(geometry.heads // geometry.key_heads, dim=1)
    return geometry.logit_scale * q @ k.transpose(-1, -2)


def _softmax_attention(geometry: Geometry, x: Tensor, rotary: tuple[Tensor, Tensor] | None, causal: bool) -> Tensor:
    q, k = _queries_and_keys(geometry, x, rotary)
    v = F.linear(x, *geometry.value).view(*x.shape[:2], -1, geometry.head_size).transpose(1, 2)
    scale = geometry.logit_scale
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True).transpose(1, 2).flatten(2)
    return y if geometry.output is None else F.linear(y, *geometry.output)

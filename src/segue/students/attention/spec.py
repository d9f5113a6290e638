"""What an attention module consists of, what one call of it says, the interface that reads both, and a probe that checks it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.border import Count, PositiveFloat, PositiveInt, Unit, checked
from segue.errors import StudentError


@checked
class Projection(NamedTuple):
    """A linear layer as (out, in) weight and bias; views of the teacher's own tensors."""

    weight: Tensor
    bias: Tensor | None = None


@checked
def projection(module: nn.Module) -> Projection:
    """Read a linear layer, also GPT-2's Conv1D, whose weight is transposed."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    return Projection(weight.T if is_transposed_linear(module) else weight, bias)


@checked
def split_qkv(fused: Projection) -> tuple[Projection, Projection, Projection]:
    """Split a fused projection into those to queries, keys and values."""
    weights = fused.weight.chunk(3)
    biases = (None,) * 3 if fused.bias is None else fused.bias.chunk(3)
    q, k, v = (Projection(w, b) for w, b in zip(weights, biases, strict=True))
    return q, k, v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (batch, heads, tokens, head size) by halves, as Llama does; cos and sin are (batch, tokens, head size)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-b, a], dim=-1) * sin[:, None]


def is_transposed_linear(module: nn.Module) -> bool:
    """Recognise GPT-2's Conv1D, a linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


@checked
@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a student needs to know about an attention module; widths, key heads and biases follow from the projections."""

    heads: PositiveInt
    head_size: PositiveInt
    query: Projection
    key: Projection
    value: Projection
    output: Projection | None = None  # None: the heads' outputs are the result, as in BERT's `attention.self`
    query_norm: nn.Module | None = None  # applied to each head, before rotation
    key_norm: nn.Module | None = None
    scale: PositiveFloat | None = None  # of the logits; None is 1 / sqrt(head size)
    rotary: bool = False  # the call brings (cos, sin), and queries and keys are rotated by halves
    causal: bool = False  # the default; a call can override it
    dropout: Unit = 0.0  # after the output projection; dropout of attention weights has no counterpart in most operators
    tokens: PositiveInt | None = None  # the longest sequence, where the model has a limit
    window: PositiveInt | None = None  # how far the teacher looks back, where it is limited
    layer: Count | None = None  # its index in a key/value cache

    @property
    def width(self) -> int:
        return self.query.weight.shape[1]

    @property
    def key_heads(self) -> int:
        """The number of key and value heads: fewer than query heads in grouped-query attention."""
        return self.key.weight.shape[0] // self.head_size

    @property
    def logit_scale(self) -> float:
        return self.head_size**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call of an attention module, in one form for all families."""

    x: Tensor  # (batch, tokens, width)
    token_mask: Tensor | None = None  # (batch, tokens), False at padding; with a cache, of all tokens so far
    causal: bool | None = None  # None: as in the spec
    rotary: tuple[Tensor, Tensor] | None = None  # cos and sin, (batch, tokens, head size)
    cache: Any = None  # a Hugging Face cache
    mask: Tensor | None = None  # (batch, 1, tokens, tokens) as given: True where visible, or added to the logits


class AttentionInterface:
    """Read one family of attention modules: parse a module, unpack its calls, pack its outputs.

    Each student has one, built from its teacher. Store only plain settings of the teacher that its calls depend on.
    """

    name = "an attention module"

    def __init__(self, module: nn.Module) -> None:
        pass

    @classmethod
    def matches(cls, module: nn.Module) -> bool:  # noqa: ARG003
        """Return whether a module belongs to the family; not called for classes given to `register_attention`."""
        return False

    def parse(self, module: nn.Module) -> AttentionSpec:
        """Read what the module consists of."""
        raise NotImplementedError

    def unpack(self, *args: Any, **kwargs: Any) -> AttentionCall:
        """Read the arguments of one call; takes what the module's own forward takes."""
        raise NotImplementedError

    def pack(self, y: Tensor) -> Any:
        """Return the output in the form that the module returns."""
        return y

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        """Return attributes that code around the module reads, besides its plain numbers and switches."""
        return {}

    def ignored(self, module: nn.Module) -> list[nn.Module]:
        """Return parts of the module that a student does not need; any other part that `parse` does not read is an error."""
        return []


def check_spec(module: nn.Module, spec: AttentionSpec) -> None:
    """Refuse a module that caps its logits, rotates in another way, or returns something else than its spec says."""
    capped = getattr(module, "attn_logit_softcapping", None)
    if capped is not None:  # too weak an effect to show on three tokens
        raise _unreadable(module, f"Its logits are capped at {capped}, which the interface does not support.")
    if not _rotates_by_halves(module):
        raise _unreadable(module, "Its rotary embedding is not the rotation by halves of Llama.")
    _compare_outputs(module, spec)


def _rotates_by_halves(module: nn.Module) -> bool:
    """Compare the family's own rotation with ours, and check that it rotates complete heads."""
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
    ours = rotate(x, angles.cos(), angles.sin())
    rope = getattr(module.config, "rope_parameters", None)
    fraction = getattr(module.config, "partial_rotary_factor", None)
    if fraction is None and isinstance(rope, dict):
        fraction = rope.get("partial_rotary_factor")
    return fraction in (None, 1.0) and found.shape == ours.shape and torch.allclose(found, ours, atol=1e-5)


@torch.no_grad()
def _compare_outputs(module: nn.Module, spec: AttentionSpec) -> None:
    """Call the module on three tokens, and refuse it unless softmax attention with its spec returns the same.

    Without a mask some backends are causal and some are not, so either is accepted.
    """
    like, size = spec.query.weight, spec.head_size
    if like.is_meta:
        return
    x = torch.arange(3.0 * spec.width, device=like.device).square().sin().view(1, 3, -1)
    angles = torch.linspace(0.0, 3.0, 3 * (size // 2), device=like.device).view(1, 3, -1).repeat(1, 1, 2)
    rotary = (angles.cos().to(like.dtype), angles.sin().to(like.dtype)) if spec.rotary else None
    training, module.training = module.training, False
    try:
        steepness = _logits(spec, x.to(like.dtype), rotary).std().clamp_min(1e-6)
        x = (x * (2 / steepness.float()).sqrt().clamp(1, 1e3)).to(like.dtype)  # so that attention weights differ clearly
        theirs = module(x, attention_mask=None, **({"position_embeddings": rotary} if rotary else {}))[0].float()
        ours = [_softmax_attention(spec, x, rotary, causal).float() for causal in (False, True)]
    except Exception as error:
        raise _unreadable(module, f"Called like Llama's attention, it raises {type(error).__name__}.") from error
    finally:
        module.training = training
    tolerance = 1e-3 if like.dtype in (torch.float32, torch.float64) else 5e-2
    if not any((y - theirs).norm() <= tolerance * theirs.norm() for y in ours):
        raise _unreadable(module, "Its output is not that of softmax attention with its projections, norms and rotation.")


def _unreadable(module: nn.Module, found: str) -> StudentError:
    return StudentError(
        f"Segue cannot replace {type(module).__name__}.",
        found,
        "register an interface of your own (segue.students.register_attention). Nothing was changed.",
    )


def _queries_and_keys(spec: AttentionSpec, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> list[Tensor]:
    found = []
    for part, norm in ((spec.query, spec.query_norm), (spec.key, spec.key_norm)):
        y = F.linear(x, *part).view(*x.shape[:2], -1, spec.head_size)
        y = (y if norm is None else norm(y)).transpose(1, 2)
        found.append(y if rotary is None else rotate(y, *rotary))
    return found


def _logits(spec: AttentionSpec, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    q, k = _queries_and_keys(spec, x, rotary)
    k = k.repeat_interleave(spec.heads // spec.key_heads, dim=1)
    return spec.logit_scale * q @ k.transpose(-1, -2)


def _softmax_attention(spec: AttentionSpec, x: Tensor, rotary: tuple[Tensor, Tensor] | None, causal: bool) -> Tensor:
    q, k = _queries_and_keys(spec, x, rotary)
    v = F.linear(x, *spec.value).view(*x.shape[:2], -1, spec.head_size).transpose(1, 2)
    scale = spec.logit_scale
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True).transpose(1, 2).flatten(2)
    return y if spec.output is None else F.linear(y, *spec.output)

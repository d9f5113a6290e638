"""What an attention module is made of, what one call of it brings, and the interface that tells students both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Projection(NamedTuple):
    """A linear map as (out, in) weight and bias; views of the teacher's own tensors."""

    weight: Tensor
    bias: Tensor | None = None


def projection(module: nn.Module) -> Projection:
    """Read a linear layer, also GPT-2's Conv1D, which is stored the other way round."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    return Projection(weight.T if is_transposed_linear(module) else weight, bias)


def thirds(fused: Projection) -> tuple[Projection, Projection, Projection]:
    """Split a projection to queries, keys and values at once into its three parts."""
    weights = fused.weight.chunk(3)
    biases = (None,) * 3 if fused.bias is None else fused.bias.chunk(3)
    q, k, v = (Projection(w, b) for w, b in zip(weights, biases, strict=True))
    return q, k, v


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (batch, heads, tokens, head size) by halves, as Llama does; cos and sin are (batch, tokens, head size)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-b, a], dim=-1) * sin[:, None]


def is_transposed_linear(module: nn.Module) -> bool:
    """Recognise the Conv1D of GPT-2, which is a linear map stored the other way round."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What a student needs to know of an attention module; widths, key/value heads and biases follow from the projections."""

    heads: int
    head_size: int
    query: Projection
    key: Projection
    value: Projection
    output: Projection | None = None  # None: what the heads return is the answer, as in BERT's `attention.self`
    query_norm: nn.Module | None = None  # applied to each head, before rotation
    key_norm: nn.Module | None = None
    scale: float | None = None  # of the logits; None is 1 / sqrt(head size)
    rotary: bool = False  # the call brings (cos, sin), and queries and keys are rotated by halves
    causal: bool = False  # a call may say otherwise
    dropout: float = 0.0  # after the output projection; dropout of attention weights has no counterpart in most operators
    tokens: int | None = None  # the longest sequence, where the model knows it
    window: int | None = None  # how far the teacher looks back, if it does not see everything
    layer: int | None = None  # its place in a key/value cache

    @property
    def width(self) -> int:
        return self.query.weight.shape[1]

    @property
    def key_heads(self) -> int:
        """How many heads keys and values have: fewer than queries where they are grouped."""
        return self.key.weight.shape[0] // self.head_size

    @property
    def logit_scale(self) -> float:
        return self.head_size**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class Call:
    """One call of an attention module, in words that every student understands."""

    x: Tensor  # (batch, tokens, width)
    keep: Tensor | None = None  # (batch, tokens), True where a token counts; for cached calls, of all tokens seen
    causal: bool | None = None  # None: as the geometry says
    rotary: tuple[Tensor, Tensor] | None = None  # cos and sin, (batch, tokens, head size)
    cache: Any = None  # a Hugging Face cache
    mask: Tensor | None = None  # (batch, 1, tokens, tokens) as given: True where seen, or added to the logits


class Interface:
    """Read one family of attention modules, receive its calls and give its answers.

    One is made for every student, from its teacher; keep plain settings of the teacher that the calls depend on.
    """

    name = "an attention module"

    def __init__(self, module: nn.Module) -> None:
        pass

    @classmethod
    def knows(cls, module: nn.Module) -> bool:  # noqa: ARG003
        """Tell whether a module belongs to the family; kinds given to `teach` are not asked."""
        return False

    def read(self, module: nn.Module) -> Geometry:
        """Say what the module is made of."""
        raise NotImplementedError

    def receive(self, *args: Any, **kwargs: Any) -> Call:
        """Understand one call; give it the signature of the module's own forward."""
        raise NotImplementedError

    def answer(self, y: Tensor) -> Any:
        """Return the output as the module does."""
        return y

    def settings(self, module: nn.Module) -> dict[str, Any]:
        """Return attributes that code around the module asks for, beside its plain numbers and switches."""
        return {}

    def left_out(self, module: nn.Module) -> list[nn.Module]:
        """Return parts of the module that a student does without; whatever else is not read is an error."""
        return []

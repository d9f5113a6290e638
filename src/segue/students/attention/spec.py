"""What an attention module consists of, what one call of it says, and the interface that reads both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from segue.border import Count, PositiveFloat, PositiveInt, Unit, checked


@checked
class Projection(NamedTuple):
    """A linear layer as (out, in) weight and bias; views of the teacher's own tensors."""

    weight: Tensor
    bias: Tensor | None = None


@checked
def projection(module: nn.Module) -> Projection:
    """Read a linear layer, also GPT-2's Conv1D, whose weight is transposed, and a convolution over single pixels.

    >>> projection(nn.Linear(4, 8)).weight.shape
    torch.Size([8, 4])

    Args:
        module: The layer.
    """
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    return Projection(weight.T if is_transposed_linear(module) else weight.flatten(1), bias)


@checked
def split_qkv(fused: Projection) -> tuple[Projection, Projection, Projection]:
    """Split a fused projection into those to queries, keys and values.

    >>> [part.weight.shape[0] for part in split_qkv(projection(nn.Linear(4, 12)))]
    [4, 4, 4]

    Args:
        fused: The projection to all three, one after the other.
    """
    weights = fused.weight.chunk(3)
    biases = (None,) * 3 if fused.bias is None else fused.bias.chunk(3)
    q, k, v = (Projection(w, b) for w, b in zip(weights, biases, strict=True))
    return q, k, v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (batch, heads, tokens, head size) by halves, as Llama does; cos and sin are (batch, tokens, features).

    Where they have fewer features than the heads, only the first ones are rotated.
    """
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = rotated.chunk(2, dim=-1)
    rotated = rotated * cos[:, None] + torch.cat([-b, a], dim=-1) * sin[:, None]
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


def is_transposed_linear(module: nn.Module) -> bool:
    """Recognise GPT-2's Conv1D, a linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


@checked
@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a student needs to know about an attention module; widths, key heads and biases follow from the projections."""

    heads: PositiveInt
    head_size: PositiveInt  # of queries and keys
    query: Projection
    key: Projection
    value: Projection
    value_size: PositiveInt | None = None  # of a head's values, where it is not that of its keys
    latent: nn.Module | None = None  # x -> what queries, and keys and values, are made of, and a part of all keys (DeepSeek)
    output: Projection | None = None  # None: the heads' outputs are the result, as in BERT's `attention.self`
    gate: Projection | None = None  # of the input; its sigmoid multiplies the heads' outputs (Qwen3-Next, LFM 3)
    reduction: nn.Module | None = None  # (x, size of the image) -> fewer tokens, of which keys and values are made, as in PVT
    input_norm: nn.Module | None = None  # inside the module, before the projections
    query_norm: nn.Module | None = None
    key_norm: nn.Module | None = None
    output_norm: nn.Module | None = None  # of the heads' outputs, before the output projection
    residual_norm: nn.Module | None = None  # of the sum of the input and the output, where the module adds them, as ALBERT's
    # what norms of queries and keys see: (tokens, heads, head size), (heads, tokens, head size), or all heads at once (OLMo 2)
    norm_over: Literal["head", "heads first", "width"] = "head"
    norm_after_rotation: bool = False
    clip: PositiveFloat | None = None  # queries, keys and values are clamped to it before the rotation, as in DBRX
    scale: PositiveFloat | None = None  # of the logits; None is 1 / sqrt(head size)
    softcap: PositiveFloat | None = None  # c: a logit x becomes c tanh(x / c), as in Gemma 2
    sinks: Tensor | None = None  # (heads,), a logit more in each softmax, whose value is zero, as in GPT-OSS
    bias: nn.Module | None = None  # (queries, keys) -> what is added to the logits, (1 or batch, heads, queries, keys)
    biased: bool = False  # the call brings something to add to the logits, as ALiBi
    rotary: bool = False  # the call brings what rotates queries and keys (`AttentionInterface.rotate`)
    causal: bool = False  # the default; a call can override it
    dropout: Unit = 0.0  # after the output projection; dropout of attention weights has no counterpart in most operators
    tokens: PositiveInt | None = None  # the longest sequence, where the model has a limit
    window: PositiveInt | None = None  # how many tokens the teacher looks back, itself included, where it is limited
    chunked: bool = False  # its windows do not slide: each begins where the last one ends, as in Llama 4
    layer: Count | None = None  # its index in a key/value cache
    cross: bool = False  # its calls bring the states of another sequence
    context: AttentionSpec | None = None  # a second stream with projections of its own, whose tokens are mixed with these

    @property
    def width(self) -> int:
        first = self.query.weight if self.latent is None else next(self.latent.parameters())
        return first.shape[1]

    @property
    def key_heads(self) -> int:
        """The number of key and value heads: fewer than query heads in grouped-query attention."""
        return self.value.weight.shape[0] // (self.value_size or self.head_size)

    @property
    def features(self) -> list[str]:
        """What changes the logits or limits them, which an operator may have no counterpart for."""
        held = {"bias": self.bias is not None or self.biased, "softcap": self.softcap, "sinks": self.sinks is not None}
        return [name for name, value in {**held, "window": self.window}.items() if value]

    @property
    def logit_scale(self) -> float:
        return self.head_size**-0.5 if self.scale is None else self.scale


class Groups(NamedTuple):
    """Tokens that see only those of their group."""

    number: Tensor  # (batch, tokens), from 0
    most: int  # how many groups there are at most
    apart: float = -100.0  # what is added to the logits between groups: where cosines are scaled by 100, some weight is left


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call of an attention module, in one form for all families."""

    x: Tensor  # (batch, tokens, width)
    token_mask: Tensor | None = None  # (batch, keys), False at padding; with a cache, of all tokens so far
    causal: bool | None = None  # None: as the mask says, else as in the spec
    rotary: Any = None  # what `AttentionInterface.rotate` takes; by default cos and sin, (batch, tokens, features)
    cache: Any = None  # a Hugging Face cache
    mask: Tensor | None = None  # (batch or 1, heads or 1, tokens, keys) as given: True where visible, or added to the logits
    bias: Tensor | None = None  # added to the logits, in the same shape: ALiBi, relative positions
    keys: Tensor | None = None  # (batch, keys, width of the keys), what keys are computed from; None: as queries, from x
    values: Tensor | None = None  # the same for values; None: as keys
    cross: bool = False  # keys and values belong to another sequence, which has no future
    size: tuple[int, int] | None = None  # of the image, for a reduction
    places: Tensor | None = None  # (tokens,), where keys are fewer tokens of the same image: the key at the place of each query
    groups: Groups | None = None
    context: Tensor | None = None  # (batch, tokens, width) of the second stream
    context_first: bool = False  # its tokens are before the others, where both are mixed
    extra: Any = None  # what the interface's `result` needs besides
    need_weights: bool = False  # the caller asks for the attention weights
    weights: Any = None  # the student's answer, for `result`: (batch, heads, tokens, keys), or what refuses to be used


class AttentionInterface:
    """Read one family of attention modules: parse a module, unpack its calls, pack its outputs.

    Each student has one, built from its teacher. Store only plain settings of the teacher that its calls depend on.
    """

    name = "an attention module"
    # What the last call that was not compiled showed; compiled code expects the same, and lets the device check it.
    repeats_queries = False  # keys come as another tensor with the numbers of the queries: attn(norm(x), norm(x), norm(x))
    masks_the_future: bool | None = None  # a mask says so, where a call does not
    returns_bias = False  # its `result` needs the bias of the spec, also where an operator leaves it out

    def __init__(self, module: nn.Module) -> None:
        pass

    @classmethod
    def matches(cls, module: nn.Module) -> bool:  # noqa: ARG003
        """Return whether a module may belong to the family; not called for classes given to `register_attention`."""
        return False

    @classmethod
    def candidates(cls, module: nn.Module) -> Iterator[AttentionInterface]:
        """Yield the ways to read a module, likeliest first; the first that is proved right is taken."""
        yield cls(module)

    def parse(self, module: nn.Module) -> AttentionSpec:
        """Read what the module consists of."""
        raise NotImplementedError

    def unpack(self, *args: Any, **kwargs: Any) -> AttentionCall:
        """Read the arguments of one call; takes what the module's own forward takes, and refuses what it cannot read."""
        raise NotImplementedError

    def unpack_token(self, arguments: dict[str, Any]) -> tuple[Tensor, Any, Any] | None:
        """Read a call by names that brings only x, a rotation and a cache, and whose output is that of `pack`; else None."""
        return None

    def rotate(self, q: Tensor, k: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys, (batch, heads, tokens, head size), by what the call brought."""
        return rotate(q, *rotary), rotate(k, *rotary)

    def rotate_joined(self, x: Tensor, heads: int, rotary: Any) -> Tensor:
        """Do the same for one token whose `heads` queries and whose keys are one tensor."""
        return torch.cat(self.rotate(x[:, :heads], x[:, heads:], rotary), dim=1)

    def pack(self, y: Tensor) -> Any:
        """Return the output in the form that the module returns."""
        return y

    def see_output(self, output: Any) -> None:
        """Note the form in which the module returns its output; called in the proof, before `pack`."""

    def result(self, y: Tensor, call: AttentionCall, bias: Tensor | None) -> Any:
        """Return the output where its form depends on the call, or on the bias that the module of the spec computed."""
        return self.pack(y)

    def residual(self, call: AttentionCall) -> Tensor | None:
        """Return what `result` adds to the output of attention, so that the proof does not take it for a good reading."""
        return None

    def probes(self, module: nn.Module, spec: AttentionSpec, x: Tensor) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Yield ways to call the module on (batch, tokens, width), with masks and rotations; one of them proves the spec."""
        yield (x,), {}

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        """Return attributes that code around the module reads, besides its plain numbers and switches."""
        return {}

    def ignored(self, module: nn.Module) -> list[nn.Module]:
        """Return parts of the module that a student does not need; any other part that `parse` does not read is an error."""
        return []

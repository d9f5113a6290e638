"""Masks: what one call hides from whom. Operators without softmax know padding and the future; the others take any mask."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from segue.errors import StudentError
from segue.students.attention.spec import AttentionCall

MASKED = -1e4  # an additive mask adds this or less where a key is masked
REMEMBERED = 4  # masks; the layers of a model share one or two


class Pattern(NamedTuple):
    """What a mask over pairs of tokens hides besides padding."""

    causal: bool | None  # it hides the future; None where it has too few rows to tell
    within: bool  # it hides no more than that, beyond the window that was asked about
    windowed: bool  # it hides what is outside of that window


def visible(mask: Tensor) -> Tensor:
    """Return a mask over pairs as booleans, True where a key is seen."""
    return mask if mask.dtype == torch.bool else mask > MASKED


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask over pairs as what is added to the logits."""
    if mask.dtype != torch.bool:
        return mask.to(dtype).clamp_min(torch.finfo(dtype).min)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def read_mask(mask: Tensor | None, batch: int, *, of_pairs: bool = False) -> tuple[Tensor | None, Tensor | None]:
    """Read a mask as one over tokens (batch, keys), or one over pairs (batch or 1, heads or 1, tokens, keys).

    >>> of_tokens, of_pairs = read_mask(torch.ones(2, 5, dtype=torch.bool), batch=2)

    Args:
        mask: What a module was called with.
        batch: The number of sequences.
        of_pairs: As in torch's own functions, one with two axes is over pairs too.
    """
    if mask is None:
        return None, None
    if mask.dim() == 2 and mask.shape[0] == batch and not mask.is_floating_point() and not of_pairs:
        return mask.bool(), None
    return None, mask[:, None] if mask.dim() == 3 else mask[(None,) * (4 - mask.dim())]


def padding_in(mask: Tensor, batch: int) -> Tensor:
    """Find padding in a mask over pairs: in a square one, tokens that do not see themselves; else, what the last row hides.

    Whether this is all that the mask hides is found out by `pattern_of`.
    """
    seen = visible(mask)
    rows = seen.diagonal(dim1=-2, dim2=-1) if seen.shape[-1] == seen.shape[-2] else seen[..., -1, :]
    return rows[:, 0].expand(batch, -1)


class _Memory:
    """What the last masks hide, so that the layers which share one look into it once."""

    def __init__(self) -> None:
        self.known: OrderedDict[tuple[object, ...], tuple[weakref.ref[Tensor], Pattern]] = OrderedDict()

    def __call__(
        self, mask: Tensor, tokens: Tensor | None, window: int | None = None, cross: bool = False, chunked: bool = False
    ) -> Pattern:
        owner = mask if mask._base is None else mask._base
        version = 0 if mask.is_inference() else mask._version
        key = (id(owner), mask.data_ptr(), mask.shape, mask.stride(), version, window, cross, chunked)
        held, pattern = self.known.get(key, (None, None))
        if held is None or pattern is None or held() is not owner:
            pattern = _pattern(mask, tokens, window, cross, chunked)
            self.known[key] = weakref.ref(owner), pattern
            while len(self.known) > REMEMBERED:
                self.known.popitem(last=False)
        return pattern


pattern_of = _Memory()


def _pattern(mask: Tensor, tokens: Tensor | None, window: int | None, cross: bool, chunked: bool) -> Pattern:
    everything, up_to_here, near, around = (bool(answer) for answer in _answers(mask, tokens, window, cross, chunked))
    if everything or up_to_here:
        return Pattern(None if everything and up_to_here else up_to_here, within=True, windowed=False)
    return Pattern(near if near or around else None, within=near or around, windowed=near or around)


def _answers(mask: Tensor, tokens: Tensor | None, window: int | None, cross: bool, chunked: bool) -> tuple[Tensor, ...]:
    """Return whether a mask hides padding alone, or the future too, or also what is outside of a window.

    Last, whether it hides padding and what is outside of a window to both sides, as in ModernBERT.
    """
    seen = visible(mask)
    queries, keys = mask.shape[-2:]
    some = torch.ones((1, 1, 1, keys), dtype=torch.bool, device=mask.device) if tokens is None else tokens[:, None, None, :]
    future = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
    wrong = torch.zeros_like(seen) if mask.dtype == torch.bool else (mask != 0) & seen  # it adds to the logits
    rows = torch.ones_like(some[..., :1])
    if queries <= keys and not cross:  # nobody reads the rows of padding
        rows = some.transpose(-1, -2)[:, :, keys - queries :]
    near = future if window is None else future & torch.ones_like(future).triu(keys - queries - window + 1)
    everything = torch.ones_like(future)
    around = near | near.mT if window is not None and queries == keys else everything
    if chunked and window is not None:  # counted from the first token
        chunk = (torch.arange(keys, device=mask.device) - some.int().argmax(-1, keepdim=True)) // window
        near, around = future & (chunk == chunk.transpose(-1, -2)[:, :, keys - queries :]), everything
    patterns = (everything, future, near, around)
    return tuple(~((((seen != (some & other)) | wrong) & rows).any()) for other in patterns)


def assert_within(
    mask: Tensor, tokens: Tensor | None, causal: bool, window: int | None, cross: bool, chunked: bool, operator: str
) -> None:
    """Let the device refuse a mask that hides more than padding, and the future if causal: compiled code cannot look."""
    everything, up_to_here, near, around = _answers(mask, tokens, window, cross, chunked)
    fits = up_to_here | near if causal else everything | around
    expected = "padding and the future" if causal else "padding; if the future, run a batch before compiling"
    torch._assert_async(fits, f"{operator} cannot apply this mask: it hides more than {expected}.")


def without_bias(call: AttentionCall, operator: str) -> AttentionCall:
    """Drop what a call adds to the logits; what it hides by very low numbers stays hidden."""
    mask = None if call.mask is None else visible(call.mask)
    if call.bias is None:
        return replace(call, mask=mask)
    seen = call.bias > MASKED
    if mask is None and torch.compiler.is_compiling():
        torch._assert_async(seen.all(), f"{operator} ignores a bias that hides tokens: give it as a mask.")
        return replace(call, bias=None)
    if mask is None:
        return replace(call, bias=None, mask=None if bool(seen.all()) else seen)
    return replace(call, bias=None, mask=mask & seen)


def causal_padding(
    call: AttentionCall, keys: int, operator: str, window: int | None = None, chunked: bool = False
) -> Tensor | None:
    """Return the token mask of the first keys; refuse a mask that hides more than padding and the future, beyond a window."""
    tokens = None if call.token_mask is None else call.token_mask[:, :keys]  # a static cache is longer
    if call.mask is None:
        return tokens
    mask = call.mask[..., :keys]
    padding = padding_in(mask, call.x.shape[0])
    if mask.shape[-2] == 1:  # a token mask
        pass
    elif torch.compiler.is_compiling():
        assert_within(mask, padding, True, window, False, chunked, operator)
    else:
        pattern = pattern_of(mask, padding, window, chunked=chunked)
        if not pattern.within or pattern.causal is False:
            raise unsupported_mask(operator, mask)
    return padding if tokens is None else padding & tokens


def unsupported_mask(operator: str, mask: Tensor) -> StudentError:
    """Make the error of a mask that an operator cannot apply."""
    adds = mask.is_floating_point() and bool(((mask != 0) & visible(mask)).any())
    what = "It adds to the logits" if adds else "It hides more than padding and the future"
    why = "and its weights are not a softmax of logits" if adds else "(packed sequences, blocks, or pairs of tokens)"
    without = f", or {operator}(ignore=('bias',)) to do without what it adds" if adds else ""
    return StudentError(
        f"{operator} cannot apply this mask.",
        f"{what}{',' if adds else ''} {why}.",
        f"leave such masks out, or use SlidingWindow or Softmax at these sites, which apply any mask{without}.",
    )


def unsupported_bias(operator: str) -> StudentError:
    """Make the error of a call that adds to the logits, which an operator has none of."""
    return StudentError(
        f"{operator} cannot add a bias to its logits.",
        "The call brings one (positions, or a mask of numbers), and its weights are not a softmax of logits.",
        f"leave it out of the call, use SlidingWindow or Softmax there, or {operator}(ignore=('bias',)) to do without it.",
    )


def wrong_length(found: Tensor, batch: int, keys: int) -> StudentError:
    """Make the error of a token mask that does not fit the keys."""
    return StudentError(
        f"the token mask of an attention student must have the shape {(batch, keys)}: one value for each key.",
        f"The interface's unpack() returned one of shape {tuple(found.shape)}.",
        "with a key/value cache the mask is that of all tokens so far, not only of the new ones.",
    )

"""The mixer: how tokens exchange information, apart from how a model calls its attention."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.errors import StudentError
from segue.students.attention.spec import Groups

State: TypeAlias = dict[str, Any]  # what a causal mixer keeps of the past: tensors, which have the batch first, and numbers

CHUNK = 128  # tokens after a state are mixed this many at a time
EPSILON = 1e-6  # the smallest sum of positive weights that is divided by


class Mixer(nn.Module):
    """Map queries, keys and values, each (batch, heads, tokens, head size), to an output for each query.

    To write one, subclass it and define `mix`:

        class MeanMixer(Mixer):
            supports_causal = True

            def mix(self, q, k, v, token_mask, causal):
                return ...  # (batch, heads, tokens, head size)

    Keys and values may have fewer heads than queries: `repeat_heads(k, q.shape[1])` repeats them. Values, and so outputs, may
    have another size than queries and keys. `token_mask` (batch, tokens)
    is False at padding, or None where there is none; keys and values arrive as zeros there, and they must not change the output
    elsewhere. With `causal`, a token sees itself and the tokens before it. Half precision arrives as float32 and is cast back.

    A causal mixer that generates text with a state of constant size sets `recurrent = True` and defines two more methods:
    `accumulate`, the state after some tokens, and `mix_chunk`, the output of a few tokens that follow a state. `step` does
    both for one token, and can be overridden where they share work; it may write to tensors of the state that it is given,
    where `may_write` allows it. Nothing else is needed: the attention module
    calls `forward` in training, and `prefill`, `decode_step` and `update_state` with a key/value cache.
    """

    uses: tuple[str, ...] = ("query", "key", "value")  # the projections that the mixer needs
    supports_causal = False
    supports_cross = False  # queries and keys may belong to different sequences
    supports_reduction = False  # keys may be fewer than queries, of the same image: `mix_reduced` exists
    dense = False  # computes the logits of all pairs of tokens, so that it can add anything to them
    recurrent = False  # `mix_chunk` and `accumulate` exist
    honours: frozenset[str] = frozenset()  # of bias, softcap, sinks and window: what of a teacher's softmax it keeps
    branches: ClassVar[tuple[str, ...]] = ()  # the parts of its weights that can be left out, by `ablated`
    ablated: str | None = None  # a branch that contributes nothing: its weights are removed, the others normalised again

    def mix(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool) -> Tensor:
        """Mix a complete sequence."""
        raise NotImplementedError

    def mix_across(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, **bias: Tensor) -> Tensor:
        """Mix queries with the keys and values of another sequence, to which `token_mask` belongs."""
        return self.mix(q, k, v, token_mask, False, **bias)

    def mix_reduced(
        self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, places: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Mix queries with fewer keys and values of the same image; `places` says at which of the keys each query is."""
        raise NotImplementedError

    def mix_chunk(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> Tensor:
        """Mix a few causal tokens with each other and with a state."""
        raise NotImplementedError

    def accumulate(self, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State | None) -> State:
        """Return the state after these tokens; None is the state before the first token."""
        raise NotImplementedError

    def step(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        """Mix one token that follows a state, which is lost; return its output and the next state."""
        return self.mix_chunk(q, k, v, token_mask, state), self.accumulate(k, v, token_mask, state)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        token_mask: Tensor | None = None,
        causal: bool = False,
        bias: Tensor | None = None,
        cross: bool = False,
        places: Tensor | None = None,
    ) -> Tensor:
        """Mix a complete sequence, as in training."""
        if causal and not self.supports_causal:
            raise not_causal(type(self).__name__.removesuffix("Mixer"))
        with _full_precision(v):
            q, (k, v), dtype = _widened(q), _prepare(k, v, token_mask), v.dtype
            added = {} if bias is None else {"bias": bias.to(q.dtype)}
            if places is not None and self.supports_reduction:
                y = self.mix_reduced(q, k, v, token_mask, places, **added)
            elif cross:
                y = self.mix_across(q, k, v, token_mask, **added)
            else:
                y = self.mix(q, k, v, token_mask, causal, **added)
        return y.to(dtype)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State | None) -> Tensor:
        """Mix the tokens of a prompt, or of a part of it that follows a state.

        The state is left to `update_state`, because a training step that fills a cache never reads it.
        """
        if not state:
            y: Tensor = self(q, k, v, token_mask, causal=True)
            return y
        dtype, outputs = v.dtype, []
        with _full_precision(v):
            q, (k, v) = _widened(q), _prepare(k, v, token_mask)
            for begin in range(0, q.shape[2], CHUNK):
                chunk = slice(begin, begin + CHUNK)
                mask = None if token_mask is None else token_mask[:, chunk]
                outputs.append(self.mix_chunk(q[:, :, chunk], k[:, :, chunk], v[:, :, chunk], mask, state))
                if begin + CHUNK < q.shape[2]:
                    state = self.accumulate(k[:, :, chunk], v[:, :, chunk], mask, state)
        return torch.cat(outputs, dim=2).to(dtype)

    def decode_step(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        """Mix one token that follows a state, which is lost; return its output and the next state."""
        if token_mask is None and q.dtype == k.dtype == v.dtype == torch.float32 and not _autocasts(v):
            return self.step(q, k, v, None, state)
        with _full_precision(v):
            y, state = self.step(_widened(q), *_prepare(k, v, token_mask), token_mask, state)
        return y.to(v.dtype), state

    def update_state(self, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State | None) -> State:
        """Return the state after these tokens."""
        with _full_precision(v):
            return self.accumulate(*_prepare(k, v, token_mask), token_mask, state)


class Sinks(nn.Module):
    """One logit more for each head, whose value is zero: it takes a share of the weights (GPT-OSS)."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(logits.detach().clone())

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with a logit of zero."""
        self.weight.zero_()


class NoWeights:
    """Stand for the attention weights of an operator that has none; refuse every use of them."""

    is_withheld = True  # blending keeps it where the teacher returns weights

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refused()

    def __getitem__(self, index: Any) -> Any:
        raise self._refused()

    def __iter__(self) -> Any:
        raise self._refused()

    def __bool__(self) -> bool:
        raise self._refused()

    def __add__(self, other: Any) -> Any:
        raise self._refused()

    __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __matmul__ = __gt__ = __lt__ = __add__
    __len__ = __float__ = __iter__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = (*args, *(kwargs or {}).values())
        held = [x for value in values for x in (value if isinstance(value, tuple | list) else (value,)) if isinstance(x, cls)]
        raise held[0]._refused()

    def _refused(self) -> StudentError:
        return StudentError(
            f"{self.operator} has no attention weights.",
            "The code around a site asks for them and uses them, and only softmax over all tokens has them.",
            "call with need_weights=False, or use Softmax at this site, which returns them.",
        )


def mix_groups(mixer: Mixer, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, groups: Groups) -> Tensor:
    """Mix each group of tokens with itself, one after the other; exact for every mixer that leaves padding out."""
    number, most, _ = groups
    y = torch.zeros_like(repeat_heads(v, q.shape[1]))
    for group in range(most):
        inside = number == group
        mixed = mixer(q, k, v, inside if seen is None else inside & seen)
        y = torch.where(inside[:, None, :, None], mixed, y)
    return y


def _autocasts(like: Tensor) -> bool:
    return torch.is_autocast_enabled("cpu" if like.is_meta else like.device.type)


def _full_precision(like: Tensor) -> AbstractContextManager[Any]:
    device = "cpu" if like.is_meta else like.device.type
    return torch.autocast(device, enabled=False) if _autocasts(like) else nullcontext()


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _prepare(k: Tensor, v: Tensor, token_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return keys and values in at least float32, with zeros at padding."""
    k, v = _widened(k), _widened(v)
    if token_mask is None:
        return k, v
    padding = ~token_mask[:, None, :, None]  # (batch, 1, tokens, 1)
    return k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)


def not_causal(operator: str) -> StudentError:
    """Make the error of an operator that cannot be causal."""
    return StudentError(
        f"{operator} cannot be causal.",
        "It sees the complete sequence at once, so the future would leak into the past.",
        "use a causal operator, such as LinearAttention or WindowedLinear. Nothing was changed.",
    )


def not_across(operator: str, after: str = "") -> StudentError:
    """Make the error of an operator that mixes one sequence with itself."""
    if torch.compiler.is_compiling():
        after = "Where it is the same in another tensor, run a batch before compiling, or give the same tensor."
    return StudentError(
        f"{operator} cannot be cross-attention.",
        "It mixes the tokens of one sequence with each other, and here the keys are those of another one, or fewer.",
        f"use LinearAttention, Performer, Linformer or Nystrom there, or choose the self-attention sites. {after}".strip(),
    )


def places_in(size: tuple[int, int], keys: int, device: torch.device) -> Tensor:
    """Return which of the keys, a smaller image of the same form, is at the place of each token of an image."""
    height, width = size
    rows = min((n for n in range(1, keys + 1) if keys % n == 0), key=lambda n: abs(n * width - keys // n * height))
    down = torch.arange(height, device=device) * rows // height
    right = torch.arange(width, device=device) * (keys // rows) // width
    return (down[:, None] * (keys // rows) + right).flatten()


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values that several query heads share, one copy for each."""
    groups = heads // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def group_heads(x: Tensor, key_heads: int) -> Tensor:
    """Group the query heads that share keys: (batch, heads, 1, n) -> (batch, key heads, heads of each, n)."""
    return x.reshape(x.shape[0], key_heads, -1, x.shape[3])


def read_state(q: Tensor, sums: Tensor) -> Tensor:
    """Multiply the features of one token, (batch, heads, 1, features), by sums, (batch, key heads, features, n)."""
    (batch, heads, _, features), key_heads = q.shape, sums.shape[1]
    y = torch.bmm(q.reshape(batch * key_heads, heads // key_heads, features), sums.flatten(0, 1))
    return y.view(batch, heads, 1, -1)


def parameter_of(module: nn.Module, name: str, like: Tensor) -> Tensor:
    """Return a parameter in the precision of a tensor: `module.name.to(like.dtype)` without its slow lookup and cast.

    One of them takes as long as an operation on one token. What is not in the module's own table is looked up as ever: a
    parametrization computes it.
    """
    held = module._parameters.get(name)
    weight: Tensor = getattr(module, name) if held is None else held
    return weight if weight.dtype == like.dtype else weight.to(like.dtype)


def may_write(x: Tensor) -> bool:
    """Return whether a step may write to a tensor of the state: plain PyTorch, and no gradient is recorded."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return torch.is_inference_mode_enabled() or not x.is_inference()


def add_outer(sums: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Add the outer product of one token, (batch, heads, 1, features) and (batch, heads, 1, n), in the place of the sums."""
    return sums.addcmul_(k.mT, v) if may_write(sums) else torch.addcmul(sums, k.mT, v)


def join_heads(q: Tensor, k: Tensor) -> Tensor:
    """Return the queries and keys of one token as one tensor, which they are the parts of after a rotation."""
    whole, heads = q._base, q.shape[1]
    if whole is None or whole is not k._base or whole.shape != (q.shape[0], heads + k.shape[1], 1, q.shape[3]):
        return torch.cat([q, k], dim=1)
    ahead = k.storage_offset() - q.storage_offset() == heads * whole.stride(1)
    same = q.storage_offset() == whole.storage_offset() and q.stride() == k.stride() == whole.stride()
    return whole if ahead and same else torch.cat([q, k], dim=1)


def of_each_head(x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
    """Multiply one token, (batch, heads, 1, n), by the weight of each head, (heads, n, m), and add (heads, 1, m or 1).

    One product for each head, not for each sequence: that would copy the weights.
    """
    alone = x.shape[0] == 1
    x = x[0] if alone else x.squeeze(2).transpose(0, 1)
    y = torch.bmm(x, weight) if added is None else torch.baddbmm(added, x, weight)
    return y.unsqueeze(0) if alone else y.transpose(0, 1).unsqueeze(2)


def full_mask(like: Tensor) -> Tensor:
    """Return the token mask of (batch, heads, tokens, head size) without padding."""
    return torch.ones(like.shape[0], like.shape[2], dtype=torch.bool, device=like.device)


def tail(x: Tensor, start: int, dim: int = 2) -> Tensor:
    """Return the tokens from `start` on, without keeping the memory of the many before it alive."""
    rest = x.narrow(dim, start, x.shape[dim] - start)
    return rest.clone() if start > 1 else rest


def softmax_of(logits: Tensor, bias: Tensor | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Return the weights of the keys: logits are capped, then the bias is added, then sinks (one each row) take their share."""
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    if bias is not None:
        logits = logits + bias
    if sinks is None:
        return logits.softmax(-1)
    extra = sinks.to(logits.dtype).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, extra], dim=-1).softmax(-1)[..., :-1]


def masked_softmax(scores: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax over the visible keys; a row without any gets zeros."""
    if visible is None:
        return scores.softmax(-1)
    return (scores + additive_mask(visible, scores.dtype)).softmax(-1) * visible.any(-1, keepdim=True)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where a key is visible and the lowest number elsewhere. Adding it is many times faster than filling scores."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)


def append_ones(v: Tensor) -> Tensor:
    """Append a column of ones to values, so that one product sums both the values and their weights."""
    if v.dim() == 4 and v.shape[2] == 1:
        return F.pad(v, (0, 1), value=1.0)
    return torch.cat([v, v.new_ones((*v.shape[:-1], 1))], dim=-1)


def normalise(sums: Tensor, least: float = EPSILON) -> Tensor:
    """Divide weighted sums of values by the sum of their weights, which is the last column."""
    values, weights = sums.split_with_sizes([sums.shape[-1] - 1, 1], -1)
    return values / weights.clamp_min(least)

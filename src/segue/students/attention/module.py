"""The attention student: projections around a mixer, called like its teacher. And the operators that build one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.errors import StudentError
from segue.sites import Site
from segue.students.attention.interfaces import copy_attributes_, interface_of
from segue.students.attention.mixer import Mixer, not_causal, repeat_heads
from segue.students.attention.spec import AttentionCall, AttentionInterface, AttentionSpec, Projection, projection, rotate
from segue.students.initialisation import CopyMatching, Initialisation, Original

MASKED = -1e4  # an additive mask adds this or less where a token is masked


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Replace an attention module by another operator: a student factory.

    A subclass builds the mixer and describes itself: `cost` per head in the n tokens, the head size d and its settings, and the
    address of its `paper`. The teacher's interface says how the student is called and what it returns.
    """

    cost: ClassVar[str]
    paper: ClassVar[str]
    mixer_class: ClassVar[type[Mixer]]  # says whether the operator supports causal attention and has a recurrent state

    init: Initialisation = field(default_factory=CopyMatching)

    def mixer(self, spec: AttentionSpec) -> Mixer:
        """Build the mixer for an attention module."""
        raise NotImplementedError

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        interface, spec = interface_of(teacher, site)
        like = spec.query.weight
        with torch.device(like.device):
            mixer = self.mixer(spec).to(like.dtype)
        if spec.causal and not mixer.supports_causal:
            raise not_causal(type(self).__name__)
        student = Attention(spec, interface, mixer)
        copy_attributes_(student, teacher, interface)
        self.init(student, dict(student.originals(spec)))
        return student


class Attention(nn.Module):
    """Project to queries, keys and values, mix, and project back.

    With a Hugging Face cache, a causal recurrent mixer keeps its state there.
    """

    def __init__(self, spec: AttentionSpec, interface: AttentionInterface, mixer: Mixer) -> None:
        super().__init__()
        self.heads, self.head_size, self.causal = spec.heads, spec.head_size, spec.causal
        self.layer_idx = spec.layer
        self.interface = interface
        self.settings = {name: getattr(spec, name) for name in ("scale", "rotary", "dropout", "tokens", "window")}
        used = {name: getattr(spec, name) for name in mixer.uses}
        self.query = _linear_like(used.get("query"))
        self.key = _linear_like(used.get("key"))
        self.value = _linear_like(used.get("value"))
        self.query_norm = copy.deepcopy(spec.query_norm) if "query" in used else None
        self.key_norm = copy.deepcopy(spec.key_norm) if "key" in used else None
        self.mixer = mixer
        self.output = _linear_like(spec.output)
        self.output_dropout = nn.Dropout(spec.dropout)
        self.check_mask = MaskCheck()
        self.requires_grad_(True)

    def originals(self, spec: AttentionSpec) -> Iterator[tuple[str, Original]]:
        """Yield the parts that have a counterpart in the teacher, with it."""
        for name in ("query", "key", "value", "output", "query_norm", "key_norm"):
            original = getattr(spec, name)
            if original is not None and getattr(self, name) is not None:
                yield name, original

    def attention_spec(self) -> AttentionSpec:
        """Describe the student, so that another operator can replace it in turn."""
        if self.query is None or self.key is None or self.value is None:
            raise StudentError(
                f"Segue cannot replace an attention student with {type(self.mixer).__name__}.",
                "It has no queries and keys to read.",
                "start from the original model. Nothing was changed.",
            )
        return AttentionSpec(
            heads=self.heads,
            head_size=self.head_size,
            query=projection(self.query),
            key=projection(self.key),
            value=projection(self.value),
            output=None if self.output is None else projection(self.output),
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            causal=self.causal,
            layer=self.layer_idx,
            **self.settings,
        )

    @property
    def output_projection(self) -> nn.Linear | None:
        """The last linear layer, which a least-squares fit sets."""
        return self.output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self.interface.unpack(*args, **kwargs)
        causal = self.causal if call.causal is None else call.causal
        v = self._heads(self.value, call.x)  # (batch, heads, tokens, head size)
        q = (
            repeat_heads(v, self.heads)
            if self.query is None
            else self._rotate(self._heads(self.query, call.x, self.query_norm), call)
        )
        k = v if self.key is None else self._rotate(self._heads(self.key, call.x, self.key_norm), call)
        if call.cache is None:
            self.check_mask(call.mask, call.token_mask, causal)
            y = self.mixer(q, k, v, call.token_mask, causal)
        elif causal and self.mixer.recurrent:
            y = self._mix_with_state(q, k, v, call)
        else:
            y = self._mix_with_keys_and_values(q, k, v, call, causal)
        y = y.transpose(1, 2).flatten(2)  # (batch, tokens, heads * head size)
        if self.output is not None:
            y = self.output_dropout(self.output(y))
        return self.interface.pack(y)

    def _mix_with_state(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """Continue from the state in the cache, at a cost that does not grow with the tokens so far."""
        from segue.students.attention.cache import state_layer

        assert self.layer_idx is not None
        layer = state_layer(call.cache, self.layer_idx, call.token_mask)
        tokens = q.shape[2]
        seen = layer.seen + tokens
        if layer.window is not None and seen > layer.window:  # the teacher does not look back farther
            raise unsupported_mask()
        token_mask, mask = (
            None if x is None else x[..., :seen] for x in (call.token_mask, call.mask)
        )  # a static cache is longer
        self.check_mask(mask, token_mask, causal=True)
        token_mask = None if token_mask is None else token_mask[:, -tokens:]
        if token_mask is not None and tokens > 1 and not torch.compiler.is_compiling() and bool(token_mask.all()):
            token_mask = None  # a chunk has a mask even without padding; later tokens are faster without it
        state = layer.current(self.mixer)
        if state and tokens == 1:
            y, layer.state = self.mixer.decode_step(q, k, v, token_mask, state)
            layer.seen = seen
            return y
        y = self.mixer.prefill(q, k, v, token_mask, state)
        layer.append(k, v, token_mask, self.mixer)
        return y

    def _mix_with_keys_and_values(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, causal: bool) -> Tensor:
        """Mix with all keys and values in the cache."""
        cache = getattr(call.cache, "self_attention_cache", call.cache)  # of an encoder-decoder model
        k, v = cache.update(k, v, self.layer_idx)
        filled = min(k.shape[2], int(cache.get_seq_length(self.layer_idx)))  # a static cache is longer
        k, v = k[:, :, :filled], v[:, :, :filled]
        token_mask, mask = (None if x is None else x[..., :filled] for x in (call.token_mask, call.mask))
        self.check_mask(mask, token_mask, causal)
        tokens = q.shape[2]
        q = F.pad(q, (0, 0, filled - tokens, 0))  # earlier tokens have keys and values, and need no queries
        y: Tensor = self.mixer(q, k, v, token_mask, causal)
        return y[:, :, -tokens:]

    def _heads(self, project: nn.Linear | None, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        assert project is not None
        split = project(x).unflatten(-1, (-1, self.head_size))
        heads: Tensor = split if norm is None else norm(split)
        return heads.transpose(1, 2)

    def _rotate(self, x: Tensor, call: AttentionCall) -> Tensor:
        return x if call.rotary is None else rotate(x, *call.rotary)


class MaskCheck:
    """Refuse a mask that hides more than padding and the future: look at the first of each shape, outside compiled code."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()

    def __call__(self, mask: Tensor | None, token_mask: Tensor | None, causal: bool) -> None:
        if torch.compiler.is_compiling() or mask is None or mask.shape[-2] == 1:  # one row is a token mask
            return
        shape = tuple(mask.shape[-2:])
        if shape not in self.shapes:
            self._check(mask, token_mask, causal)
            self.shapes.add(shape)

    def _check(self, mask: Tensor, token_mask: Tensor | None, causal: bool) -> None:
        biased = False
        if mask.dtype != torch.bool:
            masked = mask <= MASKED
            biased, mask = bool(((mask != 0) & ~masked).any()), ~masked
        queries, keys = mask.shape[-2:]
        expected = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=mask.device)
        if causal:
            expected = expected.tril(keys - queries)
        if token_mask is not None:
            expected = expected & token_mask[:, None, None, :]
        if biased or (mask != expected).any():
            raise unsupported_mask()


def unsupported_mask() -> StudentError:
    """Make the error of a mask that an operator cannot apply."""
    return StudentError(
        "an attention student cannot apply this mask.",
        "It hides more than padding and the future (packed sequences, a window, or pairs of tokens).",
        "leave such masks out, or keep softmax attention at these sites.",
    )


def _linear_like(original: Projection | None) -> nn.Linear | None:
    if original is None:
        return None
    weight, bias = original
    return nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device=weight.device, dtype=weight.dtype)

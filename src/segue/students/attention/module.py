"""The attention student: projections around a mixer, called as its teacher is called. And the operators that make one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.errors import PlanError, StudentError
from segue.sites import Site
from segue.students.attention.masks import Understanding, hides_more
from segue.students.attention.mixer import Mixer, every_head, refuse_causal
from segue.students.attention.registry import adopt_settings_, interface_of, teach
from segue.students.attention.spec import Call, Geometry, Interface, Projection, projection, rotated
from segue.students.initialisation import CopyMatching, Initialisation, Original


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Replace an attention module by another operator: a student factory.

    A subclass says which mixer it stands for; the interface of the teacher says how it is called and what it returns.
    """

    init: Initialisation = field(default_factory=CopyMatching)

    def mixer(self, geometry: Geometry) -> Mixer:
        """Make the mixer for an attention of this geometry."""
        raise NotImplementedError

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        interface, geometry = interface_of(teacher, site)
        like = geometry.query.weight
        with torch.device(like.device):
            mixer = self.mixer(geometry).to(like.dtype)
        if geometry.causal and not mixer.can_be_causal:
            raise refuse_causal(type(self).__name__)
        student = Attention(geometry, interface, mixer)
        adopt_settings_(student, teacher, interface)
        self.init(student, dict(student.originals(geometry)))
        return student


class Attention(nn.Module):
    """Project to queries, keys and values, mix, and project back.

    Called with a Hugging Face cache, a causal recurrent mixer keeps its state there.
    """

    def __init__(self, geometry: Geometry, interface: Interface, mixer: Mixer) -> None:
        super().__init__()
        self.heads, self.head_size, self.causal = geometry.heads, geometry.head_size, geometry.causal
        self.layer_idx = geometry.layer
        self.interface = interface
        self.facts = {name: getattr(geometry, name) for name in ("scale", "rotary", "dropout", "tokens", "window")}
        used = {name: getattr(geometry, name) for name in mixer.uses}
        self.query = _fresh(used.get("query"))
        self.key = _fresh(used.get("key"))
        self.value = _fresh(used.get("value"))
        self.query_norm = copy.deepcopy(geometry.query_norm) if "query" in used else None
        self.key_norm = copy.deepcopy(geometry.key_norm) if "key" in used else None
        self.mixer = mixer
        self.output = _fresh(geometry.output)
        self.output_dropout = nn.Dropout(geometry.dropout)
        self.understand = Understanding()
        self.requires_grad_(True)

    def originals(self, geometry: Geometry) -> Iterator[tuple[str, Original]]:
        """Yield the parts that have a counterpart in the teacher, with it."""
        for name in ("query", "key", "value", "output", "query_norm", "key_norm"):
            original = getattr(geometry, name)
            if original is not None and getattr(self, name) is not None:
                yield name, original

    @property
    def output_projection(self) -> nn.Linear | None:
        """The last linear map, which a least-squares fit sets."""
        return self.output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self.interface.receive(*args, **kwargs)
        causal = self.causal if call.causal is None else call.causal
        v = self._heads(self.value, call.x)  # (batch, heads, tokens, head size)
        q = (
            every_head(v, self.heads)
            if self.query is None
            else self._rotated(self._heads(self.query, call.x, self.query_norm), call)
        )
        k = v if self.key is None else self._rotated(self._heads(self.key, call.x, self.key_norm), call)
        if call.cache is None:
            self.understand(call.mask, call.keep, causal)
            y = self.mixer(q, k, v, call.keep, causal)
        elif causal and self.mixer.recurrent:
            y = self._after_a_state(q, k, v, call)
        else:
            y = self._after_keys_and_values(q, k, v, call, causal)
        y = y.transpose(1, 2).flatten(2)  # (batch, tokens, heads * head size)
        if self.output is not None:
            y = self.output_dropout(self.output(y))
        return self.interface.answer(y)

    def _after_a_state(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Go on from what the cache remembers, at a cost that does not grow with it."""
        from segue.students.attention.cache import state_layer

        assert self.layer_idx is not None
        layer = state_layer(call.cache, self.layer_idx, call.keep)
        seen = layer.seen + q.shape[2]
        if layer.window is not None and seen > layer.window:  # the teacher would look back no farther
            raise hides_more()
        keep, mask = (None if x is None else x[..., :seen] for x in (call.keep, call.mask))  # a static cache has room for more
        self.understand(mask, keep, causal=True)
        keep = None if keep is None else keep[:, -q.shape[2] :]
        if keep is not None and q.shape[2] > 1 and not torch.compiler.is_compiling() and bool(keep.all()):
            keep = None  # a piece comes with a mask, also where nothing is padded; later tokens are faster without
        past = layer.past(self.mixer)
        if past and q.shape[2] == 1:
            y, layer.state = self.mixer.next(q, k, v, keep, past)
            layer.seen = seen
            return y
        y = self.mixer.follow(q, k, v, keep, past) if past else self.mixer(q, k, v, keep, causal=True)
        layer.add(k, v, keep, self.mixer)
        return y

    def _after_keys_and_values(self, q: Tensor, k: Tensor, v: Tensor, call: Call, causal: bool) -> Tensor:
        """Mix with all keys and values that the cache holds."""
        cache = getattr(call.cache, "self_attention_cache", call.cache)  # of an encoder and a decoder
        k, v = cache.update(k, v, self.layer_idx)
        filled = min(k.shape[2], int(cache.get_seq_length(self.layer_idx)))  # a static cache has room for more
        k, v = k[:, :, :filled], v[:, :, :filled]
        keep, mask = (None if x is None else x[..., :filled] for x in (call.keep, call.mask))
        self.understand(mask, keep, causal)
        tokens = q.shape[2]
        q = F.pad(q, (0, 0, filled - tokens, 0))  # the past asks nothing; its keys and values are remembered
        y: Tensor = self.mixer(q, k, v, keep, causal)
        return y[:, :, -tokens:]

    def _heads(self, project: nn.Linear | None, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        assert project is not None
        split = project(x).unflatten(-1, (-1, self.head_size))
        heads: Tensor = split if norm is None else norm(split)
        return heads.transpose(1, 2)

    def _rotated(self, x: Tensor, call: Call) -> Tensor:
        return x if call.rotary is None else rotated(x, *call.rotary)


class AttentionAgain(Interface):
    """Segue's own attention students, which can be replaced in their turn by an operator that asks for no more."""

    name = "Segue's own attention"

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, Attention)
        self.inner = module.interface

    def read(self, module: nn.Module) -> Geometry:
        assert isinstance(module, Attention)
        if module.query is None or module.key is None or module.value is None:
            raise StudentError(
                "an attention student was to be made in place of another.",
                f"{type(module.mixer).__name__} has no queries and keys to read.",
                "begin with the original model. Nothing was changed.",
            )
        return Geometry(
            heads=module.heads,
            head_size=module.head_size,
            query=projection(module.query),
            key=projection(module.key),
            value=projection(module.value),
            output=None if module.output is None else projection(module.output),
            query_norm=module.query_norm,
            key_norm=module.key_norm,
            causal=module.causal,
            layer=module.layer_idx,
            **module.facts,
        )

    def receive(self, *args: Any, **kwargs: Any) -> Call:
        return self.inner.receive(*args, **kwargs)

    def answer(self, y: Tensor) -> Any:
        return self.inner.answer(y)

    def settings(self, module: nn.Module) -> dict[str, Any]:
        return self.inner.settings(module)

    def left_out(self, module: nn.Module) -> list[nn.Module]:
        assert isinstance(module, Attention)
        return [module.mixer]


teach(Attention, AttentionAgain)


def positive(name: str, value: int) -> int:
    """Return a setting that counts something, or say what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name}={value!r} was asked for.", "It counts something.", "give a whole number of at least 1.")
    return value


def _fresh(original: Projection | None) -> nn.Linear | None:
    if original is None:
        return None
    weight, bias = original
    return nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device=weight.device, dtype=weight.dtype)

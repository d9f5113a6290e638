"""The attention student: projections around a mixer, called like its teacher. And the operators that build one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.errors import SegueWarning, StudentError
from segue.sites import Site
from segue.students.attention.families.names import is_cross
from segue.students.attention.interfaces import copy_attributes_, interface_of
from segue.students.attention.masks import (
    additive,
    assert_within,
    causal_padding,
    padding_in,
    pattern_of,
    unsupported_bias,
    unsupported_mask,
    without_bias,
    wrong_length,
)
from segue.students.attention.mixer import (
    Mixer,
    NoWeights,
    Sinks,
    mix_groups,
    not_across,
    not_causal,
    places_in,
    repeat_heads,
)
from segue.students.attention.proof import prove_call
from segue.students.attention.spec import AttentionCall, AttentionInterface, AttentionSpec, Projection, projection
from segue.students.attention.token import apply_linear, decode_token, layer_to_continue
from segue.students.initialisation import CopyMatching, Initialisation, Original

LINEAR = ("query", "key", "value", "output", "gate")
NORMS = ("reduction", "input_norm", "query_norm", "key_norm", "output_norm", "residual_norm", "bias", "latent")
FIRST = ("query", "key", "value", "query_norm", "key_norm", "mixer", "output")
ORDER = (*FIRST, *(name for name in (*LINEAR, *NORMS) if name not in FIRST))
OF_LOGITS = ("scale", "softcap", "rotary", "biased", "norm_over", "norm_after_rotation", "clip")
SETTINGS = (*OF_LOGITS, "value_size", "dropout", "tokens", "window", "chunked", "cross")

Ignorable = Literal["bias", "softcap", "sinks", "window"]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Replace an attention module by another operator: a student factory.

    A subclass builds the mixer and describes itself: `cost` per head in the n tokens, the head size d and its settings, and the
    address of its `paper`. The teacher's interface says how the student is called and what it returns. `ignore` names what the
    student leaves out of its teacher, where the operator has no counterpart: a position bias, a cap of the logits, sinks.
    """

    cost: ClassVar[str]
    paper: ClassVar[str]
    mixer_class: ClassVar[type[Mixer]]  # says what the operator supports: causality, a recurrent state, a bias

    init: Initialisation = field(default_factory=CopyMatching)
    ignore: tuple[Ignorable, ...] = ()

    @property
    def honours(self) -> frozenset[str]:
        """What of a teacher's softmax the operator keeps."""
        return self.mixer_class.honours

    def mixer(self, spec: AttentionSpec) -> Mixer:
        """Build the mixer for an attention module."""
        raise NotImplementedError

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        from segue.students.attention.joint import attention_module

        interface, spec = interface_of(teacher, site)
        window, ignored = spec.window, frozenset(self.ignore) | getattr(teacher, "ignored", frozenset())
        spec = self._honoured(spec, site, ignored, interface.returns_bias)
        like = spec.query.weight
        with torch.device(like.device):
            mixer = self.mixer(spec).to(like.dtype)
        if spec.causal and not mixer.supports_causal:
            raise not_causal(type(self).__name__)
        fits = mixer.supports_cross or (spec.reduction is not None and mixer.supports_reduction)
        if (spec.cross or spec.reduction is not None or is_cross(teacher, *site.name.split(".")[-2:])) and not fits:
            raise not_across(type(self).__name__, "Nothing was changed.")
        spec = replace(spec, window=window)  # also where it is ignored: masks have it, and are read by it
        student = attention_module(spec, interface, mixer)
        student.operator, student.ignored = type(self).__name__, ignored
        copy_attributes_(student, teacher, interface)
        self.init(student, dict(student.originals(spec)))
        if "bias" in ignored and student.bias is not None:
            student.bias.requires_grad_(False)  # it is for other layers
        return student

    def _honoured(self, spec: AttentionSpec, site: Site, ignored: frozenset[str], keep: bool) -> AttentionSpec:
        """Return the spec without what the user ignores; refuse what the operator cannot do."""
        name = type(self).__name__
        lacking = [part for part in spec.features if part not in self.honours and part not in ignored]
        if "window" in lacking:
            lacking.remove("window")
            text = f"{name} looks at all tokens, its teacher at {spec.window}. ignore=('window',) says that this is meant."
            warnings.warn(text, SegueWarning, stacklevel=2)
        if lacking:
            raise StudentError(
                f"{name} cannot honour the {' and the '.join(FEATURES[part] for part in lacking)} of site {site.name!r}.",
                "Its weights are not a softmax of logits, which they change.",
                f"SlidingWindow keeps them; {name}(ignore={tuple(lacking)!r}) leaves them out. Nothing was changed.",
            )
        dropped = [part for part in spec.features if part in ignored]
        if lost := [FEATURES[part] for part in dropped if part != "window"]:
            text = f"{name} leaves the {' and the '.join(lost)} of its teacher out."
            warnings.warn(text, SegueWarning, stacklevel=2)
        changes: dict[str, Any] = dict.fromkeys(part for part in dropped if not (part == "bias" and keep))
        return replace(spec, **changes, biased=spec.biased and "bias" not in dropped)


FEATURES = {"bias": "position bias", "softcap": "cap of the logits", "sinks": "attention sinks", "window": "window"}


class Attention(nn.Module):
    """Project to queries, keys and values, mix, and project back.

    With a Hugging Face cache, a causal recurrent mixer keeps its state there.
    """

    def __init__(self, spec: AttentionSpec, interface: AttentionInterface, mixer: Mixer) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_size, self.causal = spec.heads, spec.key_heads, spec.head_size, spec.causal
        self.layer_idx = spec.layer
        self.interface = interface
        self.operator = type(mixer).__name__.removesuffix("Mixer")  # for errors
        self.ignored: frozenset[str] = frozenset()  # what of its teacher the student leaves out
        self.settings = {name: getattr(spec, name) for name in SETTINGS}
        unused = {"query", "key"} - set(mixer.uses)
        unused |= {f"{name}_norm" for name in unused}
        for name in ORDER:  # that of the parameters in checkpoints, since the first version
            part: Any = mixer if name == "mixer" else None if name in unused else getattr(spec, name)
            setattr(self, name, _linear_like(part) if name in LINEAR else part if part is mixer else copy.deepcopy(part))
        self.output_dropout = nn.Dropout(spec.dropout)
        self.requires_grad_(True)

    query: nn.Linear | None
    key: nn.Linear | None
    value: nn.Linear
    output: nn.Linear | None
    gate: nn.Linear | None
    reduction: nn.Module | None
    input_norm: nn.Module | None
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    output_norm: nn.Module | None
    residual_norm: nn.Module | None
    bias: nn.Module | None
    latent: nn.Module | None
    mixer: Mixer

    def originals(self, spec: AttentionSpec) -> Iterator[tuple[str, Original]]:
        """Yield the parts that have a counterpart in the teacher, with it."""
        for name in (*LINEAR, *NORMS):
            original = getattr(spec, name)
            if original is not None and getattr(self, name) is not None:
                yield name, original
        if spec.sinks is not None and getattr(self.mixer, "sinks", None) is not None:
            yield "mixer.sinks", Sinks(spec.sinks)

    def attention_spec(self) -> AttentionSpec:
        """Describe the student, so that another operator can replace it in turn."""
        if self.query is None or self.key is None:
            raise StudentError(
                f"Segue cannot replace an attention student with {type(self.mixer).__name__}.",
                "It has no queries and keys to read.",
                "start from the original model. Nothing was changed.",
            )
        parts: dict[str, Any] = {name: getattr(self, name) for name in (*LINEAR, *NORMS)}
        parts |= {name: projection(parts[name]) for name in LINEAR if parts[name] is not None}
        sinks: Any = getattr(self.mixer, "sinks", None)
        return AttentionSpec(
            heads=self.heads,
            head_size=self.head_size,
            causal=self.causal,
            layer=self.layer_idx,
            sinks=None if sinks is None else sinks.weight,
            **parts,
            **self.settings,
        )

    def prove(self, teacher: nn.Module, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise unless the interface reads this call of the teacher rightly: softmax attention returns what it returns."""
        if not isinstance(teacher, Attention):  # another student, which reads the call by the same interface
            prove_call(teacher, self.interface, site, args, kwargs)

    @property
    def output_projection(self) -> nn.Linear | None:
        """The last linear layer, which a least-squares fit sets."""
        return self.output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (args or torch.compiler.is_compiling() or torch.is_grad_enabled()):
            decoded = decode_token(self, kwargs)
            if decoded is not None:
                return decoded
        call = self.interface.unpack(*args, **kwargs)
        if "bias" in self.ignored:
            call = without_bias(call, self.operator)
        x = call.x if self.input_norm is None else self.input_norm(call.x)
        if self.reduction is not None:
            assert call.size is not None
            keys = self.reduction(x, call.size)
            call = replace(call, keys=keys, cross=True, places=places_in(call.size, keys.shape[1], x.device))
        q, k, v = self.project(x, call)
        bias: Tensor | None = None
        if self.bias is not None:
            call, bias = self._with_bias(call, self.bias, q.shape[2], k.shape[2])
        if call.cross:
            y = self._mix(q, k, v, call, causal=False)
        elif call.cache is None:
            y = self._mix(q, k, v, call, self.causal if call.causal is None else call.causal)
        elif (layer := self._layer_to_continue(call)) is not None:
            y = layer.step(self.mixer, q, k, v, None)
        elif self.causal and call.causal is not False and self._keeps_a_state(call):
            y = self._mix_with_state(q, k, v, call)
        else:
            y = self._mix_with_keys_and_values(q, k, v, call)
        y = self.leave(_join(y), x)
        if self.residual_norm is not None:
            y = self.residual_norm(call.x + y)
        if call.need_weights:
            call = replace(call, weights=self._weights(q, k, call))
        return self.interface.result(y, call, bias)

    def leave(self, y: Tensor, x: Tensor) -> Tensor:
        """Turn the outputs of the heads, (batch, tokens, heads * head size), into the module's; x is the input of its gate."""
        if self.output_norm is not None:
            y = self.output_norm(y)
        if self.gate is not None:
            shares = self.gate(x).sigmoid()
            y = y * (shares if shares.shape == y.shape else shares.repeat_interleave(y.shape[-1] // self.heads, dim=-1))
        if (output := self.output) is not None:
            y = apply_linear(output, y)
            y = self.output_dropout(y) if self.output_dropout.p else y
        return y

    def project(self, x: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (batch, heads, tokens, head size)."""
        kept, query, key = self._kept(call), self.query, self.key
        for_queries, for_keys, shared = (x, x, None) if self.latent is None else self.latent(x)
        if kept is None:
            for_keys = for_keys if call.keys is None else call.keys
            v = _split(apply_linear(self.value, for_keys if call.values is None else call.values), self.key_heads)
            k = v if key is None else _split(apply_linear(key, for_keys), self.key_heads)
            if shared is not None and key is not None:
                k = torch.cat([k, shared[:, None].expand(-1, self.key_heads, -1, -1)], dim=-1)
        else:
            k, v = kept
        q = repeat_heads(v, self.heads) if query is None else _split(apply_linear(query, for_queries), self.heads)
        rotates = call.rotary is not None and query is not None and key is not None
        if rotates and self.settings["norm_after_rotation"]:
            q, k = self.interface.rotate(q, k, call.rotary)
        if self.query_norm is not None:
            q = self._norm(q, self.query_norm)
        if self.key_norm is not None and kept is None:
            k = self._norm(k, self.key_norm)
        if (clip := self.settings["clip"]) is not None:
            q, k, v = (x.clamp(-clip, clip) for x in (q, k, v))
        if rotates and not self.settings["norm_after_rotation"]:
            q, k = self.interface.rotate(q, k, call.rotary)
        if call.cross and kept is None and hasattr(call.cache, "cross_attention_cache"):
            k, v = call.cache.cross_attention_cache.update(k, v, self.layer_idx)
            call.cache.is_updated[self.layer_idx] = True
        return q, k, v

    def _kept(self, call: AttentionCall) -> tuple[Tensor, Tensor] | None:
        """Return the keys and values of another sequence that a cache keeps, because they are the same for every new token."""
        if not (call.cross and hasattr(call.cache, "cross_attention_cache") and call.cache.is_updated.get(self.layer_idx)):
            return None
        layer = call.cache.cross_attention_cache.layers[self.layer_idx]
        return layer.keys, layer.values

    def _with_bias(self, call: AttentionCall, module: nn.Module, tokens: int, keys: int) -> tuple[AttentionCall, Tensor]:
        """Add the bias of the student's own module to that of the call, unless it is ignored; return it too."""
        cache = None if call.cross else getattr(call.cache, "self_attention_cache", call.cache)
        own: Tensor = module(tokens, keys + (0 if cache is None else int(cache.get_seq_length(self.layer_idx))))
        if "bias" not in self.ignored:
            call = replace(call, bias=own if call.bias is None else call.bias + own)
        return call, own

    def _norm(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Apply a norm of queries or keys, which sees (batch, tokens, heads, head size), or all heads at once."""
        if self.settings["norm_over"] == "heads first":
            first: Tensor = norm(x)
            return first
        x = x.transpose(1, 2)
        y: Tensor = norm(x) if self.settings["norm_over"] == "head" else norm(x.flatten(2)).view(x.shape)
        return y.transpose(1, 2)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, causal: bool) -> Tensor:
        """Mix queries with keys, of which they are the last, or which are another sequence's."""
        tokens, keys = q.shape[2], k.shape[2]
        if call.cross and not self.mixer.supports_cross and (call.places is None or not self.mixer.supports_reduction):
            raise not_across(self.operator)
        token_mask, causal, bias = self._resolve(call, tokens, k, causal)
        if causal and not self.mixer.supports_causal:
            raise not_causal(self.operator)
        earlier = 0 if self.mixer.dense or call.cross else keys - tokens
        if earlier:  # they have keys and values, and need no queries
            q = F.pad(q, (0, 0, earlier, 0))
            bias = None if bias is None else F.pad(bias, (0, 0, earlier, 0))
        if call.groups is not None and "bias" not in self.mixer.honours:
            return mix_groups(self.mixer, q, k, v, token_mask, call.groups)
        y: Tensor = self.mixer(q, k, v, token_mask, causal, bias, call.cross, call.places)
        return y[:, :, -tokens:]

    def _weights(self, q: Tensor, k: Tensor, call: AttentionCall) -> Any:
        """Return the attention weights of a call, or what refuses to be used where the operator has none."""
        weights = getattr(self.mixer, "weights", None)
        if weights is None or call.cache is not None:
            return NoWeights(self.operator)
        causal = not call.cross and (self.causal if call.causal is None else call.causal)
        return weights(q, k, *self._resolve(call, q.shape[2], k, causal))

    def _resolve(self, call: AttentionCall, tokens: int, k: Tensor, causal: bool) -> tuple[Tensor | None, bool, Tensor | None]:
        """Return the token mask, whether the future is hidden, and what is added to the logits."""
        batch, _, keys, _ = k.shape
        token_mask, mask = call.token_mask, call.mask
        if token_mask is not None and token_mask.shape != (batch, keys):
            raise wrong_length(token_mask, batch, keys)
        bias = call.bias
        if bias is not None and "bias" not in self.mixer.honours:
            raise unsupported_bias(self.operator)
        if call.groups is not None and "bias" in self.mixer.honours:
            number, _, apart = call.groups
            hidden = apart * (number[:, None, :, None] != number[:, None, None, :]).to(k.dtype)
            bias = hidden if bias is None else bias + hidden
        if mask is not None:
            padding = padding_in(mask, batch)
            plain, causal = self._reads(mask, padding, causal, call.cross)
            if not plain:
                added = additive(mask, k.dtype)
                return token_mask, False, added if bias is None else bias + added
            token_mask = padding if token_mask is None else token_mask & padding
        return token_mask, causal, bias

    def _reads(self, mask: Tensor, padding: Tensor, causal: bool, cross: bool) -> tuple[bool, bool]:
        """Return whether padding and causality say all that a mask does, and whether it is causal."""
        window, chunked = self.settings["window"], self.settings["chunked"]
        if torch.compiler.is_compiling():  # compiled code cannot look into it
            known = None if cross else self.interface.masks_the_future
            causal = causal if known is None else known
            if not self.mixer.dense:
                assert_within(mask, padding, causal, window, cross, chunked, self.operator)
            return not self.mixer.dense, causal
        pattern = pattern_of(mask, padding, window, cross, chunked)
        plain = pattern.within and not (pattern.windowed and self.mixer.dense and "window" not in self.ignored)
        if not plain and "bias" not in self.mixer.honours:
            raise unsupported_mask(self.operator, mask)
        if pattern.causal is None:
            return plain, causal
        self.interface.masks_the_future = pattern.causal
        return plain, pattern.causal

    def _mix_with_state(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """Continue from the state in the cache, at a cost that does not grow with the tokens so far."""
        from segue.students.attention.cache import state_layer

        assert self.layer_idx is not None
        layer = state_layer(call.cache, self.layer_idx, lambda: self._padding(call))
        tokens = q.shape[2]
        seen = layer.seen + tokens
        kept = seen - layer.get_mask_sizes(tokens)[1]  # masks begin where the teacher's window does
        token_mask = causal_padding(call, kept, self.operator, self.settings["window"], self.settings["chunked"])
        if token_mask is not None and token_mask.shape[1] < kept:
            raise wrong_length(token_mask, q.shape[0], kept)
        if self.settings["window"] is None:  # a window hides more from token to token
            layer.hide(token_mask, tokens, self.operator)
        token_mask = None if token_mask is None else token_mask[:, -tokens:]
        if token_mask is not None and _may_ask(token_mask) and bool(token_mask.all()):
            token_mask = None  # a chunk has a mask even without padding, a padded batch for each token; both are slower with it
        state = layer.current(self.mixer)
        if state and tokens == 1:
            return layer.step(self.mixer, q, k, v, token_mask)
        y = self.mixer.prefill(q, k, v, token_mask, state)
        layer.append(k, v, token_mask, self.mixer)
        return y

    def _layer_to_continue(self, call: AttentionCall) -> Any:
        """Return the layer of the cache whose state one token continues, where no mask and nothing else has a say; or None."""
        alone = call.mask is None and call.token_mask is None and call.bias is None and call.causal is not False
        if not (alone and call.x.shape[1] == 1 and self.causal and self.mixer.recurrent):
            return None
        return layer_to_continue(call.cache, self.layer_idx)

    def _keeps_a_state(self, call: AttentionCall) -> bool:
        """Return whether the past is a state in the cache; else it is keys and values there."""
        if not self.mixer.recurrent or call.bias is not None:
            return False
        from segue.students.attention.cache import keeps_other_states

        return not keeps_other_states(call.cache, self.layer_idx)

    @staticmethod
    def _padding(call: AttentionCall) -> Tensor | None:
        return call.token_mask if call.mask is None else padding_in(call.mask, call.x.shape[0])

    def _mix_with_keys_and_values(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """Mix with all keys and values in the cache."""
        cache = getattr(call.cache, "self_attention_cache", call.cache)  # of an encoder-decoder model
        k, v = cache.update(k, v, self.layer_idx)
        filled = min(k.shape[2], int(cache.get_seq_length(self.layer_idx)))  # a static cache is longer
        k, v = k[:, :, :filled], v[:, :, :filled]
        cut = {name: x[..., :filled] for name in ("token_mask", "mask", "bias") if (x := getattr(call, name)) is not None}
        return self._mix(q, k, v, replace(call, **cut), self.causal if call.causal is None else call.causal)


def _may_ask(mask: Tensor) -> bool:
    """Return whether Python may read a mask: compiled code cannot, and for one token it would wait too long for a device."""
    return not torch.compiler.is_compiling() and (mask.shape[1] > 1 or mask.device.type == "cpu")


def _split(x: Tensor, heads: int) -> Tensor:
    """Split (batch, tokens, width) into (batch, heads, tokens, head size)."""
    batch, tokens, _ = x.shape
    return x.view(batch, heads, 1, -1) if tokens == 1 else x.view(batch, tokens, heads, -1).transpose(1, 2)


def _join(y: Tensor) -> Tensor:
    """Undo `_split`."""
    batch, _, tokens, _ = y.shape
    return y.reshape(batch, 1, -1) if tokens == 1 else y.transpose(1, 2).flatten(2)


def _linear_like(original: Projection | None) -> nn.Linear | None:
    if original is None:
        return None
    weight, bias = original
    return nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device=weight.device, dtype=weight.dtype)

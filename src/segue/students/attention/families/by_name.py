"""Attention modules that are read by the names of their parts and of the arguments of their forward.

Names propose, the proof decides: a module of any library whose parts and arguments have names of the field is read without
being registered, and one that computes something else is refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from segue.errors import StudentError
from segue.students.attention.families.multihead import is_self_attention
from segue.students.attention.families.names import (
    ASKS_FOR_WEIGHTS,
    FUSED,
    GATE,
    HARMLESS,
    HEAD_SIZE,
    HEADS,
    INNER_NORM,
    KEY_NORM,
    OUTPUT,
    OUTPUT_DROPOUT,
    QUERY_NORM,
    RESIDUAL_NORM,
    ROLE_OF,
    SCALE,
    find_apart,
    find_norm,
    find_number,
    find_part,
    find_whole,
    is_cross,
    longest_sequence,
    parameters_of,
)
from segue.students.attention.families.probes import some_angles, some_bias, some_masks
from segue.students.attention.families.rotations import is_by_halves, rotate_joined, rotate_token, turn
from segue.students.attention.masks import read_mask
from segue.students.attention.proof import MisreadError
from segue.students.attention.spec import (
    AttentionCall,
    AttentionInterface,
    AttentionSpec,
    Projection,
    projection,
    rotate,
)


class ByName(AttentionInterface):
    """Read a module by its names. What names leave open is decided by the proof: `choices` lists the ways to read it.

    A subclass for a module of your own overrides what is different there: `parse`, `unpack` or `rotate`.
    """

    name = "attention with projections of known names"
    reads_tokens = True  # by `unpack_token`; not where a subclass reads calls in another way
    by_halves: bool | None = None  # its own rotation is that of Llama; None before it was tried

    def __init__(self, module: nn.Module, **reading: Any) -> None:
        self.reading = {name: values[0] for name, values in self.choices(module).items()} | reading
        self.own_rotation: Callable[..., Any] | None = getattr(
            sys.modules.get(type(module).__module__), "apply_rotary_pos_emb", None
        )
        self.parameters = parameters_of(module)
        self.bias_scale = 1.0
        self.form: tuple[type, int] | None = None  # of the tuple or list that the module returns

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        called = "x" in {ROLE_OF.get(name) for name in parameters_of(module)}
        return called and (find_part(module, *FUSED) is not None or find_apart(module) is not None)

    @classmethod
    def candidates(cls, module: nn.Module) -> Iterator[AttentionInterface]:
        choices = cls.choices(module)
        for reading in product(*choices.values()):
            yield cls(module, **dict(zip(choices, reading, strict=True)))

    @classmethod
    def choices(cls, module: nn.Module) -> dict[str, tuple[Any, ...]]:
        """Return what names leave open, each with the possible answers, likeliest first."""
        parameters = parameters_of(module)
        roles = {ROLE_OF.get(name) for name in parameters}
        layouts = ("blocks", "per group") if (apart := find_apart(module)) is None else ("apart",)
        if apart is not None and projection(apart[0]).weight.shape[0] == 2 * _inputs(module):
            layouts = ("query and gate", "apart")  # as in Qwen3-Next, or where values are half as large as keys
        rotations: tuple[str, ...] = ("none",)
        if "freqs_cis" in parameters:
            rotations = ("complex",)
        elif "rotary" in roles:
            own = hasattr(sys.modules.get(type(module).__module__), "apply_rotary_pos_emb")
            rotations = ("own", "own on a part", "own of half the angles", "own of one sequence") if own else ("by halves",)
            # as in SmolLM3, and positions that DETR adds to queries and keys, and Llama 4
            rotations += ("not in this layer", "added", "complex by sequence")
        declared = getattr(module, "is_causal", None)
        declared = True if declared is None and "layer_past" in parameters else declared  # only decoders have it
        causal = (False, True) if declared is None and "mask" not in roles else (bool(declared),)
        norm = ("input", "output") if find_norm(module, INNER_NORM) is not None else ("none",)
        found, normed = find_number(module, *SCALE), find_norm(module, QUERY_NORM) is not None
        return {
            "layout": layouts,
            "rotation": rotations,
            "first": ("normed", "rotated") if normed and "rotary" in roles else ("normed",),
            "causal": causal,
            "norm": norm,
            "bias": ("added", "scaled", "none") if "bias" in roles else ("none",),
            "scale": _scales(found),
            "norm_over": _norm_axes(module),
        }

    def parse(self, module: nn.Module) -> AttentionSpec:
        if getattr(module, "rotary_value", False):  # of RoFormer
            raise MisreadError("It rotates its values too, for which operators have no counterpart.", off=0.0)
        heads, head_size = self._sizes(module)
        query, key, value = self._projections(module, heads, head_size)
        output = find_part(module, *OUTPUT)
        config = getattr(module, "config", None)
        query_norm, key_norm = find_norm(module, QUERY_NORM), find_norm(module, KEY_NORM)
        tokens = longest_sequence(config)
        window = find_whole(module if hasattr(module, "sliding_window") else config, "sliding_window")
        dropout, sinks = find_part(module, *OUTPUT_DROPOUT), getattr(module, "sinks", None)
        self.bias_scale = head_size**-0.5 if self.reading["bias"] == "scaled" else 1.0
        return AttentionSpec(
            heads=heads,
            head_size=head_size,
            query=query,
            key=key,
            value=value,
            value_size=find_whole(module, "v_head_dim"),
            output=None if output is None else projection(output),
            gate=self._gate(module, head_size),
            input_norm=find_norm(module, INNER_NORM) if self.reading["norm"] == "input" else None,
            query_norm=query_norm,
            key_norm=key_norm,
            output_norm=find_norm(module, INNER_NORM) if self.reading["norm"] == "output" else None,
            residual_norm=find_norm(module, RESIDUAL_NORM),
            norm_over=self.reading["norm_over"],
            norm_after_rotation=self.reading["first"] == "rotated",
            clip=find_number(module, "clip_qkv") or find_number(config, "clip_qkv"),
            scale=self._scale(module, head_size),
            softcap=find_number(module, "attn_logit_softcapping", "softcap"),
            sinks=sinks if isinstance(sinks, Tensor) else None,
            biased=self.reading["bias"] != "none",
            rotary=self.reading["rotation"] not in ("none", "not in this layer", "added"),
            causal=self.reading["causal"],
            dropout=dropout.p if isinstance(dropout, nn.Dropout) else 0.0,
            tokens=tokens,
            window=None if not window or (tokens is not None and window >= tokens) else window,
            layer=find_whole(module, "layer_idx", "layer_id"),
        )

    def _sizes(self, module: nn.Module) -> tuple[int, int]:
        heads, size = find_whole(module, *HEADS), find_whole(module, *HEAD_SIZE)
        config = getattr(module, "config", None)
        heads = heads or find_whole(config, *HEADS)
        apart = find_apart(module)
        if heads is None and (size is None or apart is None):
            raise MisreadError(f"The number of its heads is not found; it is looked for as {', '.join(HEADS)}.")
        width = None if apart is None else projection(apart[0]).weight.shape[0]
        if size is not None and width is not None:
            return width // (2 * size if self.reading["layout"] == "query and gate" else size), size
        assert heads is not None
        if width is None:
            fused = find_part(module, *FUSED)
            assert fused is not None
            size = size or projection(fused).weight.shape[1] // heads
            return heads, size
        return heads, width // heads

    def _projections(self, module: nn.Module, heads: int, size: int) -> tuple[Projection, Projection, Projection]:
        apart = find_apart(module)
        if apart is not None:
            q, k, v = (projection(part) for part in apart)
            if self.reading["layout"] == "query and gate":
                q = _halves(q, size)[0]
            return q, k, v if (factor := find_number(module, "v_scale")) is None else _scaled(v, factor)
        found = find_part(module, *FUSED)
        assert found is not None
        fused = projection(found)
        rows, queries = fused.weight.shape[0], heads * size
        if (apart_query := find_part(module, "q_attn")) is not None and rows == 2 * queries:  # GPT-2's cross-attention
            index = torch.arange(rows, device=fused.weight.device)
            return projection(apart_query), rows_of(fused, index[:queries]), rows_of(fused, index[queries:])
        if rows <= queries or (rows - queries) % (2 * size) or 2 * queries % (rows - queries):
            raise MisreadError(f"Its fused projection has {rows} rows, which {heads} heads of {size} do not explain.")
        keys = (rows - queries) // 2
        index = torch.arange(rows, device=fused.weight.device)
        if self.reading["layout"] == "per group":  # of query heads that share keys; as large as one head in GPT-NeoX
            groups = index.view(keys // size, -1, size)
            parts: tuple[Tensor, ...] = groups[:, :-2], groups[:, -2], groups[:, -1]
        else:
            parts = torch.split(index, [queries, keys, keys])
        q, k, v = (rows_of(fused, part.reshape(-1)) for part in parts)
        return q, k, v

    def _gate(self, module: nn.Module, size: int) -> Projection | None:
        apart, gate = find_apart(module), find_part(module, *GATE)
        if self.reading["layout"] == "query and gate" and apart is not None:
            return _halves(projection(apart[0]), size)[1]
        return None if gate is None else projection(gate)

    def _scale(self, module: nn.Module, head_size: int) -> float | None:
        """Return the factor of the logits, also where it is a divisor, or a factor of the keys (Falcon-H1)."""
        found, of_keys = find_number(module, *SCALE), find_number(module, "key_multiplier")
        if self.reading["scale"] == "none":
            return 1.0
        if self.reading["scale"] == "by head size":  # ESM scales its queries, and says 1.0
            found = None
        if self.reading["scale"] == "divided by":
            found = 1.0 / (found or 1.0)
        return found if of_keys is None else of_keys * (found or head_size**-0.5)

    def unpack(self, *args: Any, **kwargs: Any) -> AttentionCall:
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        roles: dict[str, Any] = {}
        for name, value in given.items():
            if value is None or value is False or name in HARMLESS:
                continue
            role = ROLE_OF.get(name)
            if name in ASKS_FOR_WEIGHTS:
                raise _refused(f"{name}={value!r}", "operators without softmax have no attention weights: leave it out.")
            if role is None or (role == "bias" and self.reading["bias"] == "none"):
                raise _refused(f"the argument {name!r}", "its meaning is unknown: register an interface that reads it.")
            roles[role] = roles[role] + value if role == "bias" and role in roles else roles.get(role, value)
        return self._call(roles, of_pairs="attn_mask" in given)

    def __init_subclass__(cls) -> None:
        own = (getattr(cls, name) is getattr(ByName, name) for name in ("unpack", "_call", "rotate", "result"))
        cls.reads_tokens = all(own)

    def unpack_token(self, arguments: dict[str, Any]) -> tuple[Tensor, Any, Any] | None:
        x = rotary = cache = None
        if not self.reads_tokens or self.reading["rotation"] == "added":
            return None
        for name, value in arguments.items():
            if value is None or value is False or name in HARMLESS:
                continue
            if (role := ROLE_OF.get(name)) == "x" and x is None:
                x = value
            elif role == "rotary" and rotary is None:
                rotary = value
            elif role == "cache" and cache is None:
                cache = value
            else:
                return None
        return None if x is None or cache is None else (x, rotary, cache)

    def _call(self, roles: dict[str, Any], of_pairs: bool) -> AttentionCall:
        x, keys, values = roles["x"], roles.get("keys", roles.get("memory")), roles.get("values")
        cross = keys is not None and not is_self_attention(self, keys, x)
        keys = keys if cross else None
        added = self.reading["rotation"] == "added"
        if added:  # to queries and keys, not to values
            values = x if keys is None else keys
            x = x + roles["rotary"] if "rotary" in roles else x
            keys = keys + roles["memory positions"] if "memory positions" in roles else keys
        of_memory = cross and "encoder_attention_mask" in self.parameters
        mask = roles.get("memory mask" if of_memory else "mask")
        tokens, pairs = (None, None) if mask is None else read_mask(mask, x.shape[0], of_pairs=of_pairs)
        return AttentionCall(
            x,
            tokens,
            roles.get("causal") if pairs is None else None,
            None if added else roles.get("rotary"),
            roles.get("cache"),
            pairs,
            bias=roles["bias"] * self.bias_scale if "bias" in roles else None,
            keys=keys,
            values=values,
            cross=cross,
        )

    def rotate(self, q: Tensor, k: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        rotation = self.reading["rotation"]
        if rotation == "not in this layer":
            return q, k
        if q.shape[2] == 1 and self._rotates_tokens(q, rotary):
            return rotate_token(q, k, *rotary)
        if rotation in ("complex", "complex by sequence"):
            return turn(q, rotary), turn(k, rotary)
        if rotation == "by halves" or self.own_rotation is None:
            return rotate(q, *rotary), rotate(k, *rotary)
        size = rotary[0].shape[-1] if rotation == "own on a part" else q.shape[-1]
        of_all = {"unsqueeze_dim": 0} if rotation == "own of one sequence" else {}  # one for all sequences (Pixtral)
        first = self.own_rotation(q[..., :size], k[..., :size], *rotary, **of_all)
        if size == q.shape[-1]:
            return first[0], first[1]
        return torch.cat([first[0], q[..., size:]], dim=-1), torch.cat([first[1], k[..., size:]], dim=-1)

    def rotate_joined(self, x: Tensor, heads: int, rotary: Any) -> Tensor:
        if self._rotates_tokens(x, rotary):
            return rotate_joined(x, *rotary)
        return super().rotate_joined(x, heads, rotary)

    def _rotates_tokens(self, q: Tensor, rotary: Any) -> bool:
        """Return whether a decoding step may rotate its queries and keys together, by halves."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if self.by_halves is None:
            own = self.reading["rotation"] == "own" and self.own_rotation is not None and is_by_halves(self.own_rotation)
            self.by_halves = own or self.reading["rotation"] == "by halves"
        cos = rotary[0]
        return self.by_halves and type(q) is Tensor and cos.dim() == 3 and cos.shape[-1] == q.shape[-1] and cos.dtype == q.dtype

    def pack(self, y: Tensor) -> Any:
        if self.form is None:
            return y
        kind, length = self.form
        return kind([y, *(None,) * (length - 1)])

    def probes(self, module: nn.Module, spec: AttentionSpec, x: Tensor) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        given = self.arguments(spec, x)
        of_mask = None
        for name, parameter in parameters_of(module).items():
            role = ROLE_OF.get(name)
            needed = parameter.default is inspect.Parameter.empty
            if name in given:
                continue
            if role == "x" or (role == "keys" and needed):
                given[name] = x
            elif role == "values" and needed:
                width = spec.value.weight.shape[1]
                given[name] = x.repeat(1, 1, -(-width // spec.width))[..., :width]
            elif role == "rotary" and self.reading["rotation"] == "added":
                given[name] = x.flip(1)
            elif role == "rotary":
                given[name] = some_angles(module, spec, x, self.reading["rotation"])
            elif role == "bias" and spec.biased:
                given[name] = some_bias(spec, x, len(given))
            elif name == "position_ids":
                given[name] = torch.arange(x.shape[1], device=x.device)[None].expand(x.shape[0], -1)
            elif role == "mask":
                of_mask = name
            elif role in ("memory", "memory positions") and is_cross(module):
                given[name] = x.flip(1 if role == "memory" else 2)
            elif needed and role is None:
                raise MisreadError(f"Its forward needs the argument {name!r}, whose meaning is unknown.")
            elif needed:
                given[name] = None
        if of_mask is None:
            yield (), given
            return
        for mask in some_masks(x, spec.causal):
            yield (), {**given, of_mask: mask}

    def arguments(self, spec: AttentionSpec, x: Tensor) -> dict[str, Any]:
        """Return arguments of a probe that only a subclass knows."""
        return {}

    def see_output(self, output: Any) -> None:
        self.form = (type(output), len(output)) if type(output) in (tuple, list) else None


def _scales(found: float | None) -> tuple[str, ...]:
    """Return what a number that is named like a scale may mean."""
    if found is None:
        return ("by head size", "none")
    return ("times", "by head size") if found == 1.0 else ("times", "divided by") if found > 1 else ("times",)


def _inputs(module: nn.Module) -> int:
    """Return how wide the outputs of all heads are; 0 where there is no output projection."""
    output = find_part(module, *OUTPUT)
    return 0 if output is None else projection(output).weight.shape[1]


def _norm_axes(module: nn.Module) -> tuple[str, ...]:
    """Return what norms of queries and keys may see: each head, all at once (OLMo 2), or heads before tokens (StableLM)."""
    norm = find_norm(module, QUERY_NORM)
    weight, wide = getattr(norm, "weight", None), _inputs(module)
    if not isinstance(weight, Tensor):
        return ("head",) if norm is None else ("head", "heads first")
    return ("width",) if weight.shape == (wide,) and wide != find_whole(module, *HEAD_SIZE) else ("head",)


def _halves(fused: Projection, size: int) -> tuple[Projection, Projection]:
    """Split a projection whose heads are each a query and a gate, one after the other."""
    index = torch.arange(fused.weight.shape[0], device=fused.weight.device).view(-1, 2, size)
    return rows_of(fused, index[:, 0].reshape(-1)), rows_of(fused, index[:, 1].reshape(-1))


def _scaled(part: Projection, factor: float) -> Projection:
    return Projection(part.weight * factor, None if part.bias is None else part.bias * factor)


def rows_of(fused: Projection, rows: Tensor) -> Projection:
    """Return some rows of a projection."""
    return Projection(fused.weight[rows], None if fused.bias is None else fused.bias[rows])


def _refused(got: str, hint: str) -> StudentError:
    return StudentError(f"an attention student got {got}.", "Its interface does not read it, and would leave it out.", hint)

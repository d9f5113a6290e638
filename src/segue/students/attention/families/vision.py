"""Attention of vision models (timm, torchvision): on grids, in blocks and in windows, with relative positions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from segue.students.attention.families.arrangements import Window, arrange, example, groups_in
from segue.students.attention.families.by_name import ByName
from segue.students.attention.families.names import FUSED, HEADS, ROLE_OF, find_apart, find_part, find_whole, parameters_of
from segue.students.attention.families.probes import some_bias
from segue.students.attention.families.relative import ScaledUnitLength, UnitLength, relative_bias
from segue.students.attention.proof import MisreadError
from segue.students.attention.spec import AttentionCall, AttentionSpec, Projection, projection

IN_TWO = (("q", "kv"), ("to_q", "to_kv"), ("qk", "v"))
SHARED_BIAS = ("shared_rel_pos", "shared_rel_pos_bias")
SIZE = ("size", "feat_size")  # of the image, where it comes as an argument
SIDES = ("height", "width")  # or as two


class Reduction(nn.Module):
    """Make fewer tokens for keys and values: a convolution with a stride over the image, which may be pooled before (PVT)."""

    def __init__(self, pool: nn.Module | None, convolution: nn.Conv2d, norm: nn.Module, act: nn.Module | None) -> None:
        super().__init__()
        self.tokens = 4 * convolution.stride[0] * convolution.stride[1]  # of a proof: so that several keys are left
        self.pool, self.convolution, self.norm, self.act = pool, convolution, norm, act

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        image = x.transpose(1, 2).reshape(x.shape[0], -1, *size)
        image = image if self.pool is None else self.pool(image)
        x = self.norm(self.convolution(image).flatten(2).transpose(1, 2))
        return x if self.act is None else self.act(x)


class Vision(ByName):
    """Read a module of a vision model; `arrangement` says how it holds tokens, `asking` whether only the first one asks."""

    name = "attention of a vision model"

    def __init__(self, module: nn.Module, **reading: Any) -> None:
        super().__init__(module, **reading)
        of_file = sys.modules.get(type(module).__module__)
        self.own_timm_rotation: Callable[..., Tensor] | None = getattr(of_file, "apply_rot_embed_cat", None)
        self.by_halves = bool(getattr(module, "rotate_half", False))
        self.prefix = find_whole(module, "num_prefix_tokens") or 0
        self.window = _window(module)
        self.in_windows = hasattr(module, "window_size") or hasattr(module, "relative_position_bias")
        self.masks_twice = hasattr(module, "continuous_position_bias_mlp")  # Hugging Face's Swin v2 adds its mask twice
        self.name_of_x = next(name for name in self.parameters if ROLE_OF.get(name) == "x")

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        called = "x" in {ROLE_OF.get(name) for name in parameters_of(module)}
        return called and (ByName.matches(module) or _in_two(module) is not None)

    @classmethod
    def choices(cls, module: nn.Module) -> dict[str, tuple[Any, ...]]:
        choices = super().choices(module)
        arrangements: tuple[str, ...] = ("channels last", "channels first", "blocks", "tokens")
        if isinstance(find_part(module, *FUSED), nn.Conv2d):
            arrangements = ("channels first",)
        elif _window(module) is not None:
            arrangements = ("windows",)
        elif "rope" in parameters_of(module):
            arrangements = ("tokens",)
        inside = ("heads first", "heads last")  # how the outputs of the heads are joined; NesT has them last
        causal = (bool(getattr(module, "is_causal", False)),)
        choices = {**choices, "causal": causal, "bias": ("none",)}
        return {**choices, "arrangement": arrangements, "asking": ("all", "the first"), "heads": inside}

    def parse(self, module: nn.Module) -> AttentionSpec:
        arrangement, heads = self.reading["arrangement"], self.reading["heads"]
        if heads == "heads last" and arrangement != "blocks":
            raise MisreadError("Its heads are joined as usual.")
        spec = super().parse(module)
        gate, bias, dropout = find_part(module, "gate"), relative_bias(module), getattr(module, "dropout", 0.0)
        spec = replace(
            spec,
            gate=None if gate is None else projection(gate),
            bias=bias,
            reduction=_reduction(module),
            biased="shared_rel_pos" in self.parameters and bias is None,  # BEiT's argument is hardly ever used
            dropout=dropout if isinstance(dropout, float) else spec.dropout,
        )
        if spec.reduction is not None:
            spec = replace(spec, input_norm=None, output_norm=None)
        logit_scale = getattr(module, "logit_scale", None)
        if isinstance(logit_scale, Tensor):
            spec = replace(spec, query_norm=ScaledUnitLength(logit_scale), key_norm=UnitLength(), scale=1.0)
        if heads == "heads last" and spec.output is not None:
            columns = torch.arange(spec.heads * spec.head_size, device=spec.output.weight.device)
            columns = columns.view(spec.head_size, spec.heads).T.flatten()
            spec = replace(spec, output=spec.output._replace(weight=spec.output.weight[:, columns]))
        return spec

    def _sizes(self, module: nn.Module) -> tuple[int, int]:
        parts, heads = _in_two(module), find_whole(module, *HEADS)
        if parts is None or heads is None:
            return super()._sizes(module)
        rows = [projection(part).weight.shape[0] for part in parts]
        return heads, min(rows) // heads

    def _projections(self, module: nn.Module, heads: int, size: int) -> tuple[Projection, Projection, Projection]:
        """Read them also from two projections, and with biases beside a fused one."""
        parts = _in_two(module)
        if parts is not None:
            q, k, v = _three(*(projection(part) for part in parts))
        else:
            q, k, v = super()._projections(module, heads, size)
        own = [getattr(module, name, None) for name in ("q_bias", "k_bias", "v_bias")]
        if isinstance(own[0], Tensor):  # parameters beside a fused projection; keys have a buffer of zeros
            q, k, v = (
                Projection(part.weight, bias if isinstance(bias, nn.Parameter) else None)
                for part, bias in zip((q, k, v), own, strict=True)
            )
        if isinstance(getattr(module, "logit_scale", None), Tensor) and k.bias is not None:  # torchvision sets it to zero
            k = Projection(k.weight, torch.zeros_like(k.bias))
        return q, k, v

    def unpack(self, *args: Any, **kwargs: Any) -> AttentionCall:
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        size = next((given.pop(name) for name in SIZE if name in given), None)
        if given.keys() >= set(SIDES):
            size = (given.pop("height"), given.pop("width"))
        shared = next((given.pop(name) for name in SHARED_BIAS if given.get(name) is not None), None)
        x, back, groups = arrange(given[self.name_of_x], self.reading["arrangement"], self.window, size)
        masks = [name for name, value in given.items() if ROLE_OF.get(name) == "mask" and isinstance(value, Tensor)]
        if masks and self.in_windows and given[masks[0]].dim() == 3:
            groups = groups_in(given.pop(masks[0]), x.shape[0])
            groups = groups._replace(apart=2 * groups.apart) if self.masks_twice else groups
        call = super().unpack(**{**given, self.name_of_x: x})
        if self.reading["asking"] == "the first":
            call = replace(call, x=x[:, :1], keys=x, cross=True)
        return replace(call, bias=shared, groups=groups, size=size, extra=back)

    def rotate(self, q: Tensor, k: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(rotary, Tensor) or self.own_timm_rotation is None:
            return super().rotate(q, k, rotary)
        q, k = (
            torch.cat([x[:, :, : self.prefix], self.own_timm_rotation(x[:, :, self.prefix :], rotary, half=self.by_halves)], 2)
            for x in (q, k)
        )
        return q, k

    def result(self, y: Tensor, call: AttentionCall, bias: Tensor | None) -> Any:
        return self.pack(call.extra(y) if self.reading["asking"] == "all" else y)

    def probes(self, module: nn.Module, spec: AttentionSpec, x: Tensor) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        given: dict[str, Any] = {self.name_of_x: example(x, self.reading["arrangement"], self.window)}
        tokens = x.shape[1]
        if "rope" in self.parameters:
            angles = torch.linspace(0.0, 3.0, (tokens - self.prefix) * 2 * spec.head_size, device=x.device, dtype=x.dtype)
            given["rope"] = angles.view(tokens - self.prefix, -1)
        if spec.biased:
            given["shared_rel_pos"] = some_bias(spec, x, 0)
        for name in SIZE:
            if name in self.parameters:
                grid = given[self.name_of_x]
                given[name] = tuple(grid.shape[1:3])
                given[self.name_of_x] = grid.flatten(1, 2)
        if set(SIDES) <= self.parameters.keys():
            grid = given[self.name_of_x]
            given |= dict(zip(SIDES, grid.shape[1:3], strict=True))
            given[self.name_of_x] = grid.flatten(1, 2)
        yield (), given


def _window(module: nn.Module) -> Window | None:
    """Return the windows that a module cuts itself: torchvision's Swin, and Twins."""
    size, shift = getattr(module, "window_size", None), getattr(module, "shift_size", None)
    if size is not None and shift is not None:
        return Window((int(size[0]), int(size[1])), (int(shift[0]), int(shift[1])))
    side = find_whole(module, "ws")
    return Window((side, side)) if side is not None and "size" in parameters_of(module) else None


def _reduction(module: nn.Module) -> Reduction | None:
    if not any(name in parameters_of(module) for name in (*SIZE, *SIDES)):
        return None
    inside = module._modules.get("sequence_reduction")
    held = inside._modules if inside is not None and not isinstance(inside, nn.Conv2d) else module._modules  # Segformer
    convolution = held.get("sr", held.get("sequence_reduction"))
    norm = held.get("norm", held.get("layer_norm"))
    if not isinstance(convolution, nn.Conv2d) or norm is None:
        return None
    return Reduction(held.get("pool"), convolution, norm, held.get("act"))


def _in_two(module: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    for names in IN_TWO:
        query, rest = (find_part(module, name) for name in names)
        if query is not None and rest is not None and find_apart(module) is None:
            return query, rest
    return None


def _three(first: Projection, last: Projection) -> tuple[Projection, Projection, Projection]:
    """Split the larger of two projections: keys and values, or queries and keys."""
    if len(first.weight) < len(last.weight):
        return first, *_halves(last)
    return *_halves(first), last


def _halves(fused: Projection) -> tuple[Projection, Projection]:
    biases = (None, None) if fused.bias is None else fused.bias.chunk(2)
    a, b = (Projection(weight, bias) for weight, bias in zip(fused.weight.chunk(2), biases, strict=True))
    return a, b

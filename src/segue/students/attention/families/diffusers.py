"""Attention of diffusers: what a module computes is in its processor, so that is what a reading goes by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from segue.errors import StudentError
from segue.students.attention.proof import MisreadError
from segue.students.attention.spec import AttentionCall, AttentionInterface, AttentionSpec, projection


@dataclass(frozen=True)
class Processor:
    """How a processor reads the arguments of a call."""

    text: Literal["keys", "first", "last", "joined"] = "keys"  # cross-attention, or where its tokens go beside the image's
    masks: bool = True
    rotation: str | None = None  # the argument with cos and sin, which turn neighbouring features
    scale: bool = False  # the module's own, instead of 1 / sqrt(head size)
    images: bool = False  # also (batch, channels, height, width), with a residual and a factor of the output


PROCESSORS = {
    "AttnProcessor": Processor(images=True, scale=True),
    "AttnProcessor2_0": Processor(images=True),
    "HunyuanAttnProcessor2_0": Processor(images=True, rotation="image_rotary_emb"),
    "SanaAttnProcessor2_0": Processor(images=True),
    "WanAttnProcessor": Processor(rotation="rotary_emb"),
    "JointAttnProcessor2_0": Processor("last", masks=False),
    "AuraFlowAttnProcessor2_0": Processor("first", masks=False, scale=True),
    "FluxAttnProcessor": Processor("first", rotation="image_rotary_emb"),
    "CogVideoXAttnProcessor2_0": Processor("joined", rotation="image_rotary_emb"),
}
WITHOUT_SOFTMAX = ("SanaLinearAttnProcessor2_0", "SanaMultiscaleAttnProcessor2_0")


class Diffusers(AttentionInterface):
    """An attention module of diffusers with one of its own processors."""

    name = "attention of diffusers"

    def __init__(self, module: nn.Module) -> None:
        name = type(module.processor).__name__
        self.processor = PROCESSORS.get(name, Processor())
        self.heads = int(module.heads)  # type: ignore[arg-type]
        self.adds_input = self.processor.images and bool(getattr(module, "residual_connection", False))
        self.divisor = float(getattr(module, "rescale_output_factor", 1.0)) if self.processor.images else 1.0
        self.rotates_keys = not (name.startswith("Hunyuan") and module.is_cross_attention)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        held = getattr(module, "processor", None) is not None and hasattr(module, "heads")
        return held and isinstance(getattr(module, "to_q", None), nn.Linear)

    def parse(self, module: nn.Module) -> AttentionSpec:
        name = type(module.processor).__name__
        if name in WITHOUT_SOFTMAX:
            raise MisreadError(f"Its processor is {name}, linear attention: there is no softmax to replace.", off=0.0)
        if name not in PROCESSORS:
            raise MisreadError(f"Its processor is {name}, which Segue does not read.", off=0.0)
        if getattr(module, "fused_projections", False):
            raise MisreadError("Its projections are fused: call unfuse_qkv_projections() of the model first.", off=0.0)
        for part in ("spatial_norm", "norm_cross"):
            if getattr(module, part, None) is not None:
                raise MisreadError(f"It has {part!r}, for which the spec has no field.", off=0.0)
        if self.processor.text == "keys" and getattr(module, "add_k_proj", None) is not None:
            raise MisreadError("It adds a second attention, to images, to its output (add_k_proj).", off=0.0)
        spec = self._stream(module, "to_q", "to_k", "to_v", "norm_q", "norm_k")
        out, group_norm = getattr(module, "to_out", None), getattr(module, "group_norm", None)
        spec = replace(
            spec,
            output=None if out is None else projection(out[0]),
            dropout=0.0 if out is None else out[1].p,
            input_norm=None if group_norm is None else OverChannels(group_norm),
        )
        if getattr(module, "add_q_proj", None) is None:
            return spec
        context = self._stream(module, "add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k")
        out = getattr(module, "to_add_out", None)
        return replace(spec, context=replace(context, output=None if out is None else projection(out)))

    def _stream(self, module: nn.Module, *names: str) -> AttentionSpec:
        query, key, value = (projection(module.get_submodule(name)) for name in names[:3])
        query_norm, key_norm = (getattr(module, name, None) for name in names[3:])
        size = key.weight.shape[0] // self.heads
        weight = getattr(query_norm, "weight", None)
        return AttentionSpec(
            heads=self.heads,
            head_size=size,
            query=query,
            key=key,
            value=value,
            query_norm=query_norm,
            key_norm=key_norm,
            norm_over="width" if isinstance(weight, Tensor) and weight.numel() > size else "head",
            scale=float(module.scale) if self.processor.scale else None,  # type: ignore[arg-type]
            rotary=self.processor.rotation is not None,
            cross=self.processor.text == "keys" and bool(getattr(module, "is_cross_attention", False)),
        )

    def unpack(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *others: Any,
        **named: Any,
    ) -> AttentionCall:
        how, text = self.processor, encoder_hidden_states
        if others and how.rotation is not None and how.rotation not in named:
            named, others = {**named, how.rotation: others[0]}, others[1:]
        rotary = None if how.rotation is None else named.pop(how.rotation, None)
        named.pop("temb", None)  # only a spatial norm reads it, and `parse` refuses that
        if others or any(value is not None for value in named.values()):
            found = next((repr(name) for name, value in named.items() if value is not None), "in the fourth place")
            raise _refused(f"the argument {found}", "leave it out, or register an interface that reads it.")
        if attention_mask is not None and not how.masks:
            raise _refused("an attention_mask", "its processor does not read one: leave it out.")
        x = hidden_states
        if x.dim() == 4 and how.images:
            x = x.flatten(2).transpose(1, 2)
        if how.text == "joined":
            if text is None:
                raise _refused("no encoder_hidden_states", "its processor needs them.")
            x = torch.cat([text, x], dim=1)
        beside = how.text in ("first", "last")
        return AttentionCall(
            x,
            rotary=None if rotary is None else (*rotary, text.shape[1] if how.text == "joined" and text is not None else 0),
            mask=self._mask(attention_mask, x.shape[0], (x if text is None or how.text == "joined" else text).shape[1]),
            keys=text if how.text == "keys" else None,
            cross=how.text == "keys" and text is not None,
            context=text if beside else None,
            context_first=how.text == "first",
            extra=text.shape[1] if how.text == "joined" and text is not None else hidden_states,
        )

    def _mask(self, mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
        """Read what is added to the logits: (batch, 1, keys), or the same for every head, (batch * heads, queries, keys)."""
        if mask is None:
            return None
        if self.processor.text == "first":  # given to torch's own function as it is
            return mask[(None,) * (4 - mask.dim())]
        if mask.dim() != 3 or mask.shape[-1] != keys or mask.shape[0] not in (batch, batch * self.heads):
            raise _refused(f"an attention_mask of shape {tuple(mask.shape)}", f"give one of (batch, 1, keys): {keys} keys.")
        mask = mask[:, None] if mask.shape[0] == batch else mask.view(batch, self.heads, *mask.shape[1:])
        return mask

    def rotate(self, q: Tensor, k: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        cos, sin, start = rotary
        cos, sin = (part.to(q.device).reshape(-1, q.shape[-1]) for part in (cos, sin))
        turned = _turn(q, cos, sin, start)
        return turned, _turn(k, cos, sin, start) if self.rotates_keys else k

    def result(self, y: Tensor, call: AttentionCall, bias: Tensor | None) -> Any:
        if self.processor.text == "joined":
            return y[:, call.extra :], y[:, : call.extra]
        given: Tensor = call.extra
        if given.dim() == 4 and self.processor.images:
            y = y.transpose(1, 2).reshape(y.shape[0], -1, *given.shape[2:])
        y = y + given if self.adds_input else y
        return y if self.divisor == 1.0 else y / self.divisor

    def residual(self, call: AttentionCall) -> Tensor | None:
        return call.extra / self.divisor if self.adds_input else None

    def probes(self, module: nn.Module, spec: AttentionSpec, x: Tensor) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        how, batch, tokens = self.processor, *x.shape[:2]
        given: dict[str, Any] = {}
        texts = 0
        if spec.context is not None or spec.cross or how.text == "joined":
            width = (spec.context or spec).query.weight.shape[1] if not spec.cross else spec.key.weight.shape[1]
            texts = tokens - 2
            text = torch.arange(1.0 * batch * texts * width, device=x.device).cos().view(batch, texts, width)
            given["encoder_hidden_states"] = text.to(x.dtype)
        if how.rotation is not None and not spec.cross:
            count = tokens + (texts if spec.context is not None else 0)
            angles = torch.linspace(0.0, 3.0, count * spec.head_size // 2, device=x.device).view(count, -1)
            turns = tuple(part.repeat_interleave(2, dim=-1) for part in (angles.cos(), angles.sin()))
            shape = (1, count, 1, -1) if how.rotation == "rotary_emb" else (count, -1)
            given[how.rotation] = tuple(part.view(shape) for part in turns)
        if how.images and spec.input_norm is not None:
            yield (x.transpose(1, 2).reshape(batch, -1, 2, tokens // 2),), given
        elif how.masks and how.text == "keys" and how.rotation is None:
            mask = torch.zeros(batch, 1, texts or tokens, dtype=x.dtype, device=x.device)
            mask[-1, :, -2:] = -10000.0
            yield (x,), {**given, "attention_mask": mask}
        else:
            yield (x,), given


class OverChannels(nn.Module):
    """A norm of (batch, channels, tokens), which takes and returns (batch, tokens, channels)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.transpose(1, 2))
        return y.transpose(1, 2)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, start: int) -> Tensor:
    """Turn each pair of neighbouring features of the tokens from `start` on."""
    kept, turned = x[:, :, :start], x[:, :, start:].float()
    crossed = torch.stack([-turned[..., 1::2], turned[..., ::2]], dim=-1).flatten(-2)
    y = (turned * cos + crossed * sin).to(x.dtype)
    return torch.cat([kept, y], dim=2) if start else y


def _refused(got: str, hint: str) -> StudentError:
    return StudentError(f"a student of an attention of diffusers got {got}.", "Its interface does not read it.", hint)

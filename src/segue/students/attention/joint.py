"""Joint attention: two streams with projections of their own, whose tokens are mixed together (SD3, FLUX)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from segue.students.attention.mixer import Mixer
from segue.students.attention.module import Attention
from segue.students.attention.spec import AttentionCall, AttentionInterface, AttentionSpec
from segue.students.initialisation import Original


def attention_module(spec: AttentionSpec, interface: AttentionInterface, mixer: Mixer) -> Attention:
    """Build the student of an attention module, of one stream or two."""
    return Attention(spec, interface, mixer) if spec.context is None else JointAttention(spec, interface, mixer)


class JointAttention(Attention):
    """Project each stream by itself, mix the tokens of both, and return both; a call without a context has one stream."""

    def __init__(self, spec: AttentionSpec, interface: AttentionInterface, mixer: Mixer) -> None:
        super().__init__(spec, interface, mixer)
        assert spec.context is not None
        self.context = Attention(spec.context, interface, _Shared(mixer.uses))

    def originals(self, spec: AttentionSpec) -> Iterator[tuple[str, Original]]:
        yield from super().originals(spec)
        assert spec.context is not None
        yield from ((f"context.{name}", original) for name, original in self.context.originals(spec.context))

    def attention_spec(self) -> AttentionSpec:
        return replace(super().attention_spec(), context=self.context.attention_spec())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self.interface.unpack(*args, **kwargs)
        if call.context is None:
            return super().forward(*args, **kwargs)
        streams = [(self, call.x), (self.context, call.context)]
        if call.context_first:
            streams.reverse()
        # (batch, heads, tokens of both, head size); rotations are of all tokens
        parts = [stream.project(x, AttentionCall(x)) for stream, x in streams]
        q, k, v = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        if call.rotary is not None and self.query is not None and self.key is not None:
            q, k = self.interface.rotate(q, k, call.rotary)
        y = self._mix(q, k, v, call, causal=False)
        both = torch.split(y.transpose(1, 2).flatten(2), [x.shape[1] for _, x in streams], dim=1)
        left = [stream.leave(y, x) for (stream, x), y in zip(streams, both, strict=True)]
        return tuple(reversed(left)) if call.context_first else tuple(left)


class _Shared(Mixer):
    """Stand in the context for the mixer of both streams."""

    def __init__(self, uses: tuple[str, ...]) -> None:
        super().__init__()
        self.uses = uses

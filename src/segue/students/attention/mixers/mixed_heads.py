"""Mixed heads: softmax attention in some heads, another operator in the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from segue.border import Count, checked
from segue.errors import StudentError
from segue.sites import Site, name_matches
from segue.students.attention.mixer import Mixer, State
from segue.students.attention.mixers.sliding_window import SlidingWindowMixer
from segue.students.attention.mixers.softmax import Softmax
from segue.students.attention.mixers.windowed_linear import WindowedLinear
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec, Projection
from segue.students.initialisation import CopyMatching

__all__ = ["MixedHeads"]

EVERYTHING = 2**40  # a window over any sequence


class Heads(nn.Module):
    """Some of the query heads, with the key heads that they use.

    Where they use some key heads more often than others, each of them gets a key head of its own, a copy.
    """

    queries: Tensor
    keys: Tensor

    def __init__(self, heads: Sequence[int], spec: AttentionSpec) -> None:
        super().__init__()
        group = spec.heads // spec.key_heads
        used = [head // group for head in heads]
        shared = sorted(set(used))
        keys = shared if len({used.count(key) for key in shared}) == 1 else used
        self.indices = list(heads), keys  # of queries and keys, also where buffers have no values
        self.register_buffer("queries", torch.tensor(heads), persistent=False)
        self.register_buffer("keys", torch.tensor(keys), persistent=False)

    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        """Describe them as an attention module of their own."""
        queries, keys = self.indices
        query = _rows(spec.query, spec.heads, queries)
        key, value = (_rows(part, spec.key_heads, keys) for part in (spec.key, spec.value))
        return replace(spec, heads=len(queries), query=query, key=key, value=value, sinks=None)

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take their queries, keys and values."""
        return q.index_select(1, self.queries), *self.keys_and_values(k, v)

    def keys_and_values(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take their keys and values."""
        return k.index_select(1, self.keys), v.index_select(1, self.keys)

    def bias(self, bias: Tensor | None) -> dict[str, Tensor]:
        """Take their part of what is added to the logits."""
        if bias is None:
            return {}
        return {"bias": bias if bias.shape[1] == 1 else bias.index_select(1, self.queries)}


class MixedHeadsMixer(Mixer):
    """Softmax in the kept heads, another mixer in the others.

    The state of the kept heads has all of their keys and values, so it grows with the text, unless the teacher has a window.
    """

    supports_causal = True
    recurrent = True
    order: Tensor

    def __init__(self, kept: Heads, others: Heads, mixer: Mixer, spec: AttentionSpec) -> None:
        super().__init__()
        self.kept_heads, self.other_heads = kept, others
        self.kept = Softmax().mixer(replace(spec, sinks=None))
        self.past = SlidingWindowMixer(spec.window or EVERYTHING, 0, spec.logit_scale, spec.softcap)  # the same, with a state
        self.others = mixer
        self.windowed = spec.window is not None
        for name in ("supports_causal", "supports_cross", "recurrent", "honours"):
            setattr(self, name, getattr(mixer, name))
        self.register_buffer("order", torch.cat([kept.queries, others.queries]).argsort(), persistent=False)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool, bias: Tensor | None = None
    ) -> Tensor:
        softmax = self.past if self.windowed else self.kept
        kept = softmax(*self.kept_heads.of(q, k, v), token_mask, causal, **self.kept_heads.bias(bias))
        others = self.others(*self.other_heads.of(q, k, v), token_mask, causal, **self.other_heads.bias(bias))
        return self._join(kept, others)

    def mix_across(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, **bias: Tensor) -> Tensor:
        added = bias.get("bias")
        kept = self.kept.mix_across(*self.kept_heads.of(q, k, v), token_mask, **self.kept_heads.bias(added))
        others = self.others.mix_across(*self.other_heads.of(q, k, v), token_mask, **self.other_heads.bias(added))
        return self._join(kept, others)

    def mix_chunk(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> Tensor:
        kept = self.past.mix_chunk(*self.kept_heads.of(q, k, v), token_mask, _part(state, "kept"))
        others = self.others.mix_chunk(*self.other_heads.of(q, k, v), token_mask, _part(state, "others"))
        return self._join(kept, others)

    def accumulate(self, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State | None) -> State:
        kept, others = self.kept_heads.keys_and_values(k, v), self.other_heads.keys_and_values(k, v)
        past = self.past.accumulate(*kept, token_mask, None if state is None else _part(state, "kept"))
        rest = self.others.accumulate(*others, token_mask, None if state is None else _part(state, "others"))
        return _whole(past, rest)

    def step(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        kept, past = self.past.step(*self.kept_heads.of(q, k, v), token_mask, _part(state, "kept"))
        others, rest = self.others.step(*self.other_heads.of(q, k, v), token_mask, _part(state, "others"))
        return self._join(kept, others), _whole(past, rest)

    def _join(self, kept: Tensor, others: Tensor) -> Tensor:
        return torch.cat([kept, others], dim=1).index_select(1, self.order)


@checked
@dataclass(frozen=True, kw_only=True)
class MixedHeads(Operator):
    """Softmax attention in the heads `keep`, another operator in the others.

    `keep` has the indices of query heads, for all sites, or a mapping from layers to them: {3: (0, 5), 4: ()}. A key is the
    number of a layer or a pattern over names of sites; the first that fits a site counts, and one must.
    """

    cost = "n² d in kept heads"
    paper = "https://arxiv.org/abs/2410.10819"
    mixer_class = MixedHeadsMixer

    operator: Operator = field(default_factory=WindowedLinear)
    keep: tuple[Count, ...] | Mapping[Count | str, tuple[Count, ...]] = ()

    def __post_init__(self) -> None:
        if isinstance(self.keep, Mapping):  # as it is written to files
            object.__setattr__(self, "keep", {str(key): tuple(heads) for key, heads in self.keep.items()})
        if (self.operator.init, self.operator.ignore) != (CopyMatching(), ()):
            raise StudentError(
                "MixedHeads(operator=...) must not have init or ignore.",
                f"It has init={self.operator.init!r} and ignore={self.operator.ignore!r}.",
                "give them to MixedHeads, which has the projections of all heads.",
            )

    @property
    def honours(self) -> frozenset[str]:
        return self.operator.honours - {"sinks"}

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        if not isinstance(self.keep, Mapping):
            return super().__call__(teacher, site)
        for key, heads in self.keep.items():
            if str(key) == str(site.depth) or any(name_matches(str(key), name) for name in site.names):
                return replace(self, keep=heads)(teacher, site)
        raise StudentError(
            f"MixedHeads(keep=...) says nothing of site {site.name!r}.",
            f"Its layer is {site.depth}, and the keys are {', '.join(map(str, self.keep))}.",
            "add the layer, or '**': () at the end for all others. Nothing was changed.",
        )

    def mixer(self, spec: AttentionSpec) -> Mixer:
        assert not isinstance(self.keep, Mapping)
        keep = sorted(set(self.keep))
        if keep and keep[-1] >= spec.heads:
            raise StudentError(
                f"there is no head {keep[-1]} to keep.",
                f"The attention has {spec.heads} heads, from 0 to {spec.heads - 1}.",
                "give MixedHeads(keep=...) indices of its query heads. Nothing was changed.",
            )
        others = [head for head in range(spec.heads) if head not in keep]
        if not keep:
            return self.operator.mixer(spec)
        if not others:
            return Softmax().mixer(spec)
        rest = Heads(others, spec)
        return MixedHeadsMixer(Heads(keep, spec), rest, self.operator.mixer(rest.spec(spec)), spec)


def _rows(projection: Projection, heads: int, rows: Sequence[int]) -> Projection:
    """Return the projection to some of the heads."""

    def of(x: Tensor) -> Tensor:
        return x.detach().reshape(heads, -1, *x.shape[1:])[list(rows)].flatten(0, 1)

    return Projection(of(projection.weight), None if projection.bias is None else of(projection.bias))


def _part(state: State, name: str) -> State:
    return {key.partition(".")[2]: x for key, x in state.items() if key.startswith(name)}


def _whole(kept: State, others: State) -> State:
    return {f"kept.{key}": x for key, x in kept.items()} | {f"others.{key}": x for key, x in others.items()}

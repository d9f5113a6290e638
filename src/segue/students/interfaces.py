"""Interfaces: how families of attention modules are read, called and answered, so that any operator fits any of them.

Segue knows timm, torch's MultiheadAttention and Hugging Face's ViT, BERT, GPT-2 and Llama families. `teach` adds others.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from segue.errors import StudentError
from segue.sites import Site
from segue.students.geometry import Call, Geometry, Projection, is_transposed_linear, projection, thirds


class Interface:
    """Read one family of attention modules, receive its calls and give its answers.

    One is made for every student, from its teacher; keep plain settings of the teacher that the calls depend on.
    """

    name = "an attention module"

    def __init__(self, module: nn.Module) -> None:
        pass

    @classmethod
    def knows(cls, module: nn.Module) -> bool:  # noqa: ARG003
        """Tell whether a module belongs to the family; kinds given to `teach` are not asked."""
        return False

    def read(self, module: nn.Module) -> Geometry:
        """Say what the module is made of."""
        raise NotImplementedError

    def receive(self, *args: Any, **kwargs: Any) -> Call:
        """Understand one call; give it the signature of the module's own forward."""
        raise NotImplementedError

    def answer(self, y: Tensor) -> Any:
        """Return the output as the module does."""
        return y

    def settings(self, module: nn.Module) -> dict[str, Any]:
        """Return attributes that code around the module asks for, beside its plain numbers and switches."""
        return {}

    def left_out(self, module: nn.Module) -> list[nn.Module]:
        """Return parts of the module that a student does without; whatever else is not read is an error."""
        return []


_TAUGHT: dict[type[nn.Module], type[Interface]] = {}


def teach(kind: type[nn.Module], interface: type[Interface]) -> None:
    """Tell Segue how modules of a kind are read, called and answered; what is taught last wins."""
    _TAUGHT.pop(kind, None)
    _TAUGHT[kind] = interface


class TimmAttention(Interface):
    """timm's `Attention`: one projection to queries, keys and values; masks and causality come with the call."""

    name = "timm attention"

    @classmethod
    def knows(cls, module: nn.Module) -> bool:
        return _has_linears(module, "qkv", "proj") and isinstance(getattr(module, "num_heads", None), int)

    def read(self, module: nn.Module) -> Geometry:
        query, key, value = thirds(projection(module.get_submodule("qkv")))
        heads: Any = module.num_heads
        return Geometry(
            heads=heads,
            head_size=query.weight.shape[0] // heads,
            query=query,
            key=key,
            value=value,
            output=projection(module.get_submodule("proj")),
            query_norm=_norm(module, "q_norm"),
            key_norm=_norm(module, "k_norm"),
            scale=_number(module, "scale"),
            dropout=getattr(getattr(module, "proj_drop", None), "p", 0.0),
        )

    def receive(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Call:
        return Call(x, keep=_keep(attn_mask, x), causal=is_causal, mask=_as_seen(attn_mask))


class NotFused:
    """Stand where nn.TransformerEncoder looks for weights to compute by itself, and make it call the module instead."""

    requires_grad = True

    @property
    def weight(self) -> NotFused:
        return self

    bias = weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("this attention has no weights that torch could fuse")


class TorchMultiheadAttention(Interface):
    """torch.nn.MultiheadAttention, as torchvision and nn.TransformerEncoder call it, for self-attention."""

    name = "torch.nn.MultiheadAttention"

    def __init__(self, module: nn.Module) -> None:
        self.batch_first = bool(module.batch_first)

    @classmethod
    def knows(cls, module: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention)

    def read(self, module: nn.Module) -> Geometry:
        assert isinstance(module, nn.MultiheadAttention)
        if module.in_proj_weight is None:
            query, key, value = (
                Projection(w, b)
                for w, b in zip(
                    (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight),
                    (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3),
                    strict=True,
                )
            )
        else:
            query, key, value = thirds(Projection(module.in_proj_weight, module.in_proj_bias))
        return Geometry(
            heads=module.num_heads,
            head_size=module.head_dim,
            query=query,
            key=key,
            value=value,
            output=projection(module.out_proj),
        )

    def receive(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Call:
        if key is not query or value is not query:
            raise StudentError(
                "an attention student was called with keys of another sequence.",
                "Operators replace self-attention only.",
                "choose the self-attention sites.",
            )
        x = query if self.batch_first else query.transpose(0, 1)
        seen = None if key_padding_mask is None else ~_as_hidden(key_padding_mask)
        mask = None if attn_mask is None or is_causal else ~_as_hidden(attn_mask)
        return Call(x, keep=seen, causal=is_causal, mask=mask if mask is None or mask.dim() == 4 else mask[None, None])

    def answer(self, y: Tensor) -> tuple[Tensor, None]:
        return (y if self.batch_first else y.transpose(0, 1)), None

    def settings(self, module: nn.Module) -> dict[str, Any]:
        return {"_qkv_same_embed_dim": False, "in_proj_bias": None, "in_proj_weight": NotFused(), "out_proj": NotFused()}


class HuggingFaceProjections(Interface):
    """Hugging Face's ViT and the Llama, Qwen and Mistral family: q_proj, k_proj, v_proj, o_proj; grouped queries, rotation."""

    name = "Hugging Face ViT / Llama / Qwen / Mistral attention"

    @classmethod
    def knows(cls, module: nn.Module) -> bool:
        return _has_linears(module, "q_proj", "k_proj", "v_proj", "o_proj") and hasattr(module, "config")

    def read(self, module: nn.Module) -> Geometry:
        _refuse_other_rotation(module)
        query, key, value, output = (projection(module.get_submodule(f"{name}_proj")) for name in "qkvo")
        head_size: Any = module.head_dim
        return Geometry(
            heads=query.weight.shape[0] // head_size,
            head_size=head_size,
            query=query,
            key=key,
            value=value,
            output=output,
            query_norm=_norm(module, "q_norm"),
            key_norm=_norm(module, "k_norm"),
            scale=_number(module, "scaling"),
            rotary="position_embeddings" in inspect.signature(module.forward).parameters,
            causal=bool(getattr(module, "is_causal", False)),
            tokens=_longest(module.config),
            window=getattr(module, "sliding_window", None) or getattr(module.config, "sliding_window", None),
            layer=getattr(module, "layer_idx", None),
        )

    def receive(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Call:
        keep = _keep(attention_mask, hidden_states)
        return Call(hidden_states, keep, None, position_embeddings, past_key_values, _as_seen(attention_mask))

    def answer(self, y: Tensor) -> tuple[Tensor, None]:
        return y, None


class HuggingFaceBert(Interface):
    """BERT's `attention.self`, and RoBERTa's: three projections, no output projection."""

    name = "Hugging Face BERT attention (`attention.self`)"

    @classmethod
    def knows(cls, module: nn.Module) -> bool:
        return _has_linears(module, "query", "key", "value") and hasattr(module, "attention_head_size")

    def read(self, module: nn.Module) -> Geometry:
        query, key, value = (projection(module.get_submodule(name)) for name in ("query", "key", "value"))
        head_size: Any = module.attention_head_size
        return Geometry(
            heads=query.weight.shape[0] // head_size,
            head_size=head_size,
            query=query,
            key=key,
            value=value,
            scale=_number(module, "scaling"),
            causal=bool(getattr(module, "is_causal", False)),
            tokens=_longest(getattr(module, "config", None)),
            layer=getattr(module, "layer_idx", None),
        )

    def receive(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None, **kwargs: Any
    ) -> Call:
        keep, seen = _keep(attention_mask, hidden_states), _as_seen(attention_mask)
        _refuse_cross_attention(kwargs.get("encoder_hidden_states"))
        return Call(hidden_states, keep, cache=past_key_values, mask=seen)

    def answer(self, y: Tensor) -> tuple[Tensor, None]:
        return y, None


class HuggingFaceGpt2(Interface):
    """GPT-2's attention: one transposed projection to queries, keys and values."""

    name = "Hugging Face GPT-2 attention"

    @classmethod
    def knows(cls, module: nn.Module) -> bool:
        parts = (getattr(module, "c_attn", None), getattr(module, "c_proj", None))
        return all(isinstance(part, nn.Module) and is_transposed_linear(part) for part in parts)

    def read(self, module: nn.Module) -> Geometry:
        query, key, value = thirds(projection(module.get_submodule("c_attn")))
        return Geometry(
            heads=module.num_heads,  # type: ignore[arg-type]
            head_size=module.head_dim,  # type: ignore[arg-type]
            query=query,
            key=key,
            value=value,
            output=projection(module.get_submodule("c_proj")),
            scale=_number(module, "scaling"),
            causal=bool(module.is_causal),
            dropout=getattr(getattr(module, "resid_dropout", None), "p", 0.0),
            tokens=_longest(module.config),
            layer=module.layer_idx,  # type: ignore[arg-type]
        )

    def receive(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        **kwargs: Any,
    ) -> Call:
        _refuse_cross_attention(encoder_hidden_states)
        keep, seen = _keep(attention_mask, hidden_states), _as_seen(attention_mask)
        return Call(hidden_states, keep, cache=past_key_values, mask=seen)

    def answer(self, y: Tensor) -> tuple[Tensor, None]:
        return y, None


BUILT_IN: tuple[type[Interface], ...] = (
    TorchMultiheadAttention,
    HuggingFaceGpt2,
    HuggingFaceBert,
    HuggingFaceProjections,
    TimmAttention,
)


def interface_of(module: nn.Module, site: Site) -> tuple[Interface, Geometry]:
    """Find the interface of an attention module and read its geometry, or say how to teach it."""
    taught = next((_TAUGHT[kind] for kind in type(module).__mro__ if kind in _TAUGHT), None)
    kind = taught or next((kind for kind in BUILT_IN if kind.knows(module)), None)
    if kind is None:
        raise _unknown(module, site, "No interface that Segue knows reads it.")
    interface = kind(module)
    geometry = interface.read(module)
    parts = [p for part in _parts(geometry) for p in part]
    parts += [p for part in interface.left_out(module) for p in part.parameters()]
    read, held = sum(p.numel() for p in parts), sum(p.numel() for p in module.parameters())
    if read != held:
        found = f"It looks like {kind.name}, but holds {held:,} numbers of which that interface reads {read:,}."
        raise _unknown(module, site, found)
    return interface, geometry


def plain_settings(module: nn.Module, interface: Interface) -> dict[str, Any]:
    """Collect what code around an attention module may ask of it: numbers, switches and its configuration."""
    plain = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
    config = {"config": module.config} if "config" in vars(module) else {}
    return {**{key: value for key, value in plain.items() if not key.startswith("_")}, **config, **interface.settings(module)}


LESSON = """teach it in ten lines, then try again (nothing was changed):

    class Mine(segue.students.Interface):
        def read(self, module):
            query, key, value = segue.students.thirds(segue.students.projection(module.qkv))
            return segue.students.Geometry(
                heads=module.heads, head_size=module.head_size, query=query, key=key, value=value,
                output=segue.students.projection(module.proj),
            )

        def receive(self, x, mask=None):  # the signature of the module's forward
            return segue.students.Call(x, keep=mask)

    segue.students.teach({kind}, Mine)"""


def _unknown(module: nn.Module, site: Site, found: str) -> StudentError:
    inside = next((name for name, part in module.named_modules() if name and any(kind.knows(part) for kind in BUILT_IN)), None)
    if inside is not None:
        hint = f"choose the attention inside it: {site.name + '.' + inside!r}. Nothing was changed."
    else:
        hint = LESSON.replace("{kind}", type(module).__name__)
    children = ", ".join(f"{name}: {type(part).__name__}" for name, part in module.named_children()) or "no submodules"
    return StudentError(
        f"an attention student was to be made for site {site.name!r}.",
        f"Its teacher is {type(module).__name__} ({children}). {found}",
        hint,
    )


def _parts(geometry: Geometry) -> list[list[Tensor]]:
    projections = [p for p in (geometry.query, geometry.key, geometry.value, geometry.output) if p is not None]
    norms = [n for n in (geometry.query_norm, geometry.key_norm) if n is not None]
    of_norms: list[list[Tensor]] = [list(norm.parameters()) for norm in norms]
    return [[t for t in p if t is not None] for p in projections] + of_norms


def _has_linears(module: nn.Module, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in names)


def _norm(module: nn.Module, name: str) -> nn.Module | None:
    norm = getattr(module, name, None)
    return norm if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity) else None


def _number(module: nn.Module, name: str) -> float | None:
    value = getattr(module, name, None)
    return float(value) if isinstance(value, int | float) else None


def _longest(config: Any) -> int | None:
    """Read the longest sequence from a Hugging Face configuration: positions, or patches and the class token."""
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if isinstance(image, int) and isinstance(patch, int):
        return (image // patch) ** 2 + 1
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def _as_hidden(mask: Tensor) -> Tensor:
    """Read torch's masks: True, or minus infinity, where a token is hidden."""
    return mask if mask.dtype == torch.bool else mask < 0


def _as_seen(mask: Tensor | None) -> Tensor | None:
    """Read a mask of pairs in the form of scaled_dot_product_attention: True, or 0, where a token is seen."""
    if mask is None or mask.dim() == 2:
        return None
    seen = mask if mask.dtype == torch.bool else mask >= 0
    return seen if seen.dim() == 4 else seen[:, None]


def _keep(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Find which tokens are padding: the last row of a mask of pairs sees the rest, and each token of a square one itself."""
    if mask is None:
        return None
    if mask.dim() == 2 and mask.shape[0] == x.shape[0]:
        return mask.bool()
    seen = _as_seen(mask if mask.dim() > 2 else mask[None, None])
    assert seen is not None
    rows = seen.diagonal(dim1=-2, dim2=-1) if seen.shape[-1] == seen.shape[-2] else seen[..., -1, :]
    return rows[:, 0].expand(x.shape[0], -1)


def _refuse_cross_attention(encoder_hidden_states: Tensor | None) -> None:
    if encoder_hidden_states is not None:
        raise StudentError(
            "an attention student was called with the states of an encoder.",
            "Operators replace self-attention only.",
            "choose the self-attention sites.",
        )


def _refuse_other_rotation(module: nn.Module) -> None:
    """Refuse a family whose rotary embedding is not the rotation by halves that students apply."""
    theirs = getattr(sys.modules.get(type(module).__module__), "apply_rotary_pos_emb", None)
    capped = getattr(module, "attn_logit_softcapping", None)
    if capped is not None:
        raise StudentError(
            f"an attention student was to be made for {type(module).__name__}.",
            f"Its logits are capped at {capped}, which the interface does not read.",
            "teach Segue this kind (segue.students.teach). Nothing was changed.",
        )
    if theirs is None:
        return
    size = 2 * (int(module.head_dim) // 2)  # type: ignore[arg-type]
    x = torch.linspace(-1.0, 1.0, 3 * size).view(1, 1, 3, size)
    angles = torch.linspace(0.0, 2.0, 3 * size).view(1, 3, size)
    rotated = theirs(x, x, angles.cos(), angles.sin())[0]
    a, b = x.chunk(2, dim=-1)
    ours = x * angles.cos()[:, None] + torch.cat([-b, a], dim=-1) * angles.sin()[:, None]
    if rotated.shape != ours.shape or not torch.allclose(rotated, ours, atol=1e-5):
        raise StudentError(
            f"an attention student was to be made for {type(module).__name__}.",
            "Its rotary embedding is not the rotation by halves of Llama.",
            "teach Segue this kind (segue.students.teach). Nothing was changed.",
        )

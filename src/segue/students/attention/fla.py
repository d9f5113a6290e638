"""Layers of flash-linear-attention as students, called like the attention modules they replace."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import nn

from segue.border import checked
from segue.errors import MissingExtraError, PlanError, StudentError, nearest
from segue.sites import Site
from segue.students.attention.interfaces import copy_attributes_, interface_of
from segue.students.attention.masks import causal_padding
from segue.students.attention.spec import AttentionInterface, AttentionSpec

PACKAGE = "flash-linear-attention"
NEEDS_GPU = True


@checked
@dataclass(frozen=True)
class FlaLayer:
    """A causal layer of flash-linear-attention, by name, in place of causal attention.

    >>> FlaLayer("GatedDeltaNet", settings={"expand_v": 1.0})
    FlaLayer(name='GatedDeltaNet', settings={'expand_v': 1.0})

    Width, heads, head size and layer index are read from the teacher; `settings` are the layer's own and win. The layer
    initialises its own weights. It needs the package, Triton and a GPU. Segue's tests have none of them: they check the call
    on the CPU, against a stand-in with the same signature.
    """

    name: str
    _: KW_ONLY
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise PlanError(
                f"FlaLayer({self.name!r}) does not name a layer.",
                f"The name of a class in fla.layers is needed, from {PACKAGE}.",
                "for example FlaLayer('GatedDeltaNet').",
            )

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        problem = f"FlaLayer({self.name!r}) cannot replace the module at site {site.name!r}."
        interface, spec = interface_of(teacher, site)
        if not spec.causal:
            raise StudentError(
                problem,
                "The layer is causal, and its teacher is not.",
                "use an operator of segue.students in models that are not causal. Nothing was changed.",
            )
        kind = self._layer_class(problem)
        settings = self._settings(kind, spec, problem)
        like = spec.query.weight
        if NEEDS_GPU and like.device.type == "cpu":
            raise StudentError(
                problem,
                f"The kernels of {PACKAGE} need a GPU, and the teacher is on the CPU.",
                "move the model to a GPU first: model.cuda(). Nothing was changed.",
            )
        try:
            with torch.device(like.device):
                layer = kind(**settings).to(like.dtype)
        except (AssertionError, TypeError, ValueError) as error:
            raise StudentError(
                problem,
                f"{kind.__name__}({', '.join(f'{key}={value!r}' for key, value in settings.items())}) raises: {error}",
                "give the settings that the layer needs: FlaLayer(name, settings={...}). Nothing was changed.",
            ) from error
        student = FlaAttention(layer, interface, spec)
        copy_attributes_(student, teacher, interface)
        return student

    def _layer_class(self, problem: str) -> type[nn.Module]:
        layers = {key: x for key, x in vars(_fla_layers(problem)).items() if isinstance(x, type) and issubclass(x, nn.Module)}
        if self.name not in layers:
            found = f"{PACKAGE} has no layer {self.name!r}. {nearest(self.name, list(layers))}"
            raise StudentError(problem, found, "give the name of a class in fla.layers. Nothing was changed.")
        return layers[self.name]

    def _settings(self, kind: type[nn.Module], spec: AttentionSpec, problem: str) -> dict[str, Any]:
        """Join what the layer needs to know about the teacher with the user's settings."""
        taken = [p.name for p in inspect.signature(kind).parameters.values() if p.kind is not p.VAR_KEYWORD]
        unknown = next((name for name in self.settings if name not in taken), None)
        if unknown is not None:
            found = f"{kind.__name__} has no setting {unknown!r}. {nearest(unknown, taken)}"
            raise StudentError(problem, found, "correct FlaLayer(name, settings={...}). Nothing was changed.")
        known = {
            "hidden_size": spec.width,
            "num_heads": spec.heads,
            "num_kv_heads": spec.key_heads,
            "head_dim": spec.head_size,
            "layer_idx": spec.layer,
        }
        return {**{name: value for name, value in known.items() if name in taken}, **self.settings}


class FlaAttention(nn.Module):
    """Call a layer like its teacher: with the hidden states and the token mask.

    With a Hugging Face cache it stores the hidden states of the past there and computes all of them at every step: generation
    is correct, and not fast.
    """

    def __init__(self, layer: nn.Module, interface: AttentionInterface, spec: AttentionSpec) -> None:
        super().__init__()
        self.layer = layer
        self.interface = interface
        self.layer_idx = spec.layer
        self.output_dropout = nn.Dropout(spec.dropout)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self.interface.unpack(*args, **kwargs)
        x, tokens, seen = call.x, call.x.shape[1], call.x.shape[1]
        if call.cache is not None:
            past = x[:, None]  # (batch, 1, tokens, width), the form in which a cache stores keys and values
            x = call.cache.update(past, past, self.layer_idx)[0][:, 0]
            seen = int(call.cache.get_seq_length(self.layer_idx))  # a static cache is longer
            x = x[:, :seen]
        token_mask = causal_padding(call, seen, type(self.layer).__name__)
        y = self.layer(x, attention_mask=None if token_mask is None else token_mask.long())
        y = (y[0] if isinstance(y, tuple) else y)[:, -tokens:]
        return self.interface.pack(self.output_dropout(y))


def _fla_layers(problem: str) -> ModuleType:
    try:
        return import_module("fla.layers")
    except ImportError as error:
        root = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        missing = {"fla": PACKAGE, "triton": "Triton"}.get(root)
        found = f"It needs {missing}, which is not installed." if missing else f"{PACKAGE} does not import: {error}."
        raise MissingExtraError(problem, found, f"pip install {PACKAGE}, on a machine with a GPU.") from error

"""Layers of other libraries as students: flash-linear-attention's, called and answered as their teachers are."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from segue.errors import MissingExtraError, PlanError, StudentError, nearest
from segue.sites import Site
from segue.students.attention.masks import Understanding
from segue.students.attention.registry import adopt_settings_, interface_of
from segue.students.attention.spec import Geometry, Interface


class Package(NamedTuple):
    """Where a library keeps its layers, how it is installed, and whether it computes on a GPU alone."""

    layers: str
    install: str
    needs_gpu: bool


PACKAGES = {"fla": Package("fla.layers", "flash-linear-attention", needs_gpu=True)}


@dataclass(frozen=True)
class Library:
    """A causal layer of flash-linear-attention, by name, in place of a causal attention.

    >>> Library("fla:GatedDeltaNet", settings={"expand_v": 1.0})
    Library(name='fla:GatedDeltaNet', settings={'expand_v': 1.0})

    Width, heads, head size and place in the model are read from the teacher; `settings` are the layer's own and win. The layer
    draws its weights itself. It needs the package, Triton and a GPU. Segue's tests have none of them: they check the call
    against a stand-in with the same signature, on the CPU.
    """

    name: str
    _: KW_ONLY
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        package, colon, layer = self.name.partition(":")
        if package not in PACKAGES or not colon or not layer:
            raise PlanError(
                f"Library({self.name!r}) was asked for.",
                f"It is not of the form package:Layer; the packages are {', '.join(PACKAGES)}.",
                "write Library('fla:GatedDeltaNet').",
            )

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        asked = f"Library({self.name!r}) was asked for a student at site {site.name!r}."
        interface, geometry = interface_of(teacher, site)
        if not geometry.causal:
            raise StudentError(
                asked,
                "The layer sees the past alone, and its teacher the whole sequence.",
                "use an operator of segue.students in models that are not causal. Nothing was changed.",
            )
        package = PACKAGES[self.name.partition(":")[0]]
        kind = _layer_class(_imported(package, asked), self.name.partition(":")[2], package, asked)
        settings = self._settings(kind, geometry, asked)
        like = geometry.query.weight
        if package.needs_gpu and like.device.type == "cpu":
            raise StudentError(
                asked,
                f"The kernels of {package.install} run on a GPU, and the teacher is on the CPU.",
                "move the model to a GPU first: model.cuda(). Nothing was changed.",
            )
        try:
            with torch.device(like.device):
                layer = kind(**settings).to(like.dtype)
        except (AssertionError, TypeError, ValueError) as error:
            raise StudentError(
                asked,
                f"{kind.__name__}({', '.join(f'{key}={value!r}' for key, value in settings.items())}) raised: {error}",
                "give the settings that the layer needs: Library(name, settings={...}). Nothing was changed.",
            ) from error
        student = LibraryAttention(layer, interface, geometry)
        adopt_settings_(student, teacher, interface)
        return student

    def _settings(self, kind: type[nn.Module], geometry: Geometry, asked: str) -> dict[str, Any]:
        """Join what the teacher says, as far as the layer asks for it, with what the user says."""
        taken = [p.name for p in inspect.signature(kind).parameters.values() if p.kind is not p.VAR_KEYWORD]
        unknown = next((name for name in self.settings if name not in taken), None)
        if unknown is not None:
            raise StudentError(
                asked,
                f"{kind.__name__} has no setting {unknown!r}. {nearest(unknown, taken)}",
                "mend Library(name, settings={...}). Nothing was changed.",
            )
        known = {
            "hidden_size": geometry.width,
            "num_heads": geometry.heads,
            "num_kv_heads": geometry.key_heads,
            "head_dim": geometry.head_size,
            "layer_idx": geometry.layer,
        }
        return {**{name: value for name, value in known.items() if name in taken}, **self.settings}


class LibraryAttention(nn.Module):
    """Call a foreign layer as its teacher is called: the states, and which tokens are padding.

    With a Hugging Face cache it keeps the states of the past there and reads them all again: generation is right, and not fast.
    """

    def __init__(self, layer: nn.Module, interface: Interface, geometry: Geometry) -> None:
        super().__init__()
        self.layer = layer
        self.interface = interface
        self.layer_idx = geometry.layer
        self.output_dropout = nn.Dropout(geometry.dropout)
        self.understand = Understanding()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self.interface.receive(*args, **kwargs)
        x, tokens, keep, mask = call.x, call.x.shape[1], call.keep, call.mask
        if call.cache is not None:
            past = x[:, None]  # (batch, 1, tokens, width), as a cache keeps keys and values
            x = call.cache.update(past, past, self.layer_idx)[0][:, 0]
            seen = int(call.cache.get_seq_length(self.layer_idx))  # a cache of fixed length has room after it
            x = x[:, :seen]
            keep, mask = (None if part is None else part[..., :seen] for part in (keep, mask))
        self.understand(mask, keep, causal=True)
        y = self.layer(x, attention_mask=None if keep is None else keep.long())
        y = (y[0] if isinstance(y, tuple) else y)[:, -tokens:]
        return self.interface.answer(self.output_dropout(y))


def _imported(package: Package, asked: str) -> ModuleType:
    try:
        return import_module(package.layers)
    except ImportError as error:
        root = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        missing = {package.layers.partition(".")[0]: package.install, "triton": "Triton"}.get(root)
        found = f"It needs {missing}, which is not installed." if missing else f"{package.install} does not import: {error}."
        raise MissingExtraError(asked, found, f"pip install {package.install}, on a machine with a GPU.") from error


def _layer_class(module: ModuleType, name: str, package: Package, asked: str) -> type[nn.Module]:
    layers = {key: x for key, x in vars(module).items() if isinstance(x, type) and issubclass(x, nn.Module)}
    if name not in layers:
        raise StudentError(
            asked,
            f"{package.install} has no layer {name!r}. {nearest(name, list(layers))}",
            "mend the name. Nothing was changed.",
        )
    return layers[name]

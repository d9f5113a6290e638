"""Interfaces: find how an attention module is read, called and answered, so that any operator fits any family.

Segue knows timm, torch's MultiheadAttention and Hugging Face's ViT, BERT, GPT-2 and Llama families. `teach` adds others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from segue.errors import StudentError
from segue.sites import Site
from segue.students.attention.families import BUILT_IN
from segue.students.attention.spec import Geometry, Interface

_TAUGHT: dict[type[nn.Module], type[Interface]] = {}


def teach(kind: type[nn.Module], interface: type[Interface]) -> None:
    """Tell Segue how modules of a kind are read, called and answered; what is taught last wins."""
    _TAUGHT.pop(kind, None)
    _TAUGHT[kind] = interface


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


def adopt_settings_(student: nn.Module, teacher: nn.Module, interface: Interface) -> None:
    """Give a student what code around its teacher may ask of it: plain numbers, switches and the configuration."""
    settings: dict[str, Any] = {
        key: x for key, x in vars(teacher).items() if isinstance(x, bool | int | float | str) and key[0] != "_"
    }
    if "config" in vars(teacher):
        settings["config"] = teacher.config
    for name, value in {**settings, **interface.settings(teacher)}.items():
        if not hasattr(student, name):
            setattr(student, name, value)


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

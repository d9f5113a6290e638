"""The registry: find the interface of an attention module, so that any operator fits any family.

Segue knows timm, torch's MultiheadAttention and Hugging Face's ViT, BERT, GPT-2 and Llama families. `register_attention` adds
others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from segue.border import checked
from segue.errors import StudentError
from segue.sites import Site
from segue.students.attention.families import BUILT_IN
from segue.students.attention.spec import AttentionInterface, AttentionSpec

_REGISTERED: dict[type[nn.Module], type[AttentionInterface]] = {}


@checked
def register_attention(kind: type[nn.Module], interface: type[AttentionInterface]) -> None:
    """Register the interface of a class of attention modules; the last one registered for a class wins."""
    _REGISTERED.pop(kind, None)
    _REGISTERED[kind] = interface


def interface_of(module: nn.Module, site: Site) -> tuple[AttentionInterface, AttentionSpec]:
    """Find the interface of an attention module and parse the module, or raise an error that shows how to register one."""
    if hasattr(module, "attention_spec"):  # a student of Segue, whose interface is that of its own teacher
        return module.interface, module.attention_spec()  # type: ignore[return-value, operator]
    registered = next((_REGISTERED[kind] for kind in type(module).__mro__ if kind in _REGISTERED), None)
    kind = registered or next((kind for kind in BUILT_IN if kind.matches(module)), None)
    if kind is None:
        raise _unknown(module, site, "No interface matches it.")
    interface = kind(module)
    spec = interface.parse(module)
    parts = [p for part in _parts(spec) for p in part]
    parts += [p for part in interface.ignored(module) for p in part.parameters()]
    read, held = sum(p.numel() for p in parts), sum(p.numel() for p in module.parameters())
    if read != held:
        raise _unknown(module, site, f"It looks like {kind.name}, whose interface reads {read:,} of its {held:,} parameters.")
    return interface, spec


def copy_attributes_(student: nn.Module, teacher: nn.Module, interface: AttentionInterface) -> None:
    """Give a student what code around its teacher may read: plain numbers, switches and the configuration."""
    found: dict[str, Any] = {
        key: x for key, x in vars(teacher).items() if isinstance(x, bool | int | float | str) and key[0] != "_"
    }
    if "config" in vars(teacher):
        found["config"] = teacher.config
    for name, value in {**found, **interface.attributes(teacher)}.items():
        if not hasattr(student, name):
            setattr(student, name, value)


EXAMPLE = """register an interface, then try again (nothing was changed):

    class Mine(segue.students.AttentionInterface):
        def parse(self, module):
            query, key, value = segue.students.split_qkv(segue.students.projection(module.qkv))
            return segue.students.AttentionSpec(
                heads=module.heads, head_size=module.head_size, query=query, key=key, value=value,
                output=segue.students.projection(module.proj),
            )

        def unpack(self, x, mask=None):  # the signature of the module's forward
            return segue.students.AttentionCall(x, token_mask=mask)

    segue.students.register_attention({kind}, Mine)"""


def _unknown(module: nn.Module, site: Site, found: str) -> StudentError:
    inside = next(
        (name for name, part in module.named_modules() if name and any(kind.matches(part) for kind in BUILT_IN)), None
    )
    if inside is not None:
        hint = f"choose the attention inside it: {site.name + '.' + inside!r}. Nothing was changed."
    else:
        hint = EXAMPLE.replace("{kind}", type(module).__name__)
    children = ", ".join(f"{name}: {type(part).__name__}" for name, part in module.named_children()) or "no submodules"
    return StudentError(
        f"Segue cannot read the module at site {site.name!r} as attention.",
        f"It is {type(module).__name__} ({children}). {found}",
        hint,
    )


def _parts(spec: AttentionSpec) -> list[list[Tensor]]:
    projections = [p for p in (spec.query, spec.key, spec.value, spec.output) if p is not None]
    norms = [n for n in (spec.query_norm, spec.key_norm) if n is not None]
    of_norms: list[list[Tensor]] = [list(norm.parameters()) for norm in norms]
    return [[t for t in p if t is not None] for p in projections] + of_norms

"""The registry: find the interface of an attention module, so that any operator fits any family.

Segue reads most attention modules by the names of their parts, and proves that it read them rightly. `register_attention` adds
others.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from segue.border import checked
from segue.errors import StudentError
from segue.sites import Site
from segue.students.attention.families import BUILT_IN
from segue.students.attention.families.names import beyond
from segue.students.attention.proof import MisreadError, prove, prove_reload
from segue.students.attention.spec import AttentionInterface, AttentionSpec

_REGISTERED: dict[type[nn.Module], type[AttentionInterface]] = {}


@checked
def register_attention(kind: type[nn.Module], interface: type[AttentionInterface]) -> None:
    """Register the interface of a class of attention modules; the last one registered for a class wins.

        segue.students.register_attention(MyAttention, MyInterface)

    Args:
        kind: The class of the modules.
        interface: How they are called and what they are made of.
    """
    _REGISTERED.pop(kind, None)
    _REGISTERED[kind] = interface


def interface_of(module: nn.Module, site: Site) -> tuple[AttentionInterface, AttentionSpec]:
    """Find an interface of an attention module, and prove that it reads it rightly; or raise an error that says why not."""
    if hasattr(module, "attention_spec"):  # a student of Segue, whose interface is that of its own teacher
        return module.interface, module.attention_spec()  # type: ignore[return-value, operator]
    registered = next((_REGISTERED[kind] for kind in type(module).__mro__ if kind in _REGISTERED), None)
    kinds = [registered] if registered else [kind for kind in BUILT_IN if kind.matches(module)]
    reasons: list[MisreadError] = []
    for kind in kinds:
        for choice, interface in enumerate(kind.candidates(module)):
            try:
                spec = interface.parse(module)
                _require_complete(module, interface, spec)
                prove(module, interface, spec)
                if registered:
                    prove_reload(module, interface, spec, choice)
            except MisreadError as reason:
                reasons.append(reason)
            else:
                return interface, spec
    raise _unknown(module, site, reasons)


def _require_complete(module: nn.Module, interface: AttentionInterface, spec: AttentionSpec) -> None:
    """Refuse to read a part of a module as the whole."""
    parts = [p for part in _parts(spec) for p in part]
    parts += [p for part in interface.ignored(module) for p in part.parameters()]
    read, held = sum(p.numel() for p in parts), sum(p.numel() for p in module.parameters())
    if read != held:
        names = ", ".join(name for name, _ in module.named_parameters())
        raise MisreadError(f"{read:,} of its {held:,} parameters are read. It has {names}.")


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


def _unknown(module: nn.Module, site: Site, reasons: list[MisreadError]) -> StudentError:
    """Make the error of a module that no interface reads: what was found, and what can be done about it."""
    inside = next(
        (name for name, part in module.named_modules() if name and any(kind.matches(part) for kind in BUILT_IN)), None
    )
    nearest = min(reasons, key=lambda reason: reason.off, default=None)
    why = beyond(module)
    if why is not None:
        hint = "AttentionSpec has no field for it: keep it, or use Reinit() or a student of your own. Nothing was changed."
    elif inside is not None and nearest is None:
        hint = f"choose the attention inside it: {site.name + '.' + inside!r}. Nothing was changed."
    elif nearest is not None and nearest.off < math.inf:
        hint = (
            "if the fields of segue.students.AttentionSpec can say what it computes, register an interface "
            "(segue.students.register_attention); else keep it, or use Reinit() or a student of your own. Nothing was changed."
        )
    else:
        hint = EXAMPLE.replace("{kind}", type(module).__name__)
    children = ", ".join(f"{name}: {type(part).__name__}" for name, part in module.named_children()) or "no submodules"
    return StudentError(
        f"Segue cannot read the module at site {site.name!r} as attention.",
        f"It is {type(module).__name__} ({children}). {_sentence(why) or nearest or 'No interface matches it.'}",
        hint,
    )


def _sentence(text: str | None) -> str | None:
    return None if text is None else f"{text[0].upper()}{text[1:]}."


def _parts(spec: AttentionSpec) -> list[list[Tensor]]:
    projections = [p for p in (spec.query, spec.key, spec.value, spec.output, spec.gate) if p is not None]
    norms = [spec.input_norm, spec.query_norm, spec.key_norm, spec.output_norm, spec.residual_norm]
    modules = [spec.reduction, *norms, spec.bias, spec.latent]
    of_modules: list[list[Tensor]] = [list(part.parameters()) for part in dict.fromkeys(modules) if part is not None]
    context = [] if spec.context is None else _parts(spec.context)
    sinks = [] if spec.sinks is None else [spec.sinks]
    return [[t for t in p if t is not None] for p in projections] + of_modules + [sinks] + context

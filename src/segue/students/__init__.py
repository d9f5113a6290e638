# ruff: noqa: F403, F405  (what the type checker reads)
"""Students: what replaces the teacher at a site.

A student factory is any function (teacher, site) -> module. The built-in ones are found in the folders: a file here, or in
`attention/mixers` for an attention operator, exports what it lists in its `__all__`.
"""

from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from importlib import import_module
from inspect import signature
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from torch import nn

from segue.border import Rule
from segue.sites import Site
from segue.students.attention import mixers
from segue.students.attention.families import ByName
from segue.students.attention.fla import FlaLayer
from segue.students.attention.interfaces import register_attention
from segue.students.attention.masks import read_mask
from segue.students.attention.spec import AttentionCall, AttentionInterface, AttentionSpec, Projection, projection, split_qkv

if TYPE_CHECKING:  # for editors and type checkers, which cannot look into the folders; a name that is missing here has type Any
    from segue.students.activations import *
    from segue.students.adapters import *
    from segue.students.attention.mixers.fourier import *
    from segue.students.attention.mixers.gated_delta import *
    from segue.students.attention.mixers.gated_linear import *
    from segue.students.attention.mixers.linear import *
    from segue.students.attention.mixers.linformer import *
    from segue.students.attention.mixers.mixed_heads import *
    from segue.students.attention.mixers.nystrom import *
    from segue.students.attention.mixers.performer import *
    from segue.students.attention.mixers.sliding_window import *
    from segue.students.attention.mixers.softmax import *
    from segue.students.attention.mixers.windowed_linear import *
    from segue.students.closed_form import *
    from segue.students.drop import *
    from segue.students.initialisation import *
    from segue.students.layers import *
    from segue.students.least_squares import *
    from segue.students.low_rank import *
    from segue.students.mlp import *
    from segue.students.norms import *
    from segue.students.per_site import *

    def __getattr__(name: str) -> Any: ...


# (teacher, where) -> student
StudentFactory: TypeAlias = Annotated[
    Callable[[nn.Module, Site], nn.Module],
    Rule(
        "a function (teacher, site) -> module",
        lambda value: not isinstance(value, nn.Module),  # one module cannot be at several sites
        hint="give segue.students.Reinit(), another student, or a function of your own: lambda teacher, site: MyModule().",
    ),
]

__all__ = [
    "AttentionCall",
    "AttentionInterface",
    "AttentionSpec",
    "ByName",
    "FlaLayer",
    "Projection",
    "StudentFactory",
    "names",
    "projection",
    "read_mask",
    "register_attention",
    "split_qkv",
]


def _public_names(package: str, folder: Iterable[str]) -> dict[str, Any]:
    """Import every module in a folder and return what they list in `__all__`."""
    modules = [import_module(f"{package}.{file.name}") for file in iter_modules(folder) if not file.ispkg]
    return {name: getattr(module, name) for module in modules for name in getattr(module, "__all__", ())}


_found = _public_names(__name__, __path__) | _public_names(mixers.__name__, mixers.__path__)
globals().update(_found)
__all__ += sorted(_found)


def names() -> list[str]:
    """List the built-in students by name: what `Plan(student=...)` and `segue convert --student` take.

    >>> "LinearAttention" in names(), "LeastSquares" in names()
    (True, False)
    """
    kinds = {name: made for name in __all__ if isinstance(made := globals()[name], type) and is_dataclass(made)}
    calls = {name: made.__call__ for name, made in kinds.items() if "__call__" in dir(made)}
    return [name for name, call in calls.items() if [*signature(call).parameters] == ["self", "teacher", "site"]]


def __dir__() -> list[str]:
    return sorted(__all__)

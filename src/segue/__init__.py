"""Segue: replace modules inside a pretrained PyTorch model without breaking it."""

from typing import TYPE_CHECKING, Any

from segue import errors, gates, losses, methods, schedules, similarity, students
from segue.checkpoint import load_, save
from segue.errors import SegueError, SegueWarning
from segue.handover import Handover, replace_
from segue.plan import Plan
from segue.sites import Site, Span, select

if TYPE_CHECKING:
    from segue import diagnostics
    from segue.diagnostics.costs import cost
    from segue.evaluation import Classification
    from segue.pretrained import from_pretrained
    from segue.recipe import Recipe
    from segue.training import fit

__version__ = "0.1.0"

__all__ = [
    "Classification",
    "Handover",
    "Plan",
    "Recipe",
    "SegueError",
    "SegueWarning",
    "Site",
    "Span",
    "cost",
    "diagnostics",
    "errors",
    "fit",
    "from_pretrained",
    "gates",
    "load_",
    "losses",
    "methods",
    "replace_",
    "save",
    "schedules",
    "select",
    "similarity",
    "students",
]

_WHEN_ASKED = {  # who writes a loop needs none of them
    "fit": "training",
    "Recipe": "recipe",
    "from_pretrained": "pretrained",
    "Classification": "evaluation",
    "cost": "diagnostics.costs",
    "diagnostics": "diagnostics",
}


def __getattr__(name: str) -> Any:
    if name not in _WHEN_ASKED:
        raise AttributeError(f"module 'segue' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"segue.{_WHEN_ASKED[name]}")
    return module if module.__name__ == f"segue.{name}" else getattr(module, name)

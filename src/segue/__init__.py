"""Segue: replace modules inside a pretrained PyTorch model without breaking it."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from segue.core.torchvision_cpu import prepare_for_torchvision

if TYPE_CHECKING:
    from segue import diagnostics, errors, gates, losses, methods, phases, planning, schedules, similarity, students
    from segue.checkpoint import load_, save
    from segue.convert.pretrained import from_pretrained
    from segue.core.handover import Handover, replace_
    from segue.diagnostics.costs import cost
    from segue.errors import SegueError, SegueWarning
    from segue.plan import Plan
    from segue.planning.planner import plan_replacement
    from segue.sites import Site, Span, select
    from segue.training.early_stopping import EarlyStopping
    from segue.training.ema import Ema
    from segue.training.fit import fit
    from segue.training.fit_locally import fit_locally
    from segue.training.guard import Guard
    from segue.training.recipe import Recipe
    from segue.training.tasks import Classification
    from segue.training.teacher_cache import cache_teacher

__version__ = "0.1.0"

__all__ = [
    "Classification",
    "EarlyStopping",
    "Ema",
    "Guard",
    "Handover",
    "Plan",
    "Recipe",
    "SegueError",
    "SegueWarning",
    "Site",
    "Span",
    "cache_teacher",
    "cost",
    "diagnostics",
    "errors",
    "fit",
    "fit_locally",
    "from_pretrained",
    "gates",
    "load_",
    "losses",
    "methods",
    "phases",
    "plan_replacement",
    "planning",
    "replace_",
    "save",
    "schedules",
    "select",
    "similarity",
    "students",
]

# Names are imported when they are first used, so that `segue --help` does not wait for torch.
_MODULE_OF = {
    "Classification": "training.tasks",
    "EarlyStopping": "training.early_stopping",
    "Ema": "training.ema",
    "Guard": "training.guard",
    "Handover": "core.handover",
    "Plan": "plan",
    "Recipe": "training.recipe",
    "SegueError": "errors",
    "SegueWarning": "errors",
    "Site": "sites",
    "Span": "sites",
    "cache_teacher": "training.teacher_cache",
    "cost": "diagnostics.costs",
    "fit": "training.fit",
    "fit_locally": "training.fit_locally",
    "from_pretrained": "convert.pretrained",
    "load_": "checkpoint",
    "plan_replacement": "planning.planner",
    "replace_": "core.handover",
    "save": "checkpoint",
    "select": "sites",
}

prepare_for_torchvision()
logging.getLogger("segue").addHandler(logging.NullHandler())  # quiet, until the user gives a handler


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"segue.{_MODULE_OF[name]}"), name)
    elif name in __all__:
        value = import_module(f"segue.{name}")
    else:
        raise AttributeError(f"module 'segue' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

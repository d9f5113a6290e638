"""Segue: replace modules inside a pretrained PyTorch model without breaking it."""

from segue import errors, gates, losses, methods, schedules, similarity, students
from segue.checkpoint import load_, save
from segue.errors import SegueError, SegueWarning
from segue.handover import Handover, replace_
from segue.plan import Plan
from segue.sites import Site, select

__version__ = "0.1.0"

__all__ = [
    "Handover",
    "Plan",
    "SegueError",
    "SegueWarning",
    "Site",
    "errors",
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

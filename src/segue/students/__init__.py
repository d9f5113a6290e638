"""Students: what comes in place of the teacher.

A student factory is any function (teacher, site) -> module.
"""

from collections.abc import Callable
from typing import TypeAlias

from torch import nn

from segue.sites import Site
from segue.students.geometry import Call, Geometry, Projection, projection, thirds
from segue.students.initialisation import CopyMatching, Kaiming
from segue.students.interfaces import Interface, teach
from segue.students.mixers import (
    Fourier,
    LinearAttention,
    Linformer,
    Nystrom,
    Performer,
    SlidingWindow,
    Softmax,
    WindowedLinear,
)
from segue.students.reinit import Reinit

StudentFactory: TypeAlias = Callable[[nn.Module, Site], nn.Module]

__all__ = [
    "Call",
    "CopyMatching",
    "Fourier",
    "Geometry",
    "Interface",
    "Kaiming",
    "LinearAttention",
    "Linformer",
    "Nystrom",
    "Performer",
    "Projection",
    "Reinit",
    "SlidingWindow",
    "Softmax",
    "StudentFactory",
    "WindowedLinear",
    "projection",
    "teach",
    "thirds",
]

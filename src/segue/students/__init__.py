"""Students: what comes in place of the teacher.

A student factory is any function (teacher, site) -> module.
"""

from collections.abc import Callable
from typing import TypeAlias

from torch import nn

from segue.sites import Site
from segue.students.activations import ActivationSwap
from segue.students.adapters import Adapter
from segue.students.attention.layers import Library
from segue.students.attention.mixers import (
    Fourier,
    LinearAttention,
    Linformer,
    Nystrom,
    Performer,
    SlidingWindow,
    Softmax,
    WindowedLinear,
)
from segue.students.attention.registry import teach
from segue.students.attention.spec import Call, Geometry, Interface, Projection, projection, thirds
from segue.students.initialisation import CopyMatching, Kaiming, Net2Net, TruncatedSvd
from segue.students.least_squares import LeastSquares
from segue.students.low_rank import LowRankMlp
from segue.students.mlp import GatedMlp, NarrowMlp, WideMlp
from segue.students.norms import RmsNorm
from segue.students.reinit import Reinit
from segue.students.spans import OneLayer

StudentFactory: TypeAlias = Callable[[nn.Module, Site], nn.Module]  # (teacher, where) -> student

__all__ = [
    "ActivationSwap",
    "Adapter",
    "Call",
    "CopyMatching",
    "Fourier",
    "GatedMlp",
    "Geometry",
    "Interface",
    "Kaiming",
    "LeastSquares",
    "Library",
    "LinearAttention",
    "Linformer",
    "LowRankMlp",
    "NarrowMlp",
    "Net2Net",
    "Nystrom",
    "OneLayer",
    "Performer",
    "Projection",
    "Reinit",
    "RmsNorm",
    "SlidingWindow",
    "Softmax",
    "StudentFactory",
    "TruncatedSvd",
    "WideMlp",
    "WindowedLinear",
    "projection",
    "teach",
    "thirds",
]

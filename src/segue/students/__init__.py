"""Students: what comes in place of the teacher.

A student factory is any function (teacher, site) -> module.
"""

from collections.abc import Callable
from typing import TypeAlias

from torch import nn

from segue.sites import Site
from segue.students.reinit import Reinit

StudentFactory: TypeAlias = Callable[[nn.Module, Site], nn.Module]

__all__ = ["Reinit", "StudentFactory"]

"""Spans: several layers by one. The teacher is their chain, the student one layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from segue.errors import StudentError
from segue.sites import Site
from segue.students.chain import Chain
from segue.students.reinit import copied


@dataclass(frozen=True, kw_only=True)
class OneLayer:
    """Keep one layer of a span with its weights, the first unless told: how BERT-of-Theseus begins.

    `Reinit()` for a span is the same with fresh weights.
    """

    which: int = 0

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        if not isinstance(teacher, Chain) or not -len(teacher.layers) <= self.which < len(teacher.layers):
            found = f"a span of {len(teacher.layers)} layers" if isinstance(teacher, Chain) else type(teacher).__name__
            raise StudentError(
                f"OneLayer(which={self.which}) was asked for a student at site {site.name!r}.",
                f"Its teacher is {found}.",
                "select layers by segue.Span('encoder.layer', every=2). Nothing was changed.",
            )
        return copied(teacher.layers[self.which])

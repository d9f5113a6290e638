"""One student here, another there: what `segue.plan_replacement` decides, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from segue.border import checked
from segue.errors import StudentError, nearest
from segue.sites import Site, name_matches
from segue.students import StudentFactory

__all__ = ["PerSite"]


@checked
@dataclass(frozen=True, kw_only=True)
class PerSite:
    """Give each site its own student, by pattern; the first pattern that matches wins.

    >>> from segue.students import NarrowMlp, Reinit
    >>> student = PerSite(students={"layers.0": Reinit(), "layers.*": NarrowMlp(ratio=0.5)})
    >>> student(nn.Linear(4, 4), Site("layers.0"))
    Linear(in_features=4, out_features=4, bias=True)
    """

    students: Mapping[str, StudentFactory]

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        return self.of(site)(teacher, site)

    def of(self, site: Site) -> StudentFactory:
        """Return the student of a site."""
        for pattern, student in self.students.items():
            if any(name_matches(pattern, name) for name in site.names):
                return student
        raise StudentError(
            f"PerSite has no student for site {site.name!r}.",
            nearest(site.name, list(self.students)),
            "add a pattern that matches it, or do not select it. Nothing was changed.",
        )

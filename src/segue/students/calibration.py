"""Calibration: what a method of `handover.calibrate` is. It decides what to observe at a site and what to fit there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol, TypeAlias

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from segue.sites import Site

Stream: TypeAlias = Literal["teacher", "student"]


class Observer(Protocol):
    """A method at one site: observes calls, then fits the student."""

    def hooks(self) -> Iterable[RemovableHandle]:
        """Listen inside the teacher or the student while the batches pass."""
        ...

    def observe(self, teacher: Tensor, student: Tensor, mask: Tensor | None) -> None:
        """Take the outputs of both for one call, and the batch's padding mask."""
        ...

    def sums(self) -> Iterable[Tensor]:
        """Return what processes add up before the fit, in place."""
        ...

    def fit(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], float, float]:
        """Return new values for parameters of the student, by name, and its error before and after.

        `parameters` holds all of them, complete even where they are sharded.
        """
        ...


class Calibration(Protocol):
    """A method of `handover.calibrate`: frozen settings that make an observer for every site.

    With `stream = "teacher"` all sites see the original model's stream, in one pass over the batches. With "student" they are
    fitted in order, each on what the students before it return, in one pass for each site.
    """

    @property
    def stream(self) -> Stream: ...

    def observer(self, teacher: nn.Module, student: nn.Module, site: Site) -> Observer:
        """Begin at one site, or refuse it; nothing has run yet."""
        ...

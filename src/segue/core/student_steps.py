"""Steps of students: parts that change with the training, such as a dropout that fades, hear of every step from outside.

A part of a student that has `begin_step(progress, noise)` gets the fraction of the run and the noise of the step at its site,
as a gate does: the same on every rank and after a resume, and nothing is drawn inside a forward that may be computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from segue.core.seam import Seam
from segue.gates import Noise


def begin_step(seams: Iterable[Seam], seed: int, step: int, progress: float) -> None:
    """Tell the students that a step begins; at progress 1 they are as they stay."""
    for seam in seams:
        noise = Noise(seed, step, seam.site.name)
        for part in seam.student.modules():
            begin: Callable[[float, Noise], None] | None = getattr(part, "begin_step", None)
            if begin is not None:
                begin(progress, noise)

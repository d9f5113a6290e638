"""Everything beyond the paper's seven methods, on digits: other corners, other schedules, other scales of the guidance.

Command:  segue grid experiments/extras --out runs/extras --workers 2
Runtime:  60 runs; about half an hour on two cores by the demo's measure.
Expected: not known; it has not been run as a whole.
"""

from __future__ import annotations

from segue.lab import presets as scales
from segue.lab import variants
from segue.lab.config import Run


def runs(
    seeds: int = 3, methods: tuple[str, ...] = ("student_only", "dcr", "dcr_dfg", *(v.name for v in variants.EXTRAS))
) -> list[Run]:
    """Return the extras and the three methods they are variants of, at the demo's scale."""
    scale = scales.demo()
    return [scale.run(variant, seed=seed) for seed in range(seeds) for variant in variants.find(methods)]

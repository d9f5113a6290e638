"""Everything beyond the paper's seven methods, on digits: other corners, other schedules, other weights of the guidance.

Command:  segue grid experiments/extras --out runs/extras --workers 2
Runtime:  60 runs; about half an hour on two cores by the demo's measure.
Expected: not known; nobody has run all of it yet.
"""

from __future__ import annotations

from segue.lab import presets, variants
from segue.lab.config import Run


def runs(
    seeds: int = 3, methods: tuple[str, ...] = ("student_only", "dcr", "dcr_dfg", *(v.name for v in variants.EXTRAS))
) -> list[Run]:
    """Return the extras and the three methods they are variants of, with the demo's preset."""
    preset = presets.demo()
    return [preset.run(variant, seed=seed) for seed in range(seeds) for variant in variants.find(methods)]

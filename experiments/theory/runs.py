"""The paper's theory over training: gate-induced variance, curvature bias and loss path for every method, on embedded digits.

Command:  segue grid experiments/theory --out runs/theory --workers 2
Runtime:  21 runs; 25 minutes on two shared cores.
Expected: the gates' share of the gradient's variance is 0 for DCR, most of it for Theseus, in between for Theseus-Gumbel.
"""

from __future__ import annotations

from dataclasses import replace

from segue.diagnostics.recorder import MEASURES
from segue.lab import scales, variants
from segue.lab.config import Run

LOOKS = (0.02, 0.05, 0.1, 0.15, 0.18, 0.25, 1.0)  # of the run; teachers leave at 0.2


def runs(seeds: int = 3, methods: tuple[str, ...] = ("paper",), steps: int = 320) -> list[Run]:
    """Return methods x seeds."""
    scale = replace(scales.demo(steps=steps), diagnostics=MEASURES)
    looks = tuple(sorted({max(1, round(share * steps)) for share in LOOKS}))
    return [
        replace(scale.run(variant, seed=seed), experiment="theory", looks=looks)
        for seed in range(seeds)
        for variant in variants.find(methods)
    ]

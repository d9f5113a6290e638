"""The paper's theory over training: gate-induced variance, curvature bias and loss path, method by method.

Command:  segue grid experiments/theory --out runs/theory --workers 2
Runtime:  21 runs on embedded digits; 22 minutes on two shared cores.
Expected: the gates' share of the gradient's variance is exactly 0 for DCR and most of it for every random gate.

Command:  segue grid experiments/theory --out runs/theory_small --workers 2 -o folder=PATH_OF_FASHION_MNIST
          -o 'methods=["theseus", "theseus_gumbel", "dcr"]'
Runtime:  9 runs of a twelve-block ViT, variance only. Not run to its end yet.
"""

from __future__ import annotations

from dataclasses import replace

from segue.diagnostics.recorder import MEASURES
from segue.lab import presets as scales
from segue.lab import variants
from segue.lab.config import Run

LOOKS = (0.02, 0.05, 0.1, 0.15, 0.18, 0.25, 1.0)  # of the run; teachers leave at 0.2


def runs(seeds: int = 3, methods: tuple[str, ...] = ("paper",), steps: int = 320, folder: str | None = None) -> list[Run]:
    """Return methods x seeds, on digits or on the Fashion-MNIST of a folder."""
    digits = replace(scales.demo(steps=steps), diagnostics=MEASURES)
    scale = digits if folder is None else scales.small(folder, steps=steps)
    looks = tuple(sorted({max(1, round(share * steps)) for share in LOOKS}))
    return [
        replace(scale.run(variant, seed=seed), experiment="theory", looks=looks)
        for seed in range(seeds)
        for variant in variants.find(methods)
    ]

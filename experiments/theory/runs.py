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
from segue.lab import presets, variants
from segue.lab.config import Run

EVALUATIONS = (0.02, 0.05, 0.1, 0.15, 0.18, 0.25, 1.0)  # fractions of the run; the teachers leave at 0.2


def runs(seeds: int = 3, methods: tuple[str, ...] = ("paper",), steps: int = 320, folder: str | None = None) -> list[Run]:
    """Return methods x seeds, on digits or on the Fashion-MNIST of a folder."""
    digits = replace(presets.demo(steps=steps), diagnostics=MEASURES)
    preset = digits if folder is None else presets.small(folder, steps=steps)
    evaluations = tuple(sorted({max(1, round(part * steps)) for part in EVALUATIONS}))
    return [
        replace(preset.run(variant, seed=seed), experiment="theory", evaluations=evaluations)
        for seed in range(seeds)
        for variant in variants.find(methods)
    ]

"""The paper's comparison on Fashion-MNIST: seven methods, a twelve-block ViT, all of the data and 2 % of it.

Command:  segue grid experiments/small --out runs/small --workers 2 --option folder=PATH_OF_FASHION_MNIST
Runtime:  42 runs; 74 minutes on two shared cores, perhaps half of that alone.
Expected: teacher 87.3 %. DCR + DFG and Gumbel + DFG end best, without a significant difference (84.6 and 84.4 % with all of
          the data, 79.2 and 79.0 % with 2 %); student-only ends at 82.2 and 74.9 %, but leads in the first tenth of the run.
"""

from __future__ import annotations

from segue.lab import presets, variants
from segue.lab.config import Run

FRACTIONS = {"100 % of the data": 1.0, "2 % of the data": 0.02}


def runs(folder: str = "data/fashion-mnist", seeds: int = 3, methods: tuple[str, ...] = ("paper",)) -> list[Run]:
    """Return methods x fractions x seeds; the seed varies slowest, so that an interrupted grid has complete seeds."""
    preset = presets.small(folder)
    return [
        preset.run(variant, seed=seed, data_fraction=fraction, group=group)
        for seed in range(seeds)
        for group, fraction in FRACTIONS.items()
        for variant in variants.find(methods)
    ]

"""The paper's comparison on Fashion-MNIST: seven methods, a twelve-block ViT, all of the data and 2 % of it.

Command:  segue grid experiments/small --out runs/small --workers 2 --option folder=PATH_OF_FASHION_MNIST
Runtime:  42 runs; 74 minutes on two shared cores, perhaps half of that alone.
Expected: teacher 87.3 %. DCR + DFG and Gumbel + DFG end best and cannot be told apart (84.6 and 84.4 % with all of the data,
          79.2 and 79.0 % with 2 %); student-only ends at 82.2 and 74.9 %, but is ahead in the first tenth of the run.
"""

from __future__ import annotations

from segue.lab import presets as scales
from segue.lab import variants
from segue.lab.config import Run

SHARES = {"100 % of the data": 1.0, "2 % of the data": 0.02}


def runs(folder: str = "data/fashion-mnist", seeds: int = 3, methods: tuple[str, ...] = ("paper",)) -> list[Run]:
    """Return methods x shares x seeds; the seed comes last, so that an interrupted grid has whole seeds."""
    scale = scales.small(folder)
    return [
        scale.run(variant, seed=seed, share=share, group=group)
        for seed in range(seeds)
        for group, share in SHARES.items()
        for variant in variants.find(methods)
    ]

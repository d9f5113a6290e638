"""Where each method wins and loses as the model gets deeper: digits, a fifth of the data, 3, 6 and 12 blocks.

Command:  segue grid experiments/depth --out runs/depth --workers 2
Runtime:  27 runs; 11 minutes on two shared cores.
Expected: DCR + DFG ends at 91 to 92 % at every depth, KL distillation at 86 to 88 %; early in the run the order is the reverse.
"""

from __future__ import annotations

from dataclasses import replace

from segue.lab import presets, variants
from segue.lab.config import Run

METHODS = ("student_only", "distillation", "dcr_dfg")


def runs(seeds: int = 3, methods: tuple[str, ...] = METHODS, steps: int = 200) -> list[Run]:
    """Return methods x depths x seeds."""
    return [
        replace(
            presets.demo(steps=steps, depth=depth, data_fraction=0.2).run(variant, seed=seed, group=f"{depth} blocks"),
            experiment="depth",
        )
        for seed in range(seeds)
        for depth in (3, 6, 12)
        for variant in variants.find(methods)
    ]

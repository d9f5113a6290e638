"""Where each method wins and loses: less data, and more depth, on digits.

Command:  segue grid experiments/digits --out runs/digits --workers 2
"""

from __future__ import annotations

from dataclasses import replace

from segue.lab import scales, variants
from segue.lab.config import Run

SETTINGS = {  # group: depth, share of the data
    "6 blocks, 100 %": (6, 1.0),
    "6 blocks, 20 %": (6, 0.2),
    "6 blocks, 5 %": (6, 0.05),
    "3 blocks, 20 %": (3, 0.2),
    "12 blocks, 20 %": (12, 0.2),
}
METHODS = ("student_only", "distillation", "dcr_dfg")


def runs(seeds: int = 3, methods: tuple[str, ...] = METHODS, steps: int = 200) -> list[Run]:
    """Return methods x settings x seeds."""
    return [
        replace(scales.demo(steps=steps, depth=depth, share=share).run(variant, seed=seed, group=group), experiment="digits")
        for seed in range(seeds)
        for group, (depth, share) in SETTINGS.items()
        for variant in variants.find(methods)
    ]

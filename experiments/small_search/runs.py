"""Choose learning rate and weight decay by student-only training, as the paper did, and lambda by a small search.

Command:  segue grid experiments/small_search --out runs/small_search --workers 2 --option folder=PATH_OF_FASHION_MNIST
Runtime:  11 runs; half an hour on two shared cores.
Expected: 4e-3 with 0.05 and 8e-3 with 0 are best (0.821 and 0.823); lambda 0.3, 1 and 3 differ by less than their noise.
Evaluated on 2,000 training images held out; the test part is not used.
"""

from __future__ import annotations

from segue.lab import presets, variants
from segue.lab.config import Run


def runs(folder: str = "data/fashion-mnist", lr: float = 2e-3) -> list[Run]:
    """Return eight student-only runs, then three of DCR + DFG at the learning rate `lr`."""
    found: list[Run] = []
    for rate in (1e-3, 2e-3, 4e-3, 8e-3):
        for decay in (0.05, 0.0):
            preset = presets.small(folder, lr=rate, weight_decay=decay, hold_out=2000)
            (variant,) = variants.find(["student_only"])
            found.append(preset.run(variant, group=f"lr {rate:g}, weight decay {decay:g}"))
    preset = presets.small(folder, lr=lr, hold_out=2000)
    (guided,) = variants.find(["dcr_dfg"])
    for weight in (0.3, 1.0, 3.0):
        found.append(preset.run(variants.with_lambda(guided, weight), group=f"lambda {weight:g}"))
    return found

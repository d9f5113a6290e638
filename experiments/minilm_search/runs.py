"""Choose MiniLM's learning rate by student-only training, as the paper did, before any method is compared.

Command:  segue grid experiments/minilm_search --out runs/minilm_search --workers 2 -o model=FOLDER -o train=TSV -o test=TSV
Runtime:  4 runs; a quarter of an hour on two shared cores.
Expected: 3e-4 is best (0.804); 1e-3 and above fall behind.
Evaluated on 1,000 training phrases held out; the test part is not used.
"""

from __future__ import annotations

from segue.lab import presets, variants
from segue.lab.config import Run


def runs(model: str, train: str = "data/sst2_train.tsv", test: str = "data/sst2_dev.tsv") -> list[Run]:
    """Return student-only runs at four learning rates."""
    (variant,) = variants.find(["student_only"])
    return [
        presets.minilm(model, train, test, lr=rate, hold_out=1000).run(variant, group=f"lr {rate:g}")
        for rate in (1e-4, 3e-4, 1e-3, 3e-3)
    ]

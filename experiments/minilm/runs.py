"""A pretrained model: MiniLM, fine-tuned on SST-2, all its attention replaced by re-initialised attention.

Command:  segue grid experiments/minilm --out runs/minilm --workers 2 -o model=FOLDER -o train=TSV -o test=TSV
Runtime:  21 runs; 50 minutes on two shared cores.
Expected: teacher 81.9 %; every method ends between 73.6 and 75.4 %, and three seeds show no significant difference.
"""

from __future__ import annotations

from segue.lab import presets, variants
from segue.lab.config import Run


def runs(
    model: str,
    train: str = "data/sst2_train.tsv",
    test: str = "data/sst2_dev.tsv",
    seeds: int = 3,
    methods: tuple[str, ...] = ("paper",),
) -> list[Run]:
    """Return methods x seeds."""
    preset = presets.minilm(model, train, test)
    return [preset.run(variant, seed=seed) for seed in range(seeds) for variant in variants.find(methods)]

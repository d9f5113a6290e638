"""The paper's experiment: ViT-Small/16, pretrained on ImageNet, on CIFAR-100, all attention replaced.

Command:  segue grid experiments/paper --out runs/paper -o folder=PATH_OF_CIFAR_100
          (-o download=true fetches the data; a GPU per run, or accelerate launch for one run over many)
Runtime:  not measured by us: no GPU was at hand. The paper used A100s.
Expected: all methods end at 78 to 80 %, DCR earlier (the paper, one seed). What is new here: seeds and intervals.

Settings are those of section 4 and appendix A.1, except six that docs/lab.md lists with their reasons. The largest: the
appendix unfreezes all layers in stage 2, Algorithm 1 trains students only; this is the latter, `-o train=all` the former.
"""

from __future__ import annotations

from typing import Literal

from segue.lab import presets, variants
from segue.lab.config import Run


def runs(
    folder: str | None = None,
    download: bool = False,
    precision: str = "bf16",
    seeds: int = 3,
    methods: tuple[str, ...] = ("paper",),
    train: Literal["students", "all"] = "students",
) -> list[Run]:
    """Return methods x seeds."""
    preset = presets.paper(folder=folder, download=download, precision=precision)
    return [preset.run(variant, seed=seed, train=train) for seed in range(seeds) for variant in variants.find(methods)]

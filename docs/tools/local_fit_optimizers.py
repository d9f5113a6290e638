"""Compare optimizers in the local fit: re-initialised attention of a 12-block ViT on 320 digits, without a label.

python docs/tools/local_fit_optimizers.py                                    # the complete grid: about 40 minutes on one core
python docs/tools/local_fit_optimizers.py --only muon --updates 16 --rates 0.032 --seeds 0 1 --steps 25
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import segue
from segue.lab import presets
from segue.lab.teachers import teacher_model
from segue.phases import Phase

PRESET = presets.demo(depth=12)
TOTAL, STEPS, BATCH, IMAGES, TRAINING_IMAGES = 500, 100, 64, 320, 1297
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2, 1.28e-1)
SPLITS = {1: (1, 1), 16: (4, 4)}  # updates per batch: sub-batches, passes


def optimizers(kind: str, parameters: list[nn.Parameter], lr: float) -> list[Any]:
    """Build an optimizer without weight decay; Muon takes matrices alone, with steps as large as AdamW's."""
    if kind != "muon":
        decay = {"weight_decay": 0.0}
        return [
            {"adamw": torch.optim.AdamW, "nadam": torch.optim.NAdam, "radam": torch.optim.RAdam}[kind](parameters, lr, **decay)
        ]
    matrices = [p for p in parameters if p.dim() == 2]
    rest = [p for p in parameters if p.dim() != 2]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=lr, weight_decay=0.0)]


def fitted(
    teacher: nn.Module, test: list[Any], kind: str, lr: float, updates: int, seed: int, steps: int
) -> tuple[float, float]:
    """Fit the students for some steps; return their mean relative error and their accuracy on the test images."""
    split, reuse = SPLITS[updates]
    phases = (Phase(name="local fit", length=STEPS / TOTAL, local=True, split=split, reuse=reuse), Phase(name="rest"))
    guidance = segue.losses.FeatureGuidance()
    model = copy.deepcopy(teacher).train()
    plan = segue.Plan(sites=PRESET.task.sites, guidance=guidance, phases=phases, seed=seed)
    handover = segue.replace_(model, plan, total_steps=TOTAL)
    parameters = list(handover.parameters())
    used = optimizers(kind, parameters, lr)
    for step, (images, _) in zip(range(steps), batches(seed), strict=False):
        for optimizer in used:
            for group in optimizer.param_groups:
                group["lr"] = lr * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        with handover.features() as features:
            model(images)
        for loss in features.losses():
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            for optimizer in used:
                optimizer.step()
                optimizer.zero_grad()
        handover.step()
    errors = [found.relative_error for found in handover.similarity(test[0][0]).values()]
    with torch.no_grad(), handover.as_student():
        model.eval()
        right = torch.cat([model(images).argmax(-1) == labels for images, labels in test])
    return sum(errors) / len(errors), right.float().mean().item()


def batches(seed: int) -> Iterable[Any]:
    """Yield shuffled batches of the few images without end."""
    found = PRESET.task.load(data_fraction=IMAGES / TRAINING_IMAGES, seed=seed).train(BATCH, seed)
    epoch = 0
    while True:
        found.set_epoch(epoch)
        yield from found
        epoch += 1


def main() -> None:
    """Print one line per fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["adamw", "muon", "nadam", "radam"])
    parser.add_argument("--updates", nargs="+", type=int, default=[1, 16], help="Updates per batch: 1 or 16.")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--teachers", type=Path, default=Path("runs/teachers"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = PRESET.task.load()
    teacher, known = teacher_model(PRESET.teacher, options.teachers, loaded)
    print(f"teacher: accuracy {known['scores']['accuracy']:.3f}")
    test = list(loaded.final)
    print("| updates per batch | optimizer | rate | seed | relative error | accuracy |\n|---|---|---|---|---|---|")
    for updates in options.updates:
        for kind in options.only:
            for lr in options.rates:
                for seed in options.seeds:
                    error, accuracy = fitted(teacher, test, kind, lr, updates, seed, options.steps)
                    print(f"| {updates} | {kind} | {lr:g} | {seed} | {error:.3f} | {accuracy:.3f} |", flush=True)


if __name__ == "__main__":
    main()

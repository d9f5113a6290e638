"""How a local fit spends its operations: parts of a batch, passes over them and steps, against the accuracy of the students.

Command:  python -m experiments.evidence.updates    (the digits of settings.py; about five minutes of one thread)
Expected: docs/lab-log.md.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import torch

import segue
from experiments.evidence.runs import runs
from segue.lab.teachers import teacher_model
from segue.phases import Phase
from segue.reporting.formatting import flops
from segue.training.fit import fit
from segue.training.recipe import Recipe

TEACHERS = Path("runs/evidence/digits_tune/teachers")
TRIED = (  # split, reuse, steps, learning rates
    (1, 1, 40, (0.016, 0.032)),
    (1, 1, 80, (0.016, 0.032)),
    (4, 4, 8, (0.008, 0.016)),
    (4, 4, 16, (0.008, 0.016)),
    (16, 1, 8, (0.008, 0.016)),
    (16, 1, 16, (0.008, 0.016)),
    (16, 1, 32, (0.004, 0.008)),
    (16, 2, 8, (0.008, 0.016)),
    (32, 1, 16, (0.004, 0.008)),
)


def main() -> None:
    run = next(iter(runs("digits", seeds=1)))
    data, everything = run.task.load(data_fraction=run.data_fraction), run.task.load()
    for split, reuse, steps, rates in TRIED:
        for lr in rates:
            model, _ = teacher_model(run.teacher, TEACHERS, everything)
            phase = Phase(name="local fit", local=True, task=0.0, lr=lr, weight_decay=0.0, split=split, reuse=reuse)
            plan = segue.Plan(sites="blocks.*.attn", phases=(phase,), guidance=segue.losses.FeatureGuidance())
            batches = data.train(run.batch, 0)
            spent = segue.cost(model, plan, next(iter(batches)), total_steps=steps, loss_fn=run.task.loss).per_step
            torch.manual_seed(0)
            found = fit(
                model,
                plan,
                batches,
                run.task.loss,
                recipe=Recipe(steps=steps, lr=lr),
                validation=data.validation,
                evaluations=4,
            )
            points = [
                f"{flops(list(accumulate(spent))[point['step'] - 1])} {100 * point['students']['accuracy']:.1f} %"
                for point in found.history
                if point["step"]
            ]
            print(f"| {split} | {reuse} | {steps} | {lr} | {' | '.join(points)} |", flush=True)


if __name__ == "__main__":
    main()

"""Every claim of the paper's theory at one step: the digits teacher, a tenth of a DCR run done, alpha 0.5.

Command:  python experiments/theory/snapshot.py
Runtime:  six minutes on two cores, without the teacher.
Expected: the tables of docs/theory.md, and its figures in docs/figures/.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch

import segue
from segue.diagnostics import curvature_bias, distribution_of, gate_gradient_variance, loss_path
from segue.gates import Bernoulli, Blend, GumbelSoftmax
from segue.lab import presets
from segue.lab.teachers import teacher_model

GATES = {"Blend": Blend(), "Bernoulli": Bernoulli(), "GumbelSoftmax": GumbelSoftmax()}
MINIBATCHES = 8


def main() -> None:
    """Train a little, measure, print tables, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--teachers", type=Path, default=Path("runs/teachers"), help="folder of trained teachers (%(default)s)")
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"), help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="of 320, before the measurement (%(default)s)")
    options = parser.parse_args()
    handover, batches, loss_fn = a_tenth_of_a_run(options.teachers, options.steps)

    print("\n## The gate distribution\n\n| p | mean of a soft coin | its variance | p(1 - p) |\n|---|---|---|---|")
    for p in (0.1, 0.3, 0.5, 0.7, 0.9):
        found = distribution_of(GumbelSoftmax(), 1 - p)
        print(f"| {p} | {found.mean:.3f} | {found.variance:.3f} | {p * (1 - p):.3f} |")

    print("\n## Variance of the students' gradients, all sites\n")
    print("| gate | gates that move | by the gates | standard error | the paper's formula | over data | whole |")
    print("|---|---|---|---|---|---|---|")
    for name, gate in GATES.items():
        found = gate_gradient_variance(handover, batches, loss_fn, gate=gate)
        for setting, how in ((found.alone, "one at a time"), (found.together, "all")):
            total = setting.total
            numbers = (total.gate, total.standard_error, total.predicted, total.data, total.total)
            print(f"| {name} | {how} ({setting.how}) | {' | '.join(f'{number:.4g}' for number in numbers)} |")
        if name == "Bernoulli":
            found.draw(options.figures / "theory-variance.png")

    for name in ("Bernoulli", "GumbelSoftmax"):
        bias = curvature_bias(handover, batches[:2], loss_fn, gate=GATES[name])
        print(f"\n## Curvature bias, {name}\n\n{bias}")
        if name == "Bernoulli":
            bias.draw(options.figures / "theory-curvature.png")

    path = loss_path(handover, batches[:2], loss_fn)
    print(f"\n## Loss path\n\n{path}")
    path.draw(options.figures / "theory-path.png")


def a_tenth_of_a_run(teachers: Path, steps: int) -> tuple[segue.Handover, list[object], object]:
    """Train DCR for a few steps of the demo's run, and give back the handover with minibatches to measure on."""
    preset = presets.demo()
    everything, part = preset.task.load(), preset.task.load(data_fraction=preset.data_fraction)
    model, _ = teacher_model(preset.teacher, teachers, everything)
    handover = segue.replace_(model.train(), segue.methods.dcr(sites=preset.task.sites), total_steps=preset.recipe.steps)
    optimizer = torch.optim.AdamW(handover.parameters(), lr=preset.recipe.lr)
    stream = part.train(preset.batch, 0)
    for epoch in range(steps):
        stream.set_epoch(epoch)
        for batch in stream:
            if handover.steps_done == steps:
                break
            preset.task.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            handover.step()
    population = everything.train(preset.batch, 1)
    return handover, list(islice(population, MINIBATCHES)), preset.task.loss


if __name__ == "__main__":
    main()

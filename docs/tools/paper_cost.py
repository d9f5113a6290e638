"""Count what the paper's experiment costs on a GPU: operations of every run, and hours at a stated utilisation.

python docs/tools/paper_cost.py            # prints the table
python docs/tools/paper_cost.py --write    # and writes it into docs/lab.md
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch

import segue
from segue.lab import models, presets, variants
from segue.reporting.formatting import flops
from segue.training.tasks import Classification

PAGE = Path(__file__).parents[1] / "lab.md"
BEGIN, END = "<!-- paper cost -->", "<!-- end -->"
PEAK, UTILISATION = 312e12, 0.35  # operations a second of an A100 in bf16, dense; the part of them that training gets
TRAIN, TEST, BATCH, SEEDS = 50_000, 10_000, 128, 5
SHORTER = 50  # phases are fractions of a run, so that one of a fiftieth of the steps is counted


def counted() -> dict[str, tuple[float, float]]:
    """Return the operations of a run of each method: of training, and of its evaluations."""
    preset = presets.paper()
    model = models.build("timm:vit_small_patch16_224")
    model.head = torch.nn.Linear(384, 100, device="meta")
    images, labels = torch.zeros(BATCH, 3, 224, 224, device="meta"), torch.zeros(BATCH, dtype=torch.long, device="meta")
    steps = preset.recipe.total_steps(TRAIN // BATCH)
    found = {}
    for variant in (*variants.PAPER, variants.METHODS["local_fit"]):
        plan = variant.plan(sites=preset.task.sites)
        bill = segue.cost(
            model, plan, (images, labels), total_steps=steps // SHORTER, loss_fn=Classification(label_smoothing=0.1)
        )
        each = preset.evaluations * (TEST / BATCH) * bill.teacher_pass
        found[variant.label] = (SHORTER * float(sum(bill.per_step)), 2 * each)  # of the blend, and of the students alone
    return found


def teacher_flops(model_pass: float, preset: presets.Preset) -> float:
    """Return the operations of the teacher's stages: a forward and two for a backward, of the head alone one forward."""
    epochs = [(stage.recipe.epochs or 0.0, stage.head_only) for stage in preset.teacher.stages]
    return sum(count * (TRAIN // BATCH) * model_pass * (1 if head else 3) for count, head in epochs)


def table(found: dict[str, tuple[float, float]]) -> str:
    """Write the operations and hours of each method, and of all of them."""
    rows = ["| run | training | evaluations | GPU hours |", "|---|---|---|---|"]
    preset = presets.paper()
    once = next(iter(found.values()))[1] / 2 / preset.evaluations / (TEST / BATCH)
    whole = {"teacher, once": (teacher_flops(once, preset), 0.0), **found}
    rows += [f"| {name} | {flops(a)} | {flops(b)} | {hours(a + b):.2f} |" for name, (a, b) in whole.items()]
    total = sum(whole["teacher, once"]) + SEEDS * sum(a + b for a, b in found.values())
    rows.append(f"| all of them, {SEEDS} seeds | | | {hours(total):.0f} |")
    note = (
        f"Counted by `python docs/tools/paper_cost.py` for batches of {BATCH} images of 224 x 224 pixels, "
        f"{preset.recipe.epochs:.0f} epochs; hours of one A100 ({PEAK / 1e12:.0f} TFLOP/s in bf16) that runs at "
        f"{100 * UTILISATION:.0f} % of its peak, an assumption: no GPU was at hand. Reading and resizing images is not counted."
    )
    return "\n".join([note, "", *rows])


def hours(operations: float) -> float:
    """Return the hours of one GPU at the stated utilisation."""
    return operations / (PEAK * UTILISATION) / 3600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="Write the table into docs/lab.md.")
    text = table(counted())
    print(text)
    if parser.parse_args().write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{text}\n{END}", page, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()

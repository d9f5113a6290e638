"""The teachers that are trained here, because no pretrained ones can be had: each once, resumed after an interruption.

Command:  SEGUE_DATA=DATA OMP_NUM_THREADS=1 python -m experiments.evidence.train_teachers cifar100    (then minilm)
Runtime:  README.md; CIFAR-100 some 80 minutes of one thread.
Result:   experiments/evidence/teachers/cifar100.safetensors (float16, 2 MB) and cifar100.json (recipe, accuracy, seconds), to
          commit; MiniLM stays in runs/evidence/teachers, where its runs find it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.evidence.settings import CIFAR100_TEACHER, cifar100_task, minilm_teacher
from segue.core import tensor_files
from segue.core.backbone import evaluating
from segue.lab.config import Stage, Teacher
from segue.lab.tasks import Loaded, Task
from segue.lab.teachers import teacher_model
from segue.reporting.records import commit, write_json
from segue.training.recipe import Recipe

RUNS = Path("runs/evidence/teachers")  # beside the grids: `segue grid --out runs/evidence/minilm` looks for teachers there


def cifar100_teacher() -> Teacher:
    """Return how a ViT of a million parameters is trained: crops, mirrored images, label smoothing 0.1, 12 epochs."""
    recipe = Recipe(epochs=12, lr=2e-3, warmup=0.1)  # weight decay 0.05, clipping 1.0, half a cosine
    return Teacher(task=cifar100_task(), stages=(Stage(recipe=recipe),), batch=128)


TEACHERS = {"cifar100": cifar100_teacher, "minilm": minilm_teacher}


def train(teacher: Teacher, folder: Path, kept: Path | None = None) -> dict[str, Any]:
    """Train a teacher or resume, keep its weights in half precision if asked to, and return its scores on all test examples."""
    loaded = teacher.task.load()
    model, known = teacher_model(teacher, folder, loaded)
    if kept is None:
        return dict(known["scores"])
    half = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    model.load_state_dict(half)  # what is evaluated is what is kept
    record = {
        "scores": scores_of(model, teacher.task, loaded),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": known["points"][-1]["seconds"],
        "points": [{"step": point["step"], **point["scores"]} for point in known["points"]],  # on the way, in float32
        "config": known["config"],
        "commit": commit(),
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    tensor_files.write(kept, half)
    write_json(record, kept.with_suffix(".json"))
    return dict(record["scores"])


@torch.no_grad()
def scores_of(model: torch.nn.Module, task: Task, loaded: Loaded) -> dict[str, float]:
    """Return the mean of every score over all test examples."""
    with evaluating(model):
        found = [task.loss.scores(model, batch) for batch in loaded.final]
    return {name: torch.cat([one[name] for one in found]).double().mean().item() for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=TEACHERS)
    parser.add_argument("--runs", type=Path, default=RUNS, help="Folder of checkpoints and of the complete teacher.")
    parser.add_argument("--out", type=Path, help="File of the weights to commit, by default that of the setting.")
    parser.add_argument("--steps", type=int, help="Number of steps, to try it out; by default those of the recipe.")
    options = parser.parse_args()
    teacher = TEACHERS[options.name]()
    if options.steps is not None:
        (stage,) = teacher.stages
        teacher = replace(teacher, stages=(replace(stage, recipe=replace(stage.recipe, steps=options.steps, epochs=None)),))
    kept = options.out or (Path(CIFAR100_TEACHER) if options.name == "cifar100" else None)
    print(train(teacher, options.runs, kept))


if __name__ == "__main__":
    main()

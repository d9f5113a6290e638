"""Where the CPU time of a lab run goes: `small` on Fashion-MNIST with a short teacher, timers around the parts of a run.

Command: python docs/tools/lab_time.py FOLDER METHOD --out DIR; about a minute of one core.
Expected: docs/lab-log.md, "where the time of a lab run goes".
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from segue.diagnostics.recorder import Recorder
from segue.lab import presets, run, variants
from segue.lab.tasks import ImageTask
from segue.training.evaluation import Evaluator
from segue.training.fit import Loop
from segue.training.resume import Checkpoints

PARTS: dict[str, list[tuple[Any, str]]] = {
    "training steps": [(Loop, "step")],
    "evaluations of the students, with similarity": [(Evaluator, "of_students")],
    "other evaluations": [(Evaluator, "__call__")],
    "recorder of variance": [(Recorder, "__call__")],
    "segue.cost": [(run, "cost")],
    "drift and checkpoints": [(run.Drift, "__init__"), (run.Drift, "__call__"), (Checkpoints, "save")],
    "reading the data": [(ImageTask, "load")],
    "teacher": [(run, "teacher_model")],
    "the rest": [(run, "run")],
}


def timed(owner: Any, name: str, label: str, spent: dict[str, float], inside: list[float]) -> None:
    """Add the CPU time of a function to its label, without that of the timed functions that it calls."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        begun = time.process_time()
        inside.append(0.0)
        try:
            return function(*args, **kwargs)
        finally:
            took = time.process_time() - begun
            spent[label] += took - inside.pop()
            if inside:
                inside[-1] += took

    setattr(owner, name, call)


def main() -> None:
    """Train one run and print the share of each part, without data and teacher, which is trained before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="Folder of Fashion-MNIST's IDX files.")
    parser.add_argument("method", help="Method, as `segue methods` lists it.")
    parser.add_argument("--out", type=Path, required=True, help="Folder of the run.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    preset = presets.small(options.folder)
    (stage,) = preset.teacher.stages
    short = replace(stage, recipe=replace(stage.recipe, steps=40))  # only time matters
    (variant,) = variants.find([options.method])
    config = replace(preset, teacher=replace(preset.teacher, stages=(short,))).run(variant)
    run.teacher_model(config.teacher, run.teachers_of(config.teacher, options.out / config.name), config.teacher.task.load())
    spent: dict[str, float] = defaultdict(float)
    inside: list[float] = []
    for label, places in PARTS.items():
        for owner, name in places:
            timed(owner, name, label, spent, inside)
    run.run(config, options.out / config.name)
    total = sum(seconds for label, seconds in spent.items() if label not in ("reading the data", "teacher"))
    for label in PARTS:
        print(f"| {label} | {spent[label]:.1f} s | {spent[label] / total:.1%} |")


if __name__ == "__main__":
    main()

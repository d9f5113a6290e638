"""Runs that take seconds: a two-block ViT on the embedded digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue import methods
from segue.data import Digits
from segue.lab.config import Run, Stage, Teacher
from segue.lab.models import SmallViT
from segue.lab.tasks import ImageTask
from segue.training.recipe import Recipe

TASK = ImageTask(source=Digits(), model=SmallViT(depth=2, width=16, heads=2), eval_examples=100)
HEAD = Stage(recipe=Recipe(steps=3, lr=1e-2, warmup=0.5), head_only=True)
WHOLE = Stage(recipe=Recipe(steps=5, lr=1e-2))
TEACHER = Teacher(task=TASK, stages=(HEAD, WHOLE), batch=32)


def config(
    method: str | Callable[..., Any] = "dcr_dfg", *, seed: int = 0, plan: dict[str, Any] | None = None, **more: Any
) -> Run:
    """Return a run of a method; `plan` changes its plan, the rest the run."""
    name = method if isinstance(method, str) else method.__name__
    make = getattr(methods, method) if isinstance(method, str) else method
    settings = {
        "experiment": "tiny",
        "method": name,
        "label": name,
        "plan": make(**{"sites": TASK.sites, "seed": seed, **(plan or {})}),
        "task": TASK,
        "teacher": TEACHER,
        "recipe": Recipe(steps=10, lr=1e-2, warmup=0.2, seed=seed),
        "batch": 16,
        "data_fraction": 0.1,
        "evaluations": 4,
        "seed": seed,
    }
    return Run(**{**settings, **more})

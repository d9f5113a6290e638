"""What `Recipe(on_nan="skip")` costs a step of fit(): the buffers that modules update are copied before it.

Command: python -m benchmarks.performance --only skipping; about three minutes on two cores.
Expected: a model without buffers that change copies nothing and costs the same; with batch norm the statistics are copied,
some kilobytes, which does not show in the time of a step.
"""

from __future__ import annotations

import copy
import itertools
import statistics
from typing import Any

import torch
from torch import nn

from benchmarks.settings import Settings
from benchmarks.timing import Ratio, Step, rounds
from benchmarks.trainees import LEARNING_RATE, Batch
from segue.training import distributed
from segue.training.batches import Stream
from segue.training.fit import Loop
from segue.training.recipe import Recipe
from segue.training.resume import Interruption
from segue.training.tasks import Classification

STOP, SKIP = "stop", "skip"


def measure(settings: Settings) -> dict[str, Any]:
    """Time pairs of steps, one of each setting, of a model with batch norm and of one without."""
    import timm

    torch.manual_seed(0)
    models = {
        settings.norm_model: timm.create_model(settings.norm_model, pretrained=False, num_classes=settings.classes),
        settings.model: timm.create_model(
            settings.model, pretrained=False, num_classes=settings.classes, img_size=settings.image, **settings.model_options
        ),
    }
    points = []
    for name, model in models.items():
        image = settings.norm_image if name == settings.norm_model else settings.image
        batch = torch.randn(settings.small_batch, 3, image, image), torch.randint(settings.classes, (settings.small_batch,))
        loops = {on_nan: _loop(copy.deepcopy(model), batch, on_nan) for on_nan in (STOP, SKIP)}
        steps: dict[str, Step] = {on_nan: _step(loop) for on_nan, loop in loops.items()}
        times = rounds(steps, 0.0, least=settings.pairs)
        buffers = loops[SKIP].buffers
        assert buffers is not None
        points.append({"model": name, "image": image, "copied": buffers.copied, "milliseconds": times})
    return {"batch": settings.small_batch, "points": points}


def _loop(model: nn.Module, batch: Batch, on_nan: Any) -> Loop:
    """Build the loop of a fit() without a plan, which reads one batch again and again."""
    recipe = Recipe(steps=10**6, lr=LEARNING_RATE, on_nan=on_nan)
    accelerator = distributed.accelerator(recipe, (), None)
    processes = distributed.Processes(accelerator.device)
    stream = Stream(itertools.repeat(batch))
    return Loop(model, None, stream, Classification(), recipe, 10**6, accelerator, processes)


def _step(loop: Loop) -> Step:
    return lambda: loop.step(Interruption())


def section(result: dict[str, Any]) -> list[str]:
    """Write the table: bytes, medians and their ratio."""
    pairs = len(result["points"][0]["milliseconds"][STOP])
    lines = [
        f'A step of `segue.fit(model, None, ...)` with `Recipe(on_nan="skip")`, which can give back the buffers of a skipped '
        f'step, against `on_nan="stop"`, which copies nothing: batch {result["batch"]}, {pairs} pairs of steps in turn.',
        "",
        "| model | image | copied per step | stop, median | skip, median | skip / stop |",
        "|---|---|---|---|---|---|",
    ]
    for point in result["points"]:
        stop, skip = point["milliseconds"][STOP], point["milliseconds"][SKIP]
        lines.append(
            f"| {point['model']} | {point['image']} | {point['copied']:,} bytes | {statistics.median(stop):.1f} ms "
            f"| {statistics.median(skip):.1f} ms | {Ratio.of(skip, stop).fine} |"
        )
    return lines

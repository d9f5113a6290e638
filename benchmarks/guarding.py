"""What `Recipe(guard=Guard())` costs a step of fit(): a few numbers are judged, and every 20 steps a good state is copied.

Command: python -m benchmarks.performance --only guarding; about three minutes on two cores.
Expected: the weights and two moments of each are copied every 20 steps, three times the bytes of what trains, which is small
compared with 20 steps of training it; judging reads no more from the device than fit() does anyway.
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
from segue.core.handover import replace_
from segue.losses import FeatureGuidance
from segue.plan import Plan
from segue.schedules import Constant
from segue.training import distributed
from segue.training.batches import Stream
from segue.training.fit import Loop
from segue.training.guard import Guard
from segue.training.recipe import Recipe
from segue.training.resume import Interruption
from segue.training.tasks import Classification

WITHOUT, WITH = "without", "with"


def measure(settings: Settings) -> dict[str, Any]:
    """Time pairs of steps, one with and one without a guard, of a handover and of a model that trains completely."""
    import timm

    torch.manual_seed(0)
    sizes = {"num_classes": settings.classes, "img_size": settings.image}
    model = timm.create_model(settings.model, pretrained=False, **sizes, **settings.model_options)
    half = Constant(alpha=0.5)
    plans = {
        "students": Plan(sites=settings.sites, schedule=half, guidance=FeatureGuidance(schedule=Constant(alpha=1.0))),
        "everything, without a plan": None,
    }
    images = torch.randn(settings.small_batch, 3, settings.image, settings.image)
    batch = images, torch.randint(settings.classes, (settings.small_batch,))
    points = []
    for name, plan in plans.items():
        loops = {kind: _loop(copy.deepcopy(model), plan, batch, kind == WITH) for kind in (WITHOUT, WITH)}
        steps: dict[str, Step] = {kind: _step(loop) for kind, loop in loops.items()}
        times = rounds(steps, 0.0, least=settings.pairs)
        guard = loops[WITH].guard
        assert guard is not None
        points.append({"trains": name, "copied": guard.copied, "every": guard.settings.every, "milliseconds": times})
    return {"batch": settings.small_batch, "model": settings.model, "points": points}


def _loop(model: nn.Module, plan: Plan | None, batch: Batch, guarded: bool) -> Loop:
    """Build the loop of a fit(), which reads one batch again and again."""
    recipe = Recipe(steps=10**6, lr=LEARNING_RATE, guard=Guard() if guarded else None)
    accelerator = distributed.accelerator(recipe, (), None)
    processes = distributed.Processes(accelerator.device)
    handover = None if plan is None else replace_(model, plan, total_steps=10**6)
    return Loop(model, handover, Stream(itertools.repeat(batch)), Classification(), recipe, 10**6, accelerator, processes)


def _step(loop: Loop) -> Step:
    return lambda: loop.step(Interruption())


def section(result: dict[str, Any]) -> list[str]:
    """Write the table: bytes, medians, their ratio, and the ratio of means, which has the copies in it."""
    first = result["points"][0]
    lines = [
        f"A step of `segue.fit` on {result['model']} with `Recipe(guard=segue.Guard())` against one without: batch "
        f"{result['batch']}, {len(first['milliseconds'][WITH])} pairs of steps in turn. One step in {first['every']} copies a "
        "good state, so the ratio of the means shows the copies and that of the medians the rest.",
        "",
        "| what trains | copied, one step in so many | without, median | with, median | with / without | ratio of means |",
        "|---|---|---|---|---|---|",
    ]
    for point in result["points"]:
        without, guarded = point["milliseconds"][WITHOUT], point["milliseconds"][WITH]
        lines.append(
            f"| {point['trains']} | {point['copied']:,} bytes, 1 in {point['every']} | {statistics.median(without):.1f} ms "
            f"| {statistics.median(guarded):.1f} ms | {Ratio.of(guarded, without).fine} "
            f"| {statistics.fmean(guarded) / statistics.fmean(without):.3f} |"
        )
    return lines

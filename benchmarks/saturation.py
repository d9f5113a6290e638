"""Batch and sequence length grown until the machine is saturated: does the clock follow the operations?

Command: python -m benchmarks.performance --only saturation; about five minutes on two cores.
Expected: where the machine is saturated, time ratios are FLOP ratios; below that, overheads that have nothing to do with
operations weigh more. The paper leaves this regime open.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

from benchmarks.settings import Settings
from benchmarks.timing import Ratio, percent, rounds
from benchmarks.trainees import BLEND, BY_HAND, KL, Bench, warm_up

COMPARED = (BLEND, KL)
NAMES = (BY_HAND, *COMPARED)
RISE = 1.05  # a machine whose rate rises by more is not saturated yet
NEAR = 0.05  # a time ratio so close to its FLOP ratio follows it
AXES = {"batch": "batch", "sequence": "tokens"}


def measure(settings: Settings) -> dict[str, Any]:
    """Time student-only, blend and distillation at every size; small sizes get more rounds, because they are noisier."""
    sizes = [("batch", batch, settings.image) for batch in settings.batches]
    sizes += [("sequence", settings.small_batch, image) for image in settings.images]
    weights = [(batch * image**2) ** 0.5 for _, batch, image in sizes]
    plan = [(size, settings.seconds("saturation") * weight / sum(weights)) for size, weight in zip(sizes, weights, strict=True)]
    random.Random(0).shuffle(plan)
    points = [point(settings, axis, batch, image, seconds) for (axis, batch, image), seconds in plan]
    return {axis: sorted((p for p in points if p["axis"] == axis), key=lambda p: p[key]) for axis, key in AXES.items()}


def point(settings: Settings, axis: str, batch: int, image: int, seconds: float) -> dict[str, Any]:
    """Count and time one size."""
    bench = Bench(settings, batch, image)
    trainees = {BY_HAND: bench.by_hand(), BLEND: bench.blend(), KL: bench.distillation()}
    warm_up(trainees.values())
    return {
        "axis": axis,
        "batch": batch,
        "image": image,
        "tokens": (image // settings.patch) ** 2 + 1,
        "flops": {name: trainee.flops() for name, trainee in trainees.items()},
        "milliseconds": rounds({name: t.step for name, t in trainees.items()}, seconds, least=settings.least_rounds),
    }


def rate(p: dict[str, Any]) -> float:
    """Return the GFLOP/s that student-only achieves."""
    return float(p["flops"][BY_HAND] / statistics.median(p["milliseconds"][BY_HAND]) / 1e6)


def ratio(p: dict[str, Any], name: str) -> Ratio:
    return Ratio.of(p["milliseconds"][name], p["milliseconds"][BY_HAND])


def flop_ratio(p: dict[str, Any], name: str) -> float:
    return float(p["flops"][name] / p["flops"][BY_HAND])


def saturated_from(points: list[dict[str, Any]]) -> int | None:
    """Return the place of the first size whose rate no larger one beats by more than 5 %; the largest alone proves nothing."""
    rates = [rate(p) for p in points]
    return next((i for i in range(len(rates) - 1) if max(rates[i + 1 :]) <= RISE * rates[i]), None)


def follows_from(points: list[dict[str, Any]], name: str) -> int | None:
    """Return the place of the first size from which on the time ratio stays within 5 % of the FLOP ratio: the crossover."""
    near = [abs(ratio(p, name).median / flop_ratio(p, name) - 1) <= NEAR for p in points]
    return next((i for i in range(len(near)) if all(near[i:])), None)


def section(result: dict[str, Any]) -> list[str]:
    """Write both tables, and where saturation and crossover lie."""
    lines = [
        "Time ratios to student-only and the ratios of operations, as the batch and then the image grow. The machine counts "
        f"as saturated from the first size whose GFLOP/s no larger size beats by more than {percent(RISE - 1)}.",
    ]
    for axis, key in AXES.items():
        points = result[axis]
        fixed = f"{points[0]['tokens']} tokens" if axis == "batch" else f"batch {points[0]['batch']}"
        lines += [
            "",
            f"| {key} ({fixed}) | GFLOP/s, student-only | blend, time | FLOPs | KL distillation, time | FLOPs |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {p[key]} | {rate(p):.1f} | "
            + " | ".join(f"{ratio(p, name)} | {flop_ratio(p, name):.3f}" for name in COMPARED)
            + " |"
            for p in points
        ]
        lines += ["", *reading(points, key)]
    return [*lines, "", "![Time ratios and rates as the work grows](figures/performance-saturation.png)"]


def reading(points: list[dict[str, Any]], key: str) -> list[str]:
    """Say where saturation begins, what the ratios do on its two sides, and where they begin to follow the operations."""
    start = saturated_from(points)
    if start is None:
        said = [f"The rate still rises at {size(points[-1], key)}: saturation was not reached."]
    elif start == 0:
        said = [f"Saturated from the smallest size, {size(points[0], key)}, on."]
    else:
        said = [f"Saturated from {size(points[start], key)} on."]
    for name in COMPARED:
        parts = {"below saturation": points[:start], "from there on": points[start:]} if start else {"over all sizes": points}
        spans = ", ".join(f"{span(part, name)} {where}" for where, part in parts.items())
        said.append(f"{name}: {spans}; {crossover(points, name, key)}.")
    more = [size(p, key) for p in points if ratio(p, BLEND).median >= ratio(p, KL).median]
    where = f"more expensive of the two at {', '.join(more)}" if more else "cheaper of the two at every size"
    said.append(f"By the medians the blend is the {where}.")
    return [" ".join(said)]


def crossover(points: list[dict[str, Any]], name: str, key: str) -> str:
    """Say from where on the clock follows the operations."""
    place = follows_from(points, name)
    if place is None:
        return f"no crossover: at the largest size it is more than {percent(NEAR)} away from its FLOP ratio"
    where = "at every size" if place == 0 else f"from {size(points[place], key)} on"
    return f"within {percent(NEAR)} of its FLOP ratio {where}"


def size(p: dict[str, Any], key: str) -> str:
    return f"batch {p[key]}" if key == "batch" else f"{p[key]} tokens"


def span(points: list[dict[str, Any]], name: str) -> str:
    medians = [ratio(p, name).median for p in points]
    return f"{min(medians):.2f}" if len(medians) == 1 else f"{min(medians):.2f} to {max(medians):.2f}"

"""The cost of a blend and of a distillation as more modules are replaced.

Command: python -m benchmarks.performance --only replaced; about three minutes on two cores.
Expected: the blend's extra cost grows with every replaced module, that of a full teacher does not; attention alone never
reaches the break-even.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from benchmarks.settings import Settings
from benchmarks.timing import Ratio, Step, rounds
from benchmarks.trainees import BLEND, BY_HAND, KL, TEACHERS, Bench, warm_up
from segue.diagnostics.counting import flops

COMPARED = (BLEND, KL)
FULL = "full teacher's forward"


def measure(settings: Settings) -> dict[str, Any]:
    """Count and time student-only, blend and distillation for every number of replaced modules."""
    steps: dict[str, Step] = {}
    groups: list[list[str]] = []
    counted: dict[int, dict[str, int]] = {}
    for count in settings.counts:
        bench = Bench(settings, settings.small_batch, count=count)
        trainees = {BY_HAND: bench.by_hand(), BLEND: bench.blend(), KL: bench.distillation()}
        warm_up(trainees.values())
        counted[count] = {name: trainee.flops() for name, trainee in trainees.items()}
        counted[count] |= {TEACHERS: flops(bench.teachers_alone()[0]), FULL: full_forward(bench)}
        groups.append([f"{count} {name}" for name in trainees])
        steps |= {f"{count} {name}": trainee.step for name, trainee in trainees.items()}
    times = rounds(steps, settings.seconds("replaced"), least=settings.least_rounds, groups=groups)
    names = (BY_HAND, *COMPARED)
    points = [
        {"count": count, "flops": counted[count], "milliseconds": {name: times[f"{count} {name}"] for name in names}}
        for count in settings.counts
    ]
    return {"batch": settings.small_batch, "points": points}


def full_forward(bench: Bench) -> int:
    """Count one forward of the original model."""
    model = copy.deepcopy(bench.original).eval()
    with torch.no_grad():
        return flops(lambda: model(bench.batch[0]))


def ratio(point: dict[str, Any], name: str) -> Ratio:
    return Ratio.of(point["milliseconds"][name], point["milliseconds"][BY_HAND])


def flop_ratio(point: dict[str, Any], name: str) -> float:
    return float(point["flops"][name] / point["flops"][BY_HAND])


def break_even(result: dict[str, Any]) -> float:
    """Return how many such modules cost as much as one forward of the original model."""
    last = result["points"][-1]
    return float(last["flops"][FULL] / (last["flops"][TEACHERS] / last["count"]))


def section(result: dict[str, Any]) -> list[str]:
    """Write the table and where the two would cross."""
    points = result["points"]
    lines = [
        f"The first k of the model's attentions replaced, batch {result['batch']}, "
        f"{len(points[0]['milliseconds'][BY_HAND])} rounds; each ratio is to a hand-built student-only model with the same k.",
        "",
        "| k | blend, time | blend, FLOPs | KL distillation, time | KL distillation, FLOPs |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {p['count']} | {ratio(p, BLEND)} | {flop_ratio(p, BLEND):.3f} | {ratio(p, KL)} | {flop_ratio(p, KL):.3f} |"
        for p in points
    ]
    crossing, most = break_even(result), points[-1]["count"]
    where = f"more than the {most} there are" if crossing > most else f"reached within the {most} there are"
    more = [p["count"] for p in points if ratio(p, BLEND).low > ratio(p, KL).high]
    clock = (
        f"In time the blend is more expensive at k = {', '.join(map(str, more))}."
        if more
        else "In time the blend is clearly more expensive at no k."
    )
    lines += [
        "",
        "A blend pays for k teachers' forwards, a distillation for a forward of the original model. By operations they break "
        f"even at {crossing:.1f} replaced attentions, {where}. {clock}",
        "",
        "![Cost against the number of replaced modules](figures/performance-replaced.png)",
    ]
    return lines

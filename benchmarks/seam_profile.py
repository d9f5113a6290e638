"""Where the time of a blend goes: operators of a step, and what a seam costs in Python.

Command: python -m benchmarks.performance --only profile; about a minute on two cores.
Expected: what a blend adds are the teachers' own products; a seam costs some microseconds of Python.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import segue
from benchmarks.settings import Settings
from benchmarks.timing import Ratio, Step, percent, rounds
from benchmarks.trainees import BLEND, BY_HAND, TAKEOVER, TEACHERS, Bench, BlendByHand, warm_up
from segue.schedules import Constant

SHOWN = 8
PASSES = 3
WIDTH = 4  # of the tiny layers: small enough that only Python counts
CHAIN, CLOSED, CLOSED_FORWARD = "chain by hand", "closed seams", "closed seams, without handover.step()"
OPEN_BY_HAND, OPEN = "blends by hand", "open seams"
WITH_STEP = "closed seam, with `handover.step()`"
EXTRA = {  # what is compared with what, per seam
    "closed seam, forward and backward": (CLOSED_FORWARD, CHAIN),
    WITH_STEP: (CLOSED, CHAIN),
    "open seam beyond the shortest blend by hand, with `handover.step()`": (OPEN, OPEN_BY_HAND),
}


def measure(settings: Settings) -> dict[str, Any]:
    """Profile the operators of four steps, and time chains of seams around almost nothing."""
    bench = Bench(settings, settings.batch)
    trainees = {BY_HAND: bench.by_hand(), TAKEOVER: bench.takeover(), BLEND: bench.blend()}
    teachers, _ = bench.teachers_alone()
    warm_up(trainees.values())
    steps: dict[str, Step] = {name: trainee.step for name, trainee in trainees.items()} | {TEACHERS: teachers}
    chain = rounds(chains(settings.seams), settings.seconds("profile"), least=settings.least_rounds)
    return {
        "batch": settings.batch,
        "sites": len(bench.sites),
        "seams": settings.seams,
        "operators": operators(steps),
        "chain_milliseconds": chain,
    }


def operators(steps: dict[str, Step]) -> dict[str, dict[str, float]]:
    """Return the milliseconds that each operator spends in itself, by step."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints a line whenever it starts and stops
    spent: dict[str, Counter[str]] = {name: Counter() for name in steps}
    for turn in range(PASSES):
        for name in sorted(steps, reverse=bool(turn % 2)):
            with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
                steps[name]()
            for event in found.key_averages():
                spent[name][event.key] += event.self_cpu_time_total / 1000 / PASSES
    return {name: {key: round(value, 3) for key, value in counter.items()} for name, counter in spent.items()}


def chains(count: int) -> dict[str, Step]:
    """Build steps of a chain of tiny layers: by hand, behind closed seams and behind open ones."""
    x = torch.randn(1, WIDTH)

    def layers() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))

    def pass_through(model: nn.Module) -> None:
        model(x).sum().backward()

    def handover(alpha: float) -> segue.Handover:
        plan = segue.Plan(sites="*", schedule=Constant(alpha=alpha))
        started = segue.replace_(layers().train(), plan, total_steps=10**9)
        pass_through(started.model)
        started.step()
        return started

    def whole(running: segue.Handover) -> Step:
        def step() -> None:
            pass_through(running.model)
            running.step()

        return step

    plain, blends = (
        layers(),
        nn.Sequential(*(BlendByHand(t.requires_grad_(False), s) for t, s in zip(layers(), layers(), strict=True))),
    )
    closed, closed_too, opened = handover(0.0), handover(0.0), handover(0.5)
    return {
        CHAIN: lambda: pass_through(plain),
        CLOSED_FORWARD: lambda: pass_through(closed_too.model),
        CLOSED: whole(closed),
        OPEN_BY_HAND: lambda: pass_through(blends),
        OPEN: whole(opened),
    }


def microseconds(result: dict[str, Any]) -> dict[str, Ratio]:
    """Return what each kind of seam costs beyond the same without it."""
    times, seams = result["chain_milliseconds"], result["seams"]
    return {
        what: Ratio.of([1000 * (a - b) for a, b in zip(times[above], times[below], strict=True)], [seams] * len(times[above]))
        for what, (above, below) in EXTRA.items()
    }


def closed_share(result: dict[str, Any], steps: dict[str, Any]) -> float:
    """Return which part of a student-only step the Python of closed seams would be."""
    cost = microseconds(result)[WITH_STEP].median
    return float(result["sites"] * cost / 1000 / statistics.median(steps["milliseconds"][BY_HAND]))


def section(result: dict[str, Any], steps: dict[str, Any] | None) -> list[str]:
    """Write the operators that a blend adds, and the seams' own cost."""
    spent = result["operators"]
    hand, takeover, blend, teachers = (spent[name] for name in (BY_HAND, TAKEOVER, BLEND, TEACHERS))

    def added(key: str) -> float:
        return blend.get(key, 0.0) - hand.get(key, 0.0)

    keys = sorted({*hand, *blend}, key=lambda key: (-abs(added(key)), key))[:SHOWN]
    lines = [
        f"`torch.profiler` on one step at batch {result['batch']}, milliseconds that an operator spends in itself, mean "
        f"of {PASSES}: the {SHOWN} operators that differ most between a blend and student-only. What the blend adds should be "
        "what the teachers' forward takes alone.",
        "",
        f"| operator | built by hand | {TAKEOVER} | blend | blend - built by hand | {TEACHERS} |",
        "|---|---|---|---|---|---|",
    ]
    rows = {f"`{key}`": [d.get(key, 0.0) for d in (hand, takeover, blend, teachers)] for key in keys}
    rows["all operators"] = [sum(d.values()) for d in (hand, takeover, blend, teachers)]
    lines += [f"| {name} | {h:.1f} | {a:.1f} | {b:.1f} | {b - h:+.1f} | {t:.1f} |" for name, (h, a, b, t) in rows.items()]
    lines += ["", *seam_costs(result, steps)]
    return lines


def seam_costs(result: dict[str, Any], steps: dict[str, Any] | None) -> list[str]:
    """Write what a seam costs outside the operators that it calls."""
    cost = microseconds(result)
    lines = [
        f"A chain of {result['seams']} layers of width {WIDTH}, so small that only Python counts, "
        f"{len(result['chain_milliseconds'][CHAIN])} rounds:",
        "",
        "| per seam and step | microseconds (95 % interval) |",
        "|---|---|",
        *(f"| {what} | {c.median:.1f} ({c.low:.1f} to {c.high:.1f}) |" for what, c in cost.items()),
    ]
    if steps is not None:
        step, share = statistics.median(steps["milliseconds"][BY_HAND]), closed_share(result, steps)
        lines += [
            "",
            f"For {result['sites']} closed seams that is {percent(share, 2)} of a student-only step of {step:.0f} ms.",
        ]
    return lines

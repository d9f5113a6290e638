"""A complete run: what a short blend costs when students alone follow it.

Command: python -m benchmarks.performance --only run; about five minutes on two cores.
Expected: DCR with aggr20 at most 1.10 x student-only, and clearly below every distillation by a full teacher.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import segue
from benchmarks import peer, step_time
from benchmarks.bars import Bar
from benchmarks.settings import Settings
from benchmarks.timing import DECIMALS, Ratio, timed
from benchmarks.trainees import BLEND, BY_HAND, KL, TAKEOVER, TORCHDISTILL, Bench, Trainee
from segue.core.step_state import step_state

DCR = "DCR, aggr20"
DCR_DFG = "DCR + DFG, aggr20"
BOTH, ALONE = "both sides", "students alone"
BAR_RUN = 1.10


def measure(settings: Settings) -> dict[str, Any]:
    """Count the kinds of steps of a long run, and take real short runs, interleaved step by step."""
    bench = Bench(settings, settings.small_batch)
    sites = bench.sites
    builders: dict[str, Callable[[], Trainee]] = {
        BY_HAND: bench.by_hand,
        DCR: lambda: bench.running(segue.methods.dcr(sites=sites), total=settings.run_steps),
        DCR_DFG: lambda: bench.running(segue.methods.dcr_dfg(sites=sites), total=settings.run_steps),
        KL: bench.distillation,
    }
    if not peer.missing():
        builders[TORCHDISTILL] = lambda: peer.Boxed(bench, bench.by_hand())
    warm = bench.by_hand()
    warm.step()
    return {
        "batch": settings.small_batch,
        "steps": settings.run_steps,
        "planned_steps": settings.plan_steps,
        "planned_kinds": kinds(bench, settings.plan_steps),
        "kinds": kinds(bench, settings.run_steps),
        "missing": {TORCHDISTILL: why} if (why := peer.missing()) else {},
        "milliseconds": runs(builders, settings),
    }


def kinds(bench: Bench, total: int) -> dict[str, int]:
    """Count the steps of DCR with aggr20 in which a teacher still works, and those in which none does."""
    plan = segue.methods.dcr(sites=bench.sites)
    sites = segue.select(bench.original, bench.sites)
    moments = (step_state(plan, sites, step, total).sites.values() for step in range(total))
    counted = Counter(ALONE if all(site.closed for site in now) else BOTH for now in moments)
    return {kind: counted[kind] for kind in (BOTH, ALONE)}


def runs(builders: dict[str, Callable[[], Trainee]], settings: Settings) -> dict[str, list[float]]:
    """Take complete runs of all methods, their steps in turn, until the time is up; return the milliseconds of each."""
    totals: dict[str, list[float]] = {name: [] for name in builders}
    shuffle = random.Random(0)
    end = time.perf_counter() + settings.seconds("run")
    while time.perf_counter() < end or len(totals[BY_HAND]) < settings.least_rounds:
        trainees = {name: build() for name, build in builders.items()}
        spent = dict.fromkeys(trainees, 0.0)
        order = list(trainees)
        for _ in range(settings.run_steps):
            shuffle.shuffle(order)
            for name in order:
                spent[name] += timed(trainees[name].step)
        for name, total in spent.items():
            totals[name].append(round(total, DECIMALS))
    return totals


def ratios(result: dict[str, Any]) -> dict[str, Ratio]:
    times = result["milliseconds"]
    return {name: Ratio.of(values, times[BY_HAND]) for name, values in times.items()}


def from_phases(result: dict[str, Any], steps: dict[str, Any]) -> Ratio:
    """Put a long run together from the step times of its two phases, round by round."""
    counted, times = result["planned_kinds"], steps["milliseconds"]
    share = counted[BOTH] / (counted[BOTH] + counted[ALONE])
    mixed = [share * both + (1 - share) * alone for both, alone in zip(times[BLEND], times[TAKEOVER], strict=True)]
    return Ratio.of(mixed, times[BY_HAND])


def bars(result: dict[str, Any], steps: dict[str, Any] | None) -> list[Bar]:
    """Check the complete run, as measured and as the sum of its phases."""
    found = ratios(result)
    judged = [Bar.of_ratio(f"whole aggr20 run of {result['steps']} steps / student-only", found[DCR], BAR_RUN)]
    if steps is not None:
        planned = result["planned_steps"]
        judged.append(
            Bar.of_ratio(f"aggr20 run of {planned} steps from its phases / student-only", from_phases(result, steps), BAR_RUN)
        )
    for name in (KL, TORCHDISTILL):
        claim = f"whole aggr20 run clearly cheaper than {name}"
        if name in found:
            judged.append(Bar.apart(claim, found[DCR], found[name]))
        else:
            judged.append(Bar.not_measured(claim, result["missing"][name], "intervals apart"))
    return judged


def section(result: dict[str, Any], steps: dict[str, Any] | None) -> list[str]:
    """Write the totals and how they come about."""
    found, times, counted, planned = ratios(result), result["milliseconds"], result["kinds"], result["planned_kinds"]
    repeats = len(times[BY_HAND])
    lines = [
        f"Runs of {result['steps']} steps at batch {result['batch']}, all methods side by side, taken {repeats} times. "
        f"In {counted[BOTH]} of its steps DCR works with both sides, in {counted[ALONE]} with students alone.",
        "",
        "| run | total time / student-only (95 % interval) | median seconds |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {found[name].fine} | {statistics.median(times[name]) / 1000:.1f} |" for name in times]
    lines += [f"| {name} | not measured: {why} | |" for name, why in result["missing"].items()]
    if steps is not None:
        total = planned[BOTH] + planned[ALONE]
        lines += [
            "",
            f"A run of {total:,} steps has {planned[BOTH]:,} of the first kind and {planned[ALONE]:,} of the second. From the "
            f"[step times](#step-time) it costs {from_phases(result, steps).fine} x student-only; by operations alone "
            f"{1 + planned[BOTH] / total * (step_time.flop_bound(steps) - 1):.3f} x.",
        ]
    return lines

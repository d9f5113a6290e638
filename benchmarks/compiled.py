"""The time of one step of every method under torch.compile.

Command: python -m benchmarks.performance --only compiled; about ten minutes on two cores, a third of them spent compiling.
Expected: the ratios of eager code, or better ones, save for Theseus, of which compiled code computes both sides; one graph per
variant, two for our distillation.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import machine, peer
from benchmarks.bars import Bar
from benchmarks.settings import Settings
from benchmarks.step_time import BAR_ALONE
from benchmarks.timing import Ratio, Step, rounds, timed
from benchmarks.trainees import (
    AGAIN,
    BLEND,
    BY_HAND,
    FINALIZED,
    GUIDED,
    GUMBEL,
    KL,
    TAKEOVER,
    THESEUS,
    TORCHDISTILL,
    Bench,
    Trainee,
)

EAGER = "student-only, not compiled"
ALONE = (BY_HAND, AGAIN, TAKEOVER, FINALIZED)
ALONE_SHARE = 0.45  # of the time, once more, for the steps of students alone
COMPILING = 0.75  # of the time may go into compiling; what does not fit is left out, and said
WARM = 2  # steps after the first, in which late recompiles happen


def measure(settings: Settings) -> dict[str, Any]:
    """Compile as many variants as the time allows, the most telling first, and time their steps."""
    if settings.backend == "inductor" and machine.compiler() is None:
        return {"skipped": "torch.compile needs a C++ compiler on a CPU, and none was found (g++, clang++ or $CXX)"}
    begun, seconds = time.perf_counter(), settings.seconds("compiled")
    trainees: dict[str, Trainee] = {}
    result: dict[str, Any] = {"backend": settings.backend, "batch": settings.batch, "compile_seconds": {}, "missing": {}}
    torch._dynamo.reset()
    limits = {"recompile_limit": 64, "accumulated_recompile_limit": 256, "fail_on_recompile_limit_hit": True}
    with tempfile.TemporaryDirectory() as cache, torch._dynamo.config.patch(limits):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # a cache of an earlier run would hide what compiling costs
        for name, build in builders(settings, trainees).items():
            if trainees and seconds and time.perf_counter() - begun > COMPILING * seconds:
                result["missing"][name] = "the time for compiling was used up"
                continue
            try:
                trainee = build()
                trainee.compile(settings.backend)
                result["compile_seconds"][name] = round(timed(trainee.step) / 1000, 1)
                for _ in range(WARM):
                    trainee.step()
                trainees[name] = trainee
            except Exception as error:  # whatever a compiler raises, the others are still worth measuring
                result["missing"][name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        eager = Bench(settings, settings.batch).by_hand()
        steps: dict[str, Step] = {name: trainee.step for name, trainee in trainees.items()} | {EAGER: eager.step}
        rest = max(0.0, seconds - (time.perf_counter() - begun))
        result["milliseconds"] = rounds(steps, rest, least=settings.least_rounds)
        alone = {name: step for name, step in steps.items() if name in ALONE}  # again by themselves: their bar is narrow
        result["alone_milliseconds"] = rounds(alone, ALONE_SHARE * seconds, least=settings.least_rounds)
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
    torch._dynamo.reset()
    return result


def builders(settings: Settings, built: dict[str, Trainee]) -> dict[str, Callable[[], Trainee]]:
    """Return what makes each variant, in the order of the table."""
    bench = Bench(settings, settings.batch)

    def torchdistill() -> Trainee:
        if why := peer.missing():
            raise ModuleNotFoundError(why)
        return peer.Boxed(bench, bench.by_hand())

    return {
        BY_HAND: bench.by_hand,
        AGAIN: bench.by_hand,
        TAKEOVER: bench.takeover,
        BLEND: bench.blend,
        KL: bench.distillation,
        TORCHDISTILL: torchdistill,
        GUIDED: bench.guided,
        FINALIZED: bench.finalized,
        THESEUS: bench.theseus,
        GUMBEL: bench.gumbel,
    }


def bars(result: dict[str, Any]) -> list[Bar]:
    """Check the times of students alone."""
    times = result.get("alone_milliseconds", {})
    return [
        Bar.of_ratio(f"compiled step time, {name} / compiled by hand", Ratio.of(times[name], times[BY_HAND]), BAR_ALONE)
        for name in (TAKEOVER, FINALIZED)
        if name in times and BY_HAND in times
    ]


def noise(result: dict[str, Any]) -> str | None:
    """Say what the clock makes of models that run the same graph."""
    times, compiling = result.get("alone_milliseconds", {}), result.get("compile_seconds", {})
    if not all(name in times for name in ALONE):
        return None
    again = Ratio.of(times[AGAIN], times[BY_HAND]).fine
    text = f"Compiled: the same hand-built model, built twice, differs by {again}."
    if compiling[FINALIZED] > compiling[BY_HAND] / 5:
        return text
    return (
        f"{text} A finalized model is a plain one and ran the graph of the hand-built: its first step took "
        f"{compiling[FINALIZED]} s, the other's {compiling[BY_HAND]} s."
    )


def section(result: dict[str, Any]) -> list[str]:
    """Write the table, or why there is none."""
    if "skipped" in result:
        return [f"Not measured: {result['skipped']}."]
    times, compiling = result["milliseconds"], result["compile_seconds"]
    if BY_HAND not in times:
        return ["Not measured: " + "; ".join(f"{name}: {why}" for name, why in result["missing"].items()) + "."]
    all_ratios = {name: Ratio.of(values, times[BY_HAND]) for name, values in times.items()}
    lines = [
        f'The same at batch {result["batch"]} under `model.compile(backend="{result["backend"]}")`, '
        f"{len(times[BY_HAND])} rounds. The first step compiles; a graph that this process made before is cached.",
        "",
        "| step | time / compiled by hand (95 % interval) | median ms | first step, s |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {all_ratios[name].fine} | {statistics.median(times[name]):.0f} | {compiling.get(name, '')} |"
        for name in times
    ]
    lines += [f"| {name} | not measured: {why} | | |" for name, why in result["missing"].items()]
    eager = all_ratios[EAGER]
    gain = "saves time" if eager.low > 1 else "costs time" if eager.high < 1 else "changes nothing beyond the noise"
    lines += ["", f"On this machine compiling {gain}: an eager student-only step takes {eager.fine} of a compiled one."]
    if alone := {name: values for name, values in result.get("alone_milliseconds", {}).items() if name != BY_HAND}:
        by_hand = result["alone_milliseconds"][BY_HAND]
        text = ", ".join(f"{name} {Ratio.of(values, by_hand).fine}" for name, values in alone.items())
        lines.append(f"Students alone took turns once more, by themselves, {len(by_hand)} rounds: {text}.")
    return lines

"""The time of one step of every method, eager, in one interleaved run.

Command: python -m benchmarks.performance --only steps; about seven minutes on two cores.
Expected: students alone cost what a model built by hand costs; a blend costs one forward of each teacher more; distillation
costs a full forward of the original more, by whichever library; Theseus computes one
side per coin and costs no more than students alone.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import peer
from benchmarks.bars import Bar
from benchmarks.settings import Settings
from benchmarks.timing import Ratio, Step, percent, rounds
from benchmarks.trainees import (
    AGAIN,
    BLEND,
    BLEND_BY_HAND,
    BY_HAND,
    FINALIZED,
    GUIDED,
    KL,
    TAKEOVER,
    TEACHERS,
    THESEUS,
    TORCHDISTILL,
    VIEW,
    Bench,
    Trainee,
    warm_up,
)
from segue.diagnostics.counting import flops

BAR_ALONE = 1.02  # students alone, against the model built by hand
BAR_BLEND = 1.05  # blend, against its bound
COUNTED_COINS = 10  # steps over which the operations of Theseus are averaged


def measure(settings: Settings) -> dict[str, Any]:
    """Count and time one step of every method."""
    bench = Bench(settings, settings.batch)
    trainees = bench.all()
    difference = peer.add_to(trainees, bench)
    teachers, _ = bench.teachers_alone()
    warm_up(trainees.values())
    counted = {name: step_flops(name, trainee) for name, trainee in trainees.items()} | {TEACHERS: flops(teachers)}
    steps: dict[str, Step] = {name: trainee.step for name, trainee in trainees.items()}
    seconds, repeats = settings.seconds("steps"), {THESEUS: settings.coins}
    times = rounds(steps | {TEACHERS: teachers}, seconds, least=settings.least_rounds, repeats=repeats)
    return {
        "batch": settings.batch,
        "sites": len(bench.sites),
        "coins": settings.coins,
        "temperature": peer.temperature(),
        "loss_difference": difference,
        "missing": {TORCHDISTILL: why} if (why := peer.missing()) else {},
        "flops": counted,
        "milliseconds": times,
    }


def step_flops(name: str, trainee: Trainee) -> int:
    """Count the operations of a step; those of a coin are a mean."""
    if name != THESEUS:
        return trainee.flops()
    assert trainee.handover is not None
    counted = 0
    for _ in range(COUNTED_COINS):
        counted += trainee.flops()
        trainee.handover.step()  # tosses the next coins
    return counted // COUNTED_COINS


def ratios(result: dict[str, Any], reference: str = BY_HAND) -> dict[str, Ratio]:
    """Compare all steps with one, round by round."""
    times = result["milliseconds"]
    return {name: Ratio.of(values, times[reference]) for name, values in times.items()}


def to_bound(result: dict[str, Any]) -> dict[str, Ratio]:
    """Compare the blends with the hand-built step plus the teachers' forward of the same round."""
    times = result["milliseconds"]
    bound = [alone + teachers for alone, teachers in zip(times[BY_HAND], times[TEACHERS], strict=True)]
    return {name: Ratio.of(times[name], bound) for name in (BLEND_BY_HAND, BLEND, GUIDED)}


def flop_bound(result: dict[str, Any]) -> float:
    counted = result["flops"]
    return float(1 + counted[TEACHERS] / counted[BY_HAND])


def bars(result: dict[str, Any]) -> list[Bar]:
    """Check operations and times."""
    counted, times = result["flops"], ratios(result)
    alone = (VIEW, TAKEOVER, FINALIZED)
    extra = max(abs(counted[name] - counted[BY_HAND]) for name in alone)
    blend = counted[BLEND] - counted[BY_HAND] - counted[TEACHERS]
    bound = flop_bound(result)
    return [
        Bar.of_count("extra operations of students alone (view, after takeover, finalized)", extra, 0),
        Bar.of_count("operations of the blend beyond student-only plus teachers' forward", blend, 0),
        *(Bar.of_ratio(f"step time, {name} / built by hand", times[name], BAR_ALONE) for name in (TAKEOVER, FINALIZED)),
        Bar.of_ratio(f"step time, blend / FLOP bound ({bound:.3f} x built by hand)", times[BLEND].over(bound), BAR_BLEND),
        Bar.of_ratio("step time, blend / (built by hand + teachers' forward, both timed)", to_bound(result)[BLEND], BAR_BLEND),
    ]


def section(result: dict[str, Any]) -> list[str]:
    """Write the table and how to read it."""
    counted, times, all_ratios = result["flops"], result["milliseconds"], ratios(result)
    lines = [
        f"One step (forward, loss, backward, AdamW) of every method at batch {result['batch']}, {result['sites']} modules "
        f"replaced, {len(times[BY_HAND])} rounds.",
        "",
        "| step | time / built by hand (95 % interval) | FLOPs / built by hand | median ms |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {all_ratios[name].fine} | {counted[name] / counted[BY_HAND]:.3f} | {statistics.median(times[name]):.0f} |"
        for name in times
    ]
    lines += [f"| {name} | not measured: {why} | | |" for name, why in result["missing"].items()]
    lines += ["", reading(result), "", how_it_ran(result), "", "![Step times](figures/performance-steps.png)"]
    return lines


def reading(result: dict[str, Any]) -> str:
    """Say what the ratios mean, whichever way they fell."""
    times = ratios(result)
    noise = times[AGAIN]
    spread = max(abs(noise.low - 1), abs(noise.high - 1))
    able = "is finer than" if spread <= BAR_ALONE - 1 else "is coarser than"
    against = Ratio.of(result["milliseconds"][BLEND], result["milliseconds"][KL])
    cheaper = "costs less than" if against.high < 1 else "costs more than" if against.low > 1 else "is not distinguishable from"
    return (
        f"The same model built twice differs by {noise.fine}: that is the noise, and it {able} the bar of "
        f"{percent(BAR_ALONE - 1)} for students alone. A blend step {cheaper} one of our KL distillation: {against.fine} of it."
    )


def how_it_ran(result: dict[str, Any]) -> str:
    """Describe the settings of Theseus and torchdistill."""
    coin = (
        f"Theseus and Theseus-Gumbel ran at a constant alpha of 0.5; Theseus computes one side per coin, and each of its "
        f"rounds is the mean of {result['coins']} steps. "
    )
    if result["missing"]:
        return coin + "; ".join(f"{name}: {why}" for name, why in result["missing"].items()) + "."
    said = peer.WHAT.format(temperature=result["temperature"])
    same = f"On the same weights its loss and ours differ by {result['loss_difference']:.1e}, relatively."
    return f"{coin}torchdistill ran as {said}. {same}"

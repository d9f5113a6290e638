"""What a pass of the local fit over a batch costs: all students learn from recorded features, without the model.

Command: python -m benchmarks.performance --only local; about three minutes on two cores.
Expected: by operations a pass is 0.44 of a student-only step on ViT-tiny; smaller sub-batches take more time for the same.
"""

from __future__ import annotations

import statistics
from typing import Any

import segue
from benchmarks.settings import Settings
from benchmarks.timing import Ratio, Step, rounds
from benchmarks.trainees import BY_HAND, Bench, Trainee
from segue.core.local_fit import Features
from segue.phases import Phase

FORWARD = "forward of the original, recorded"
SPLITS = (1, 4)  # sub-batches of a pass


def measure(settings: Settings) -> dict[str, Any]:
    """Time a student-only step, the recorded forward, and passes over the batch, in turn; and count the first and the last."""
    bench = Bench(settings, settings.batch)
    alone = bench.by_hand()
    phases = (Phase(name="local fit", length=0.5, local=True, reuse=2), Phase(name="students alone"))
    plan = segue.Plan(sites=bench.sites, guidance=segue.losses.FeatureGuidance(), phases=phases)
    local = bench.running(plan)
    features = _record(local)
    splits = [split for split in SPLITS if split <= settings.batch]
    steps: dict[str, Step] = {BY_HAND: alone.step, FORWARD: lambda: _record(local)}
    steps |= {_name(split): _pass(local, features, split) for split in splits}
    cost = segue.cost(bench.original, plan, bench.batch[0], total_steps=2)
    share = (cost.per_step[0] - cost.teacher_pass) / 2 / cost.student_only.flops
    times = rounds(steps, 0.0, least=max(settings.least_rounds, settings.pairs // 4))
    return {"batch": settings.batch, "operations": share, "milliseconds": times}


def _name(split: int) -> str:
    return f"a pass in {split} update{'s' * (split > 1)}"


def _record(local: Trainee) -> Features:
    assert local.handover is not None
    with local.handover.features() as features:
        local.model(local.batch[0])
    return features


def _pass(local: Trainee, features: Features, split: int) -> Step:
    def run() -> None:
        for loss in features.losses(split=split, reuse=1):
            loss.backward()  # type: ignore[no-untyped-call]
            local.optimizer.step()
            local.optimizer.zero_grad()

    return run


def section(result: dict[str, Any]) -> list[str]:
    """Write the table: medians, and ratios to a student-only step."""
    times = result["milliseconds"]
    lines = [
        f"The [local fit](training.md#local-fit) at batch {result['batch']}: one recorded forward per batch, then as many "
        f"passes over it as a phase says. By operations a pass is {result['operations']:.3f} of a student-only step.",
        "",
        "| step | median | / student-only |",
        "|---|---|---|",
    ]
    for name, found in times.items():
        lines.append(f"| {name} | {statistics.median(found):.1f} ms | {Ratio.of(found, times[BY_HAND])} |")
    return lines

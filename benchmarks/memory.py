"""What a step holds in memory: parameters, activations saved for backward, and the peak of live tensors.

Command: python -m benchmarks.performance --only memory; half a minute. Counted, not sampled: the same on every machine.
Expected: a blend needs the teachers' parameters and at most one tensor per site more than student-only.
"""

from __future__ import annotations

from typing import Any

from benchmarks import peer
from benchmarks.bars import Bar
from benchmarks.settings import Settings
from benchmarks.trainees import BLEND, BY_HAND, TORCHDISTILL, Bench, Trainee, warm_up
from segue.diagnostics.counting import PeakBytes, saved_bytes

MB = 2**20


def measure(settings: Settings) -> dict[str, Any]:
    """Count the bytes of one step of every method."""
    bench = Bench(settings, settings.batch)
    trainees = bench.all()
    peer.add_to(trainees, bench)
    warm_up(trainees.values())
    return {
        "batch": settings.batch,
        "sites": len(bench.sites),
        "teacher_bytes": bench.teacher_bytes(),
        "output_bytes": bench.teachers_alone()[1],
        "missing": {TORCHDISTILL: why} if (why := peer.missing()) else {},
        "held": {name: held_bytes(trainee) for name, trainee in trainees.items()},
        "saved": {name: saved_bytes(trainee.loss, trainee.held()) for name, trainee in trainees.items()},
        "peak": {name: peak_bytes(trainee) for name, trainee in trainees.items()},
    }


def held_bytes(trainee: Trainee) -> int:
    """Return the bytes of parameters and buffers, each storage once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in trainee.held()}
    return sum(storages.values())


def peak_bytes(trainee: Trainee) -> int:
    """Return the peak of live bytes during a step, without parameters and buffers."""
    with PeakBytes([*trainee.held(), *trainee.batch]) as memory:
        trainee.step()
    return memory.peak


def total(result: dict[str, Any], name: str) -> int:
    return int(result["held"][name] + result["peak"][name])


def allowed(result: dict[str, Any]) -> int:
    """Return student-only, the teachers' parameters and one output per site."""
    return int(total(result, BY_HAND) + result["teacher_bytes"] + result["output_bytes"])


def bars(result: dict[str, Any]) -> list[Bar]:
    claim = "peak bytes of a blend step (student-only + teachers' parameters + one tensor per site)"
    return [Bar.of_count(claim, total(result, BLEND), allowed(result))]


def section(result: dict[str, Any]) -> list[str]:
    """Write the table and the budget of the blend."""
    lines = [
        f"Bytes of tensors during one step at batch {result['batch']}, counted by "
        "[`segue.diagnostics.counting`](../src/segue/diagnostics/counting.py); what one operator uses inside is not seen, and "
        "the optimizer's state, the same for all, is not counted.",
        "",
        "| step | parameters and buffers, MB | saved for backward, MB | peak of live tensors, MB | together, MB |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {held / MB:.1f} | {result['saved'][name] / MB:.1f} | {result['peak'][name] / MB:.1f} | "
        f"{total(result, name) / MB:.1f} |"
        for name, held in result["held"].items()
    ]
    lines += [f"| {name} | not measured: {why} | | | |" for name, why in result["missing"].items()]
    used, budget = total(result, BLEND) - total(result, BY_HAND), allowed(result) - total(result, BY_HAND)
    verdict = "stays within" if used <= budget else "exceeds"
    lines += [
        "",
        f"A blend needs {used / MB:.1f} MB more than student-only and {verdict} its allowance of {budget / MB:.1f} MB: "
        f"the teachers' parameters ({result['teacher_bytes'] / MB:.1f} MB) and one output at each of {result['sites']} sites "
        f"({result['output_bytes'] / MB:.1f} MB).",
    ]
    return lines

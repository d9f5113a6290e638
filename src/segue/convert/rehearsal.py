"""A rehearsal: a few steps of a conversion, timed on the model itself, which is then as it was before."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from segue.convert.data import Data
from segue.diagnostics.costs import cost
from segue.phases import ends
from segue.plan import Plan
from segue.reporting.formatting import duration, flops, memory
from segue.training.batches import mapped, size
from segue.training.fit import fit
from segue.training.recipe import Recipe

SHARE = 0.1  # of a run: its evaluations cost at most this
MOST, FEWEST = 10, 4  # evaluations, before the number of their batches is reduced
PASSES = 4  # over the held-out data in an evaluation: of the blend and of the students, and each time of the original
FURTHER = 2  # passes over a further file: of the students and of the original
KEPT = 2  # checkpoints


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What the steps of a conversion take."""

    seconds: dict[str, tuple[int, float]]  # by phase: its steps, and the seconds of one
    checkpoint: int | None  # bytes

    @property
    def total(self) -> float:
        """Seconds of all steps."""
        return sum(steps * seconds for steps, seconds in self.seconds.values())

    @property
    def steps(self) -> list[float]:
        """Seconds of every step."""
        return [seconds for steps, seconds in self.seconds.values() for _ in range(steps)]

    def __str__(self) -> str:
        parts = [f"{steps:,} {name} at {duration(seconds)}" for name, (steps, seconds) in self.seconds.items()]
        return f"about {duration(self.total)}" + (f" ({', '.join(parts)})" if len(parts) > 1 else "")


def rehearse(model: nn.Module, plan: Plan, data: Data, recipe: Recipe, *, saves: bool = False) -> Rehearsal:
    """Time two steps of every phase, or five over the course of a plan without phases; `saves` also measures a checkpoint."""
    assert recipe.steps is not None
    names = [phase.name for phase in plan.phases]
    steps = 2 * len(names) or 5
    short = tuple(dataclasses.replace(phase, length=1 / len(names)) for phase in plan.phases)
    plain = dataclasses.replace(recipe, steps=steps, compile=False, guard=None, ema=None, early_stopping=None)
    with tempfile.TemporaryDirectory() as place:
        trained = fit(
            model,
            dataclasses.replace(plan, phases=short, release=False),
            data.train,
            data.task,
            recipe=plain,
            folder=place if saves else None,
            checkpoint_every=steps,
            evaluations=range(steps + 1),  # which evaluate nothing, and note the time
            progress=None,
        )
        written = sum(path.stat().st_size for path in Path(place, "checkpoints").rglob("*") if path.is_file())
    assert trained.handover is not None
    trained.handover.cancel_()
    model.eval()
    times = [after["seconds"] - before["seconds"] for before, after in pairwise(trained.history)]
    if not names:
        return Rehearsal(seconds={"steps": (recipe.steps, sum(times) / steps)}, checkpoint=written or None)
    limits = [0, *(round(end * recipe.steps) for end in ends(plan.phases))]
    counts = [end - begin for begin, end in pairwise(limits)]
    timed = {name: (count, seconds) for name, count, seconds in zip(names, counts, times[1::2], strict=True)}
    return Rehearsal(seconds=timed, checkpoint=written or None)


def passes(used: int, batches: int, further: Sequence[int] = ()) -> int:
    """Count the batches that an evaluation reads, once for each pass of a model: at most `used` of each file.

    `batches` and `further` are how many the held-out data and each of the further files have.
    """
    return PASSES * min(used, batches) + FURTHER * sum(min(used, each) for each in further)


def affordable(run: float, batch: float, batches: int, further: Sequence[int] = ()) -> tuple[int, int]:
    """Return how many evaluations of how many batches cost at most a tenth of a run; the first and the last are always there.

    `run` and `batch` are the seconds of all steps, and of one batch in one pass.

    >>> affordable(run=18000.0, batch=1.0, batches=32)
    (10, 32)
    >>> affordable(run=900.0, batch=1.0, batches=32)
    (4, 5)
    >>> affordable(run=900.0, batch=1.0, batches=32, further=[32, 32])
    (4, 2)
    """
    most = run * SHARE / (1 - SHARE) / max(batch, 1e-9)  # passes over a batch in all
    longest = max(batches, *further, 1)
    number = next((n for n in range(MOST, FEWEST, -1) if (n + 1) * passes(longest, batches, further) <= most), FEWEST)
    while number > 1 and (number + 1) * passes(1, batches, further) > most:
        number -= 1
    fitting = (used for used in range(longest, 1, -1) if (number + 1) * passes(used, batches, further) <= most)
    return number, next(fitting, 1)


def first(batches: Iterable[Any], number: int | None) -> Iterable[Any]:
    """Return the first few batches, or all of them as they are."""
    return batches if number is None else list(islice(batches, number))


def estimate(model: nn.Module, plan: Plan, data: Data, recipe: Recipe, found: Rehearsal, dtype: torch.dtype) -> dict[str, Any]:
    """Return what a complete run takes besides time: operations, memory and disk."""
    assert recipe.steps is not None
    batch = next(iter(data.train))
    one = mapped(lambda x: x[:1], batch)
    counted = cost(model, plan, one, total_steps=recipe.steps, loss_fn=data.task)
    weights = sum(p.numel() for p in model.parameters()) * torch.empty((), dtype=dtype).element_size()
    return {
        "flops": counted.flops * size(batch) * recipe.accumulate,
        "memory": _peak(),
        "checkpoints": KEPT * (found.checkpoint or 0),
        "weights": weights,
    }


def _peak() -> int | None:
    """Return the most memory that this process has had so far: on its accelerator, or altogether."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def lines(taken: dict[str, Any]) -> list[str]:
    """Say what a complete run takes besides time."""
    peak = "unknown" if taken["memory"] is None else f"{memory(taken['memory'])}, the most of this process so far"
    return [
        f"operations: {flops(taken['flops'])}",
        f"memory: {peak}",
        f"disk: {memory(taken['checkpoints'])} of checkpoints while it runs, {memory(taken['weights'])} of weights in the end",
    ]

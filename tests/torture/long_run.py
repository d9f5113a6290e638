"""A long run: thousands of steps, nothing that grows, and the same end after an interruption in the middle."""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.optim import optimizer as torch_optimizer

import segue
from segue.training.tasks import Classification
from tests.helpers.processes import FreshProcess
from tests.helpers.tiny import SITES, Net, batch, optimizer_for, start, train
from tests.torture import traps
from tests.torture.campaign import HUNG, LOST, SILENT, Attempt, Bench, Outcome
from tests.torture.checkpoint_files import digest
from tests.torture.kills import last_line

STEPS = 10_000
FEWEST = 100
PER_SECOND = 30  # a run is measured, repeated with an interruption, and the machine may be slow
LIMIT = 3600.0
GROWTH = 24 << 20  # bytes
SLOWER = 2.0  # times
SCHEDULE = segue.schedules.Linear(start=0.9, until=0.95)  # teachers and students share the work nearly to the end


def plan() -> segue.Plan:
    return segue.methods.gumbel_dfg(sites=SITES, schedule=SCHEDULE)


class Batches:
    """Many batches that depend on their place alone."""

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[Any]:
        return (batch(index, size=4) for index in range(50))


class Timed(Classification):
    """A loss that notes when it was called, and what grows."""

    def __init__(self, steps: int, model: torch.nn.Module) -> None:
        super().__init__()
        self.times: list[float] = []
        self.sizes: list[dict[str, int]] = []
        self.every, self.model = steps // 10, model

    def __call__(self, model: torch.nn.Module, examples: Any) -> torch.Tensor:
        if len(self.times) % self.every == 0:
            self.sizes.append(sizes(self.model))
        self.times.append(time.perf_counter())
        return super().__call__(model, examples)


def sizes(model: torch.nn.Module) -> dict[str, int]:
    """Count what must not grow."""
    gc.collect()
    process = psutil.Process()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())
    hooks += len(torch_optimizer._global_optimizer_pre_hooks) + len(torch_optimizer._global_optimizer_post_hooks)
    return {
        "bytes": process.memory_info().rss,
        "open files": process.num_fds(),
        "threads": threading.active_count() + process.num_threads(),
        "hooks": hooks,
        "objects": len(gc.get_objects()),
    }


def by_fit(folder: Path, steps: int, stop: int | None) -> tuple[str, Timed]:
    """Train by fit(); to stop, it is told by a signal to itself after so many steps."""
    model = Net(depth=2)
    loss = Timed(steps, model)
    settings = {"recipe": segue.Recipe(steps=steps, lr=1e-3), "validation": [batch(99)], "evaluations": 5, "progress": None}

    def watch(metrics: dict[str, Any]) -> None:
        if stop is not None and metrics["step"] >= stop:
            os.kill(os.getpid(), 15)

    try:
        fitted = segue.fit(model, plan(), Batches(), loss, folder=folder, resume=True, on_eval=watch, **settings)
    except SystemExit:
        return "", loss
    history = [{name: value for name, value in point.items() if name != "seconds"} for point in fitted.history]
    return digest(dict(fitted.model.state_dict()), history), loss


def by_hand(folder: Path, steps: int, stop: int | None) -> tuple[str, Timed]:
    """Train by the loop that users write; to stop, it saves and ends."""
    handover = start(plan(), total_steps=steps, depth=2)
    optimizer = optimizer_for(handover)
    loss = Timed(steps, handover.model)
    if folder.exists():
        segue.load_(handover, folder, optimizer=optimizer)
    while handover.steps_done < steps:
        if stop == handover.steps_done:
            segue.save(handover, folder, optimizer=optimizer)
            return "", loss
        loss(handover.model, batch(0, size=1)) if handover.steps_done % loss.every == 0 else loss.times.append(
            time.perf_counter()
        )
        train(handover, optimizer, 1)
    return digest(dict(handover.model.state_dict()), optimizer.state_dict()), loss


WAYS = {"fit": by_fit, "a loop": by_hand}


def work(way: str, folder: Path, steps: int, stop: int | None, report: Path) -> None:
    """Train in a process of its own, to the end or to a stop, and report."""
    end, loss = WAYS[way](folder, steps, stop)
    took = [later - earlier for earlier, later in zip(loss.times, loss.times[1:], strict=False)]
    tenth = max(1, len(took) // 10)
    first, last = (statistics.median(part) for part in (took[tenth : 2 * tenth] or [1.0], took[-2 * tenth : -tenth] or [1.0]))
    report.write_text(json.dumps({"end": end, "slower": last / first, "sizes": loss.sizes}))


def grown(found: dict[str, Any]) -> str:
    """Say what has grown from the second tenth of a run to the last."""
    early, *_, late = found["sizes"][1:]
    more = {name: late[name] - early[name] for name in late}
    allowed = {"bytes": GROWTH, "objects": 5000}  # caches hold 4,096
    wrong = [f"{name} by {value:,}" for name, value in more.items() if value > allowed.get(name, 0)]
    if found["slower"] > SLOWER:
        wrong.append(f"time per step by {found['slower']:.1f} times")
    return ", ".join(wrong)


def attempt(way: str, steps: int, place: Path, chance: random.Random) -> Outcome:
    """Train without a stop, then with one, and compare."""
    stop = chance.randrange(1, steps)
    case = f"{steps:,} steps by {way}, stopped at {stop:,}"
    found = []
    for name, at in (("whole", None), ("parted", stop), ("parted", None)):
        report = place / "report"
        report.unlink(missing_ok=True)
        process = FreshProcess(work, way, place / name, steps, at, report, log=place / "log")
        code = traps.finish(process, None, LIMIT)
        if code is None:
            return Outcome(case, HUNG, "the process does not end")
        if not report.exists():
            return Outcome(case, SILENT, f"it ended with {code}: {last_line(process.error)}")
        found.append(json.loads(report.read_text()))
    if growth := grown(found[0]):
        return Outcome(case, LOST, f"it grows: {growth}")
    if found[0]["end"] != found[2]["end"]:
        return Outcome(case, LOST, "it ends otherwise than without the stop")
    return Outcome(case)


def attempts(bench: Bench) -> Iterator[Attempt]:
    steps = max(FEWEST, min(STEPS, int(bench.seconds * PER_SECOND / 100) * 100))
    for index, chance in enumerate(bench.chances(), bench.begin):
        way = list(WAYS)[index % 2]
        yield Attempt(f"{steps:,} steps by {way}", lambda place, w=way, c=chance: attempt(w, steps, place, c))

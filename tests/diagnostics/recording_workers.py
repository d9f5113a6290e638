"""What two gloo processes record under DDP and FSDP2; without a rank, what one process records."""

from __future__ import annotations

import datetime
import os
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import segue
from segue.diagnostics import Recorder
from segue.training.evaluation import Classification
from tests.helpers.tiny import SITES, Net, batch
from tests.training.fit_cases import CountedBatches, Fresh

WORLD = 2
ENGINES = ("ddp", "fsdp2")
BATCHES = [batch(50, size=4), batch(51, size=4)]


def record(engine: str) -> list[dict[str, Any]]:
    """Train two steps with coins and return what was recorded at two looks."""
    fitted = segue.fit(
        Net(depth=2),
        segue.methods.theseus(sites=SITES, schedule=segue.schedules.Linear(start=0.8)),
        CountedBatches(count=4, size=4),
        Classification(),
        recipe=segue.Recipe(steps=2, lr=1e-2, eps=1e-3, shard=engine == "fsdp2"),
        measure=Recorder(BATCHES, Classification(), ("variance", "curvature", "path"), draws=4, points=2, iterations=3),
        looks=(1,),
        progress=None,
    )
    return [{name: value for name, value in point.items() if name != "seconds"} for point in fitted.points]


def spawn(folder: Path) -> list[dict[str, Any]]:
    """Record under each engine in a pair of processes; return what each found, or how it failed."""
    pair = [Fresh(_enter, rank, str(folder), words=folder / f"words{rank}") for rank in range(WORLD)]
    for process in pair:
        process.succeed()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]


def _enter(rank: int, folder: str) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ |= dict(zip(names, map(str, (rank, rank, WORLD, WORLD)), strict=True)) | {"OMP_NUM_THREADS": "1"}
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timeout)
    results: dict[str, Any] = {}
    for engine in ENGINES:
        try:
            results[engine] = record(engine)
        except Exception:
            results[engine] = traceback.format_exc()
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()

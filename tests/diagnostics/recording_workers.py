"""What two gloo processes record under DDP and FSDP2; without a rank, what one process records."""

from __future__ import annotations

from typing import Any

import segue
from segue.diagnostics import Recorder
from segue.training.tasks import Classification
from tests.helpers.tiny import SITES, Net, batch
from tests.training.fit_cases import CountedBatches

ENGINES = ("ddp", "fsdp2")
BATCHES = [batch(50, size=4), batch(51, size=4)]


def record(engine: str) -> list[dict[str, Any]]:
    """Train two steps with coins and return what was recorded at two evaluations."""
    fitted = segue.fit(
        Net(depth=2),
        segue.methods.theseus(sites=SITES, schedule=segue.schedules.Linear(start=0.8)),
        CountedBatches(count=4, size=4),
        Classification(),
        recipe=segue.Recipe(steps=2, lr=1e-2, eps=1e-3, shard=engine == "fsdp2"),
        measure=Recorder(BATCHES, Classification(), ("variance", "curvature", "path"), draws=4, points=2, iterations=3),
        evaluations=(1,),
        progress=None,
    )
    return [{name: value for name, value in metrics.items() if name != "seconds"} for metrics in fitted.history]

"""What earlier versions wrote still loads: plans, run configurations, checkpoints, converted folders, results.

A refactoring adapts this file alone: the imports of names that are not public, and what was renamed on purpose.
"""

from __future__ import annotations

from pathlib import Path

from segue.lab.config import config_hash, from_dict, to_dict
from segue.reporting import records as results
from segue.settings import unsaved

__all__ = ["RENAMED", "V0_1_0", "config_hash", "from_dict", "results", "to_dict", "unsaved"]

V0_1_0 = Path(__file__).parent / "v0_1_0"

# Old name -> new name, or None for what is gone on purpose. Kinds as files name them ("losses.FeatureGuidance", "Run"), fields
# by their kind ("Run.looks"; of results "Point.looks"), public names by their module ("diagnostics.Law").
RENAMED: dict[str, str | None] = {
    "schedules.share": "alpha_at",
    "losses.strength": "weight_at",
    "diagnostics.Law": "GateDistribution",
    "diagnostics.law_of": "distribution_of",
    "TrainInfo.teacher_look": "teacher_eval",
}

"""What earlier versions wrote still loads: plans, run configurations, checkpoints, converted folders, results.

A refactoring adapts this file alone: the imports of names that are not public, and what was renamed on purpose.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from segue.lab.config import SERIALIZER, config_hash, from_dict, to_dict
from segue.plan import SERIALIZER as OF_PLANS
from segue.reporting import records as results
from segue.settings import RENAMED_FIELDS, unsaved

__all__ = ["RENAMED", "V0_1_0", "config_hash", "from_dict", "results", "to_dict", "unsaved"]

V0_1_0 = Path(__file__).parent / "v0_1_0"

# Old name -> new name, or None for what is gone on purpose. Kinds as files name them ("losses.FeatureGuidance", "Run"), fields
# by their kind ("Run.looks"; of results "Point.looks"), public names by their module ("diagnostics.Law").
RENAMED: dict[str, str | None] = {
    **{
        f"{kind}.{old}": new
        for kind, fields in RENAMED_FIELDS.items()
        for old, new in fields.items()
        if new in {f.name for f in dataclasses.fields({**OF_PLANS.kinds, **SERIALIZER.kinds}[kind])}
    },
    "Cifar10Png": None,
    "Npz": None,
    "TrainInfo.teacher_look": "teacher_eval",
    "schedules.share": "alpha_at",
    "losses.strength": "weight_at",
    "students.Call": "AttentionCall",
    "students.Geometry": "AttentionSpec",
    "students.Interface": "AttentionInterface",
    "students.Library": "FlaLayer",
    "students.teach": "register_attention",
    "students.thirds": "split_qkv",
    "diagnostics.Law": "GateDistribution",
    "diagnostics.law_of": "distribution_of",
}

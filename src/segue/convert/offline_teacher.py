"""The offline teacher of a conversion: the original is run once over the data, for distillation without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from segue.convert.data import Data
from segue.convert.options import Conversion
from segue.convert.pretrained import Base
from segue.errors import ConfigError
from segue.plan import Plan
from segue.reporting.formatting import memory
from segue.training.teacher_cache import TeacherCache, cache_teacher, distillation_of


def require_cacheable(settings: Conversion, base: Base, plan: Plan) -> None:
    """Refuse a teacher cache that cannot be used, before anything is computed."""
    if settings.teacher_cache is None:
        return
    fault = "--teacher-cache cannot be used."
    distillation_of(plan, fault)
    if base.kind == "masked":
        raise ConfigError(fault, "Other tokens are hidden in every epoch, so that no text comes twice.", "leave it out.")


def cached(
    settings: Conversion, base: Base, plan: Plan, data: Data, work: Path, say: Callable[[str], None]
) -> TeacherCache | None:
    """Run the original over all that it is trained on, or find what was computed, if the settings say so."""
    if (k := settings.teacher_cache) is None:
        return None
    distill = distillation_of(plan, "--teacher-cache cannot be used.")
    found = cache_teacher(base.model, data.train.in_order(), data.task, folder=work / "teacher", k=k, distill=distill)
    each = found.bytes / found.tokens
    say(f"teacher cache: {found.tokens:,} tokens, {memory(found.bytes)}, {each:.0f} bytes for a token")
    return found

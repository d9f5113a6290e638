"""What a measurement looks at: some sites, their shares, and a fixed set of minibatches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from segue.core.handover import Handover
from segue.errors import DataError, SiteError, nearest
from segue.sites import name_matches
from segue.training.batches import mapped


def chosen_sites(handover: Handover, patterns: str | Sequence[str] | None) -> list[str]:
    """Return the names of a handover's sites that match a pattern, or one of several; all of them without a pattern."""
    if patterns is None:
        return list(handover.seams)
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in wanted:
        if not any(name_matches(pattern, name) for name in handover.seams):
            raise SiteError(
                f"{pattern!r} matched none of the {len(handover.seams)} sites of the handover.",
                nearest(pattern, list(handover.seams)),
                "only sites of the running handover can be measured.",
            )
    return [name for name in handover.seams if any(name_matches(pattern, name) for pattern in wanted)]


def fixed_batches(batches: Iterable[Any], handover: Handover) -> list[Any]:
    """Read the minibatches once, onto the model's device."""
    device = next(iter(handover.seams.values())).student_weight.device
    found = [mapped(lambda tensor: tensor.to(device), batch) for batch in batches]
    if not found:
        raise DataError(
            "a measurement over minibatches was asked for.", "No minibatch was given.", "give a list of a few, two at least."
        )
    return found


def shares(handover: Handover, alpha: float | None) -> dict[str, float]:
    """Return the teacher's share at every site: the one given, or as they are now."""
    return handover.alphas if alpha is None else dict.fromkeys(handover.seams, float(alpha))

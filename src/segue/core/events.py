"""What a handover says while it runs: the log of the logger "segue", and the warning behind its last step."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

from segue.core.step_state import StepState
from segue.errors import SegueWarning
from segue.phases import Phase

if TYPE_CHECKING:
    from segue.core.handover import Handover

LOGGER = logging.getLogger(__name__)
SHOWN = 4  # sites that a line names


def begun(handover: Handover) -> None:
    """Log where a handover begins."""
    LOGGER.info("%s: the handover begins at %s", type(handover.model).__name__, named([site.name for site in handover.sites]))


def arrived(handover: Handover, before: StepState, state: StepState, earlier: Phase | None) -> None:
    """Log the sites that students took over, or gave back, in the last step, and the phase that begins."""
    if not LOGGER.isEnabledFor(logging.INFO):
        return
    was, now = ({name for name, site in state.sites.items() if site.closed} for state in (before, state))
    at = f"step {handover.steps_done} of {handover.total_steps}"
    for text, names in (("students take over at", now - was), ("teachers are back at", was - now)):
        if names:
            LOGGER.info("%s: %s %s", at, text, named([name for name in handover.seams if name in names]))
    if handover.phase is not earlier and handover.phase is not None:
        LOGGER.info("%s: the phase %r begins", at, handover.phase.name)


def ended(handover: Handover, how: str) -> None:
    """Log the end of a handover."""
    LOGGER.info("%s: the handover is %s at step %d", type(handover.model).__name__, how, handover.steps_done)


def warn_past_the_end(handover: Handover) -> None:
    """Warn once when the steps go past the length that was given."""
    if handover.steps_done == handover.total_steps:
        warnings.warn(
            f"step() is called after the last of total_steps={handover.total_steps} steps: schedules and phases stay at their "
            "end. Count optimizer steps, not batches, or set handover.total_steps = n.",
            SegueWarning,
            stacklevel=3,
        )


def named(names: list[str]) -> str:
    """Name a few sites.

    >>> named(["a", "b"]), named(list("abcdef"))
    ('2 sites (a, b)', '6 sites (a, b, c, d, ...)')
    """
    shown = ", ".join(names[:SHOWN]) + ", ..." * (len(names) > SHOWN)
    return f"{len(names)} site{'s' * (len(names) != 1)} ({shown})"

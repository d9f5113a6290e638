"""Steps taken: what every site computed in the steps of a run whose plan alone cannot tell.

An adaptive schedule closes sites when the students are ready, a guard gives teachers their share back, students that are close
enough rest in a local fit. Noted are plain numbers that the host knows anyway, so a step waits for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from segue.core.step_state import SiteState

if TYPE_CHECKING:
    from segue.core.handover import Handover

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"  # one for each set of six flags
RESTS = 32  # beyond the five of work_of


def work_of(site: SiteState) -> tuple[bool, ...]:
    """Return what decides the operations of a site in a step: two states with the same flags cost the same."""
    return site.closed, site.hold, 0.0 < site.weight < 1.0, site.weight == 1.0, site.guidance > 0


class StepsTaken:
    """Consecutive steps of one kind as [first, the one after the last, a letter for each site]; others are as planned.

    >>> taken = StepsTaken(sites=2, total=9)
    >>> taken.load_state_dict([[3, 5, "QU"]])
    >>> taken.by_step()
    {3: 'QU', 4: 'QU'}
    """

    def __init__(self, sites: int, total: int) -> None:
        self.sites, self.total = sites, total
        self.spans: list[list[Any]] = []

    def note(self, handover: Handover, planned: object) -> None:
        """Note the step that is about to run, unless it is that of the planned schedule."""
        step, phase = handover.steps_done, handover.phase
        tolerance = 0.0 if phase is None else phase.tolerance
        resting = handover.local.fitted(tolerance) if tolerance > 0 else set()
        raised = any(one.since <= step < one.until for one in handover.raised.values())
        moved = handover.stateful_schedule is not None or handover.plan.schedule is not planned
        if not (moved or raised or resting):
            return
        states = handover.state.sites.items()
        kind = "".join(LETTERS[_flags(site) + RESTS * (name in resting)] for name, site in states)
        if self.spans and self.spans[-1][1:] == [step, kind]:
            self.spans[-1][1] = step + 1
        else:
            self.spans.append([step, step + 1, kind])

    def by_step(self) -> dict[int, str]:
        """Return the letters of each noted step."""
        return {step: kind for first, after, kind in self.spans for step in range(first, after)}

    def state_dict(self) -> list[list[Any]]:
        """Return all of it as plain data."""
        return [list(span) for span in self.spans]

    def load_state_dict(self, state: Any) -> None:
        """Continue where an earlier process stopped; what no run can have written is refused."""
        end = 0
        for span in state:
            first, after, kind = span
            whole = type(first) is int and type(after) is int and end <= first < after <= self.total
            if not (whole and isinstance(kind, str) and len(kind) == self.sites and set(kind) <= set(LETTERS)):
                raise ValueError(f"the steps taken are {span!r:.60}")
            end = after
        self.spans = [list(span) for span in state]


def site_of(letter: str) -> tuple[SiteState, bool]:
    """Return a state that computes what a letter stands for, and whether the site rests.

    >>> site_of("A")
    (SiteState(alpha=1.0, weight=0.0, mean=0.0, guidance=0.0, hold=False), False)
    """
    number = LETTERS.index(letter)
    closed, hold, blends, alone, guided = (bool(number & 1 << place) for place in range(5))
    alpha = 0.0 if closed else 0.5 if blends or alone else 1.0
    weight = 1.0 if closed or alone else 0.5 if blends else 0.0
    return SiteState(alpha, weight, 1.0 - alpha, float(guided), hold), number >= RESTS


def _flags(site: SiteState) -> int:
    return sum(flag << place for place, flag in enumerate(work_of(site)))

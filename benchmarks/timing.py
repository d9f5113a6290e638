"""Time steps in turn, and compare them by ratios taken within one round.

Command: none of its own; every measurement of `make bench` uses it.
Expected runtime: what it is given, and at least a few rounds.
Expected result: the same step timed twice has ratio 1 within its interval; how wide that is, is the noise of the clock.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Step = Callable[[], object]
Clock = Callable[[], float]  # seconds

CONFIDENCE = 0.95
DECIMALS = 3  # of a millisecond, in what is saved


@dataclass(frozen=True)
class Ratio:
    """A median of ratios taken round by round, with its 95 % interval; of fewer than six rounds, the range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, above: Sequence[float], below: Sequence[float]) -> Ratio:
        ratios = sorted(a / b for a, b in zip(above, below, strict=True))
        place = outer_place(len(ratios))
        return cls(statistics.median(ratios), ratios[place], ratios[-1 - place])

    def over(self, bound: float) -> Ratio:
        return Ratio(self.median / bound, self.low / bound, self.high / bound)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"

    @property
    def fine(self) -> str:
        """The same with one digit more, where a bar asks for it."""
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def percent(share: float, digits: int = 0) -> str:
    """Write a share as the pages do, with a space."""
    return f"{100 * share:.{digits}f} %"


def outer_place(n: int) -> int:
    """Return how many of n sorted values lie outside a 95 % interval of the median, on each side (exact binomial)."""
    tail, place = 0.0, 0
    while place <= n // 2 and tail + math.comb(n, place) / 2**n <= (1 - CONFIDENCE) / 2:
        tail += math.comb(n, place) / 2**n
        place += 1
    return max(0, place - 1)


def rounds(
    steps: Mapping[str, Step],
    seconds: float,
    *,
    least: int,
    groups: Sequence[Sequence[str]] | None = None,
    repeats: Mapping[str, int] | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Time the steps in turn, in another order every round, until the time is up; return milliseconds by round.

    Steps of one group follow each other, because they are compared. A step whose cost changes from call to call is repeated
    within each round, and its mean counts.
    """
    times = dict.fromkeys(steps, 1) | dict(repeats or {})
    order = [list(group) for group in groups] if groups else [list(steps)]
    for step in steps.values():
        step()
    spent: dict[str, list[float]] = {name: [] for name in steps}
    shuffle = random.Random(0)
    end = time.perf_counter() + seconds
    done = 0
    while time.perf_counter() < end or done < least:
        shuffle.shuffle(order)
        for group in order:
            shuffle.shuffle(group)
            for name in group:
                spent[name].append(round(timed(steps[name], times[name], clock), DECIMALS))
        done += 1
    return spent


def timed(step: Step, times: int = 1, clock: Clock = time.perf_counter) -> float:
    """Return the milliseconds of one step, as the mean of several in a row."""
    begun = clock()
    for _ in range(times):
        step()
    return 1000 * (clock() - begun) / times

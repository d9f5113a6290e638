"""Spikes: how far a loss is from where it has been, in units of how far it usually is."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

RECENT = 5  # values whose median is the level: it follows a loss that moves, and not a single value
NORMAL = 1.4826  # the standard deviation of normal noise, in medians of its size
LEAST = 0.01  # deviation, of the level: a loss that hardly moves has no spikes of a percent
SMALLEST = 1e-6


class Level:
    """The recent values of a number, and the distances of values from the level before them."""

    def __init__(self, window: int) -> None:
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.distances: deque[float] = deque(maxlen=window)

    def deviations(self, value: float, least: float) -> float:
        """Return how many usual distances a value is above the level."""
        usual = max(NORMAL * median(self.distances), least, SMALLEST)
        return (value - median(self.recent)) / usual

    def add(self, value: float) -> None:
        if self.recent:
            self.distances.append(abs(value - median(self.recent)))
        self.recent.append(value)


class Series:
    """A loss over the steps. Medians make it robust, and a spike must also be one of its logarithm while it is positive.

    The loss of a model that has learned its data is close to zero and varies by factors: one example that it gets wrong is a
    hundred plain deviations, and no spike.

    >>> series = Series(window=20)
    >>> for step in range(20):
    ...     series.add(2.0 + 0.1 * (-1) ** step)
    >>> series.deviations(2.1) < 2, series.deviations(20.0) > 10
    (True, True)
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.clear()

    def clear(self) -> None:
        """Forget all values."""
        self.plain, self.log = Level(self.window), Level(self.window)

    def deviations(self, value: float) -> float:
        """Return how many deviations a value is above its level; 0 while nothing is known of them."""
        if not self.plain.distances:
            return 0.0
        plain = self.plain.deviations(value, LEAST * abs(median(self.plain.recent)))
        if value <= 0 or not self.log.distances:
            return plain
        return min(plain, self.log.deviations(math.log(value), LEAST))

    @property
    def level(self) -> float | None:
        """Where the loss has been, for people."""
        return median(self.plain.recent) if self.plain.recent else None

    def add(self, value: float) -> None:
        """Count a value in that is none."""
        self.plain.add(value)
        if value > 0:
            self.log.add(math.log(value))
        else:
            self.log = Level(self.window)

    def state_dict(self) -> dict[str, Any]:
        """Return the values as plain data."""
        return {name: [list(at.recent), list(at.distances)] for name, at in (("plain", self.plain), ("log", self.log))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the values of an earlier process."""
        for name, at in (("plain", self.plain), ("log", self.log)):
            recent, distances = (numbers(values) for values in state[name])
            if not (len(recent) <= RECENT and all(distance >= 0 for distance in distances)):
                raise ValueError(f"{len(recent)} recent values of a loss, and distances of {distances!r:.40}")
            at.recent, at.distances = deque(recent, RECENT), deque(distances, self.window)


def numbers(values: Any) -> list[float]:
    """Return the finite numbers of a file, and refuse anything else."""
    if not (isinstance(values, list) and all(type(value) is float and math.isfinite(value) for value in values)):
        raise ValueError(f"no list of numbers: {values!r:.40}")
    return values

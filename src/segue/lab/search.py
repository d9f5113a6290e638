"""The search of `segue tune`: which settings to try next, as a pure function of the trials that have ended.

Settings are points on a grid: each axis is a setting, and its values are the experiment's own times powers of a factor. The
best point is moved along one axis at a time. Optuna is left out: on two to four settings with about ten trials its samplers
have no advantage, their proposals depend on the order in which workers finish, and an interrupted study would choose otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

FEWEST = 3  # trials: the experiment's own learning rate and one on either side
REFINED = 0.5  # the smallest distance of two values, in powers of the factor

Point = tuple[float, ...]  # of each axis, the power of its factor
Scores = Mapping[Point, float | None]  # higher is better; None: the training diverged


@dataclass(frozen=True)
class Axis:
    """One setting and the values that it may have."""

    path: str
    centre: float
    factor: float

    def value(self, power: float) -> float:
        """Return the value at a power of the factor, as a person would write it.

        >>> Axis("recipe.lr", 5e-4, 2).value(3)
        0.004
        """
        return float(f"{self.centre * self.factor**power:.4g}")


def replay(axes: int, trials: int, score: Callable[[Point], tuple[bool, float | None]]) -> tuple[Scores, list[Point]]:
    """Return the scores of the trials that count so far, and the points to try next; none are left after the last trial.

    `score` says of a point whether its trial has ended, and how. Proposals depend on complete rounds alone, so it makes no
    difference in which order trials end, or where the search was interrupted.
    """
    tried: dict[Point, float | None] = {}
    while len(tried) < trials:
        proposed = propose(axes, tried, trials - len(tried))
        found = {point: score(point) for point in proposed}
        if waiting := [point for point, (ended, _) in found.items() if not ended]:
            return tried, waiting
        tried |= {point: value for point, (_, value) in found.items()}
    return tried, []


def propose(axes: int, tried: Scores, left: int) -> list[Point]:
    """Return the points of the next round, at most `left`.

    First the centre and its neighbours along the first axis. Then, axis by axis, the values beyond the best while it is at an
    edge of those tried; then values between it and its neighbours; then values farther out on the first axis.

    >>> propose(1, {}, 8)
    [(0.0,), (1.0,), (-1.0,)]
    >>> propose(1, {(0.0,): 0.5, (1.0,): 0.7, (-1.0,): 0.4}, 5)
    [(2.0,)]
    """
    if not tried:
        centre = (0.0,) * axes
        return [centre, _moved(centre, 0, 1.0), _moved(centre, 0, -1.0)][:left]
    chosen = best(tried)
    for axis in range(axes):
        line = on_line(tried, chosen, axis)
        beyond = [line[-1] + 1] * (chosen[axis] == line[-1]) + [line[0] - 1] * (chosen[axis] == line[0])
        if beyond:
            return [_moved(chosen, axis, power) for power in beyond][:left]
    for axis in range(axes):
        line = on_line(tried, chosen, axis)
        near = (chosen[axis] + REFINED, chosen[axis] - REFINED)
        if between := [power for power in near if power not in line]:
            return [_moved(chosen, axis, power) for power in between][:left]
    line = on_line(tried, chosen, 0)
    return [_moved(chosen, 0, line[-1] + 1), _moved(chosen, 0, line[0] - 1)][:left]


def best(tried: Scores) -> Point:
    """Return the point with the best score; of equal ones the nearest to the centre, and where all diverged the smallest."""

    def key(point: Point) -> tuple[float, float, Point]:
        score = tried[point]
        if score is None:
            return -math.inf, -sum(point), point
        return score, -sum(map(abs, point)), point

    return max(tried, key=key)


def on_line(tried: Scores, point: Point, axis: int) -> list[float]:
    """Return the powers that were tried on one axis with the other settings as they are at a point, in order."""
    others = [(*one[:axis], *one[axis + 1 :]) for one in (point, *tried)]
    return sorted({one[axis] for one, rest in zip(tried, others[1:], strict=True) if rest == others[0]})


def _moved(point: Point, axis: int, power: float) -> Point:
    return (*point[:axis], power, *point[axis + 1 :])

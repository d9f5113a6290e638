"""Order and pace: the least damage in context first, and a longer ramp where the student is further from its teacher."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from segue.planning.candidates import Option
from segue.planning.prediction import Prediction
from segue.schedules import Adaptive, PerSite, Piecewise, Schedule

UNTIL = 0.3  # of the run: all ramps have ended
SHORTEST = 0.5  # of the mean ramp
LONGEST = 2.0


def order_of(prediction: Prediction, subset: Sequence[Option], before: Sequence[Option] = ()) -> list[Option]:
    """Return the options in the order in which each adds the least damage to those before it."""
    left, done = list(subset), list(before)
    found = []
    while left:
        best = min(left, key=lambda option: prediction.of([*done, option]))
        left.remove(best)
        done.append(best)
        found.append(best)
    return found


def staggered(order: Sequence[Option], errors: Mapping[Option, float], start: float = 0.0, until: float = UNTIL) -> PerSite:
    """Let each site begin when the ramp of the one before it is half done; ramps are as long as the errors are large."""
    mean = sum(errors[option] for option in order) / len(order)
    lengths = [min(LONGEST, max(SHORTEST, errors[option] / mean)) if mean > 0 else 1.0 for option in order]
    begins = [sum(lengths[:i]) / 2 for i in range(len(order))]
    scale = (until - start) / max(begin + length for begin, length in zip(begins, lengths, strict=True))
    ramps: dict[str, Schedule] = {}
    for (site, _), begin, length in zip(order, begins, lengths, strict=True):
        first, last = start + begin * scale, min(until, start + (begin + length) * scale)
        ramps[site] = Piecewise(points=((round(first, 6), 1.0), (round(last, 6), 0.0)))
    return PerSite(schedules=ramps)


def adaptive(
    prediction: Prediction, order: Sequence[Option], errors: Mapping[Option, float], kl: float, until: float = UNTIL
) -> PerSite:
    """Give each site the error that its share of the damage allows: z with 1/2 H z^2 = share, times its error at z = 1."""
    found: dict[str, Schedule] = {}
    for option in order:
        alone = prediction.of([option])
        weight = min(1.0, math.sqrt(kl / len(order) / alone)) if alone > 0 else 1.0
        found[option[0]] = Adaptive(budget=max(1e-6, weight * errors[option]), divergence=kl, until=until)
    return PerSite(schedules=found)

"""The loss on the way from a teacher's output to its student's (proposition 4).

Along y(s) = T + s (S - T), s being the student's share, |f(y(s)) - f(T)| <= L s |S - T|, with L the largest gradient norm of
the loss f on the segment.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.core.handover import Handover
from segue.diagnostics.gate_distribution import law_of
from segue.diagnostics.population import chosen_sites, fixed_batches, shares
from segue.diagnostics.tail import Tail, tails
from segue.errors import PlanError
from segue.reporting.formatting import significant
from segue.training.tasks import LossFn


@dataclass(frozen=True, kw_only=True)
class SitePath:
    """The way at one site, in means over the minibatches; an inequality that holds for each holds for them."""

    losses: tuple[float, ...]  # f(y(s)) at every share
    rises: tuple[float, ...]  # |f(y(s)) - f(T)|
    bounds: tuple[float, ...]  # L s |S - T|
    lipschitz: float  # L, of the points that were looked at
    distance: float  # |S - T|

    @property
    def ratio(self) -> float:
        """The largest rise, relative to its bound."""
        return max((rise / bound for rise, bound in zip(self.rises, self.bounds, strict=True) if bound > 0), default=0.0)


@dataclass(frozen=True, kw_only=True)
class LossPath:
    """What `loss_path` found."""

    shares: tuple[float, ...]  # of the student, from 0 to 1: one minus our alpha, the paper's alpha of proposition 4
    sites: dict[str, SitePath]
    batches: int

    def __str__(self) -> str:
        """Write a Markdown table, one line per site."""
        rows = [
            "| site | loss with the teacher | with the student | L | distance | rise / bound |",
            "|---|---|---|---|---|---|",
        ]
        for name, path in self.sites.items():
            numbers = (path.losses[0], path.losses[-1], path.lipschitz, path.distance, path.ratio)
            rows.append(f"| {name} | {' | '.join(map(significant, numbers))} |")
        return "\n".join(rows)

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw the loss along the way at every site, and the rise beside its bound; needs matplotlib."""
        from segue.diagnostics.figures import draw_loss_path

        return draw_loss_path(self, Path(path))


def loss_path(
    handover: Handover,
    batches: Iterable[Any],
    loss_fn: LossFn,
    alpha: float | None = 0.5,
    sites: str | Sequence[str] | None = None,
    *,
    points: int = 21,
) -> LossPath:
    """Follow the loss from each site's teacher to its student, beside the paper's bound.

    One site moves at a time; the gates of the others stay at their means at the teacher's share `alpha` (None: as it is now).
    """
    if points < 2:
        raise PlanError(f"loss_path(points={points}) was asked for.", "A way has two ends.", "21 is the default.")
    handover.require_teachers("loss_path()")
    means = {name: law_of(handover.plan.gate, share).mean for name, share in shares(handover, alpha).items()}
    population = fixed_batches(batches, handover)
    steps = tuple(point / (points - 1) for point in range(points))
    with tails(handover, means) as tail:
        found = {
            name: _joined([_path(tail(name, batch, loss_fn), steps) for batch in population])
            for name in chosen_sites(handover, sites)
        }
    return LossPath(shares=steps, sites=found, batches=len(population))


def _path(tail: Tail, steps: tuple[float, ...]) -> SitePath:
    losses, slopes = zip(*(tail.slope(share) for share in steps), strict=True)
    lipschitz = max(slopes)
    return SitePath(
        losses=losses,
        rises=tuple(abs(loss - losses[0]) for loss in losses),
        bounds=tuple(lipschitz * share * tail.distance for share in steps),
        lipschitz=lipschitz,
        distance=tail.distance,
    )


def _joined(each: list[SitePath]) -> SitePath:
    def mean(name: str) -> tuple[float, ...]:
        return tuple(math.fsum(values) / len(each) for values in zip(*(getattr(one, name) for one in each), strict=True))

    return SitePath(
        losses=mean("losses"),
        rises=mean("rises"),
        bounds=mean("bounds"),
        lipschitz=max(one.lipschitz for one in each),
        distance=math.fsum(one.distance for one in each) / len(each),
    )

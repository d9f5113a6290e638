"""A recorder: the paper's quantities at the evaluations of a run, on a few minibatches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from segue.border import PositiveInt, checked
from segue.core.handover import Handover
from segue.diagnostics.curvature import curvature_bias
from segue.diagnostics.gate_distribution import select_sites, site_distributions
from segue.diagnostics.gradient_variance import gate_gradient_variance
from segue.diagnostics.loss_path import loss_path
from segue.errors import PlanError, nearest
from segue.training.batches import mapped, size
from segue.training.tasks import LossFn

VARIANCE, CURVATURE, PATH = "variance", "curvature", "path"
MEASURES = (VARIANCE, CURVATURE, PATH)


class Recorder:
    """Measure a running handover at its present step, by site; pass it to `segue.fit(..., measure=...)`, or call it.

    All gates vary. The number of draws is small, so single values are noisy; means over evaluations and seeds are less so.
    Curvature and path take many passes, so they use only the first `examples` of the first minibatch. `at` names the steps at
    which to measure (by default, whenever it is called). Once teachers are released there is nothing to measure.
    """

    @checked
    def __init__(
        self,
        batches: Iterable[Any],
        loss_fn: LossFn,
        measures: Sequence[str] = (VARIANCE,),
        *,
        sites: str | Sequence[str] | None = None,
        draws: PositiveInt = 8,
        examples: PositiveInt = 16,
        points: PositiveInt = 5,
        iterations: PositiveInt = 8,
        at: Iterable[int] | None = None,
    ) -> None:
        for measure in measures:
            if measure not in MEASURES:
                raise PlanError(
                    f"{measure!r} is not a measure.",
                    nearest(measure, list(MEASURES)),
                    f"the measures are {', '.join(MEASURES)}.",
                )
        self.batches = list(batches)
        self.few = [_first(examples, batch) for batch in self.batches[:1]]
        self.loss_fn = loss_fn
        self.measures = tuple(measures)
        self.sites = sites
        self.draws = draws
        self.points = points
        self.iterations = iterations
        self.at = None if at is None else frozenset(at)

    def __call__(self, handover: Handover) -> dict[str, dict[str, float]]:
        """Return the measured values, by quantity and site."""
        skipped = self.at is not None and handover.steps_done not in self.at
        if skipped or any(seam.teacher is None for seam in handover.seams.values()):
            return {}
        found: dict[str, dict[str, float]] = {}
        for measure in self.measures:
            found |= getattr(self, f"_{measure}")(handover)
        return found

    def _variance(self, handover: Handover) -> dict[str, dict[str, float]]:
        result = gate_gradient_variance(
            handover,
            self.batches,
            self.loss_fn,
            None,
            self.sites,
            self.draws,
            alone=False,
            most_outcomes=self.draws,
            seed=handover.steps_done,
        )
        sites = result.together.sites
        return {
            "gate_variance": {name: site.gate for name, site in sites.items()},
            "gate_variance_error": {name: site.standard_error for name, site in sites.items()},
            "data_variance": {name: site.data for name, site in sites.items()},
            "predicted_variance": {name: site.predicted for name, site in sites.items()},
        }

    def _curvature(self, handover: Handover) -> dict[str, dict[str, float]]:
        if not any(one.variance for one in site_distributions(handover, None).values()):
            nothing = dict.fromkeys(select_sites(handover, self.sites), 0.0)  # a deterministic gate has no bias
            return {"curvature_bias": nothing, "curvature_bound": dict(nothing)}
        result = curvature_bias(
            handover, self.few, self.loss_fn, None, self.sites, points=self.points, iterations=self.iterations
        )
        return {
            "curvature_bias": {name: site.bias for name, site in result.sites.items()},
            "curvature_bound": {name: site.bound for name, site in result.sites.items()},
        }

    def _path(self, handover: Handover) -> dict[str, dict[str, float]]:
        result = loss_path(handover, self.few, self.loss_fn, None, self.sites, points=self.points)
        return {
            "path_rise": {name: site.rises[-1] for name, site in result.sites.items()},
            "path_bound": {name: site.bounds[-1] for name, site in result.sites.items()},
        }


def _first(examples: int, batch: Any) -> Any:
    """Return the first examples of a batch; tensors of another length stay as they are."""
    rows = size(batch)
    return mapped(lambda tensor: tensor[:examples] if tensor.dim() and len(tensor) == rows else tensor, batch)

"""The loss on the path from a teacher's output to its student's (proposition 4), and as a function of one site's output.

Along y(s) = T + s (S - T), s being the student's weight, |f(y(s)) - f(T)| <= L s |S - T|, with L the largest gradient norm of
the loss f on the segment.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from segue.border import Count, Unit, at_least, checked
from segue.core.blending import first_floating, merge
from segue.core.handover import Handover
from segue.core.modes import View, Watch
from segue.core.views import isolated
from segue.diagnostics.gate_distribution import fixed_batches, select_sites, site_distributions
from segue.errors import HandoverError
from segue.reporting.formatting import significant
from segue.similarity import as_real
from segue.training.tasks import LossFn, scalar


@dataclass(frozen=True, kw_only=True)
class SitePath:
    """The path at one site, as means over the minibatches; an inequality that holds for each holds for their mean."""

    losses: tuple[float, ...]  # f(y(s)) at every weight
    rises: tuple[float, ...]  # |f(y(s)) - f(T)|
    bounds: tuple[float, ...]  # L s |S - T|
    lipschitz: float  # L, over the measured points
    distance: float  # |S - T|

    @property
    def ratio(self) -> float:
        """The largest rise, relative to its bound."""
        return max((rise / bound for rise, bound in zip(self.rises, self.bounds, strict=True) if bound > 0), default=0.0)


@dataclass(frozen=True, kw_only=True)
class LossPath:
    """What `loss_path` found."""

    weights: tuple[float, ...]  # of the student, from 0 to 1: one minus our alpha, the paper's alpha of proposition 4
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

    _repr_markdown_ = __str__  # what a notebook shows

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw the loss along the path at every site, and its rise relative to the bound; needs matplotlib."""
        from segue.diagnostics.figures import draw_loss_path

        return draw_loss_path(self, Path(path))


@checked
def loss_path(
    handover: Handover,
    batches: Iterable[Any],
    loss_fn: LossFn,
    alpha: Unit | None = 0.5,
    sites: str | Sequence[str] | None = None,
    *,
    points: Annotated[Count, at_least(2)] = 21,  # a path has two ends
) -> LossPath:
    """Measure the loss from each site's teacher to its student, and the paper's bound.

    One site changes at a time; the gates of the others stay at their means.

    >>> import torch
    >>> import segue
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    >>> handover = segue.replace_(model, segue.methods.dcr_dfg("0"), total_steps=10)
    >>> batches = [(torch.randn(8, 4), torch.randint(2, (8,)))]
    >>> segue.diagnostics.loss_path(handover, batches, segue.Classification(), points=3).sites.keys()
    dict_keys(['0'])

    Args:
        handover: A running handover whose teachers are still there.
        batches: The population of minibatches, as `loss_fn` takes them.
        loss_fn: (model, batch) -> scalar, the loss of the task; guidance is not part of it, as in the paper.
        alpha: The teacher's share at every site; None means the present alphas.
        sites: Names of the sites to measure; all by default.
        points: Points of the path, both ends among them.
    """
    handover.require_teachers("loss_path()")
    means = {name: one.mean for name, one in site_distributions(handover, alpha).items()}
    population = fixed_batches(batches, handover)
    steps = tuple(point / (points - 1) for point in range(points))
    with tails(handover, means) as tail:
        found = {
            name: _joined([_path(tail(name, batch, loss_fn), steps) for batch in population])
            for name in select_sites(handover, sites)
        }
    return LossPath(weights=steps, sites=found, batches=len(population))


def _path(tail: Tail, steps: tuple[float, ...]) -> SitePath:
    losses, slopes = zip(*(tail.slope(weight) for weight in steps), strict=True)
    lipschitz = max(slopes)
    return SitePath(
        losses=losses,
        rises=tuple(abs(loss - losses[0]) for loss in losses),
        bounds=tuple(lipschitz * weight * tail.distance for weight in steps),
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


@contextmanager
def tails(handover: Handover, weights: dict[str, float]) -> Iterator[Callable[[str, Any, LossFn], Tail]]:
    """Fix the student's weight at every site and yield a function that makes tails; the run is not changed.

    Attention runs as plain matrix products here: the fused kernels have no second derivative.
    """
    with isolated(handover), _frozen(handover.model), _gathered(handover.model), sdpa_kernel(SDPBackend.MATH):
        for name, seam in handover.seams.items():
            seam.configure(view=View.BLEND, hold=False)
            seam.teacher_gradient = True  # the derivatives of the loss itself, whatever the plan stops in training
            seam.set_weight(weights[name], weights[name])
        yield lambda site, batch, loss_fn: Tail(handover, site, batch, loss_fn)


class Tail:
    """psi(y): the loss on one minibatch if a site returned y, with everything before it and every other gate fixed."""

    def __init__(self, handover: Handover, site: str, batch: Any, loss_fn: LossFn) -> None:
        self.model = handover.model
        self.seam = handover.seams[site]
        self.batch = batch
        self.loss_fn = loss_fn
        with torch.no_grad(), handover.recording(Watch.PAIR):
            self._run()
            pairs = self.seam.records
        if len(pairs) != 1:
            raise HandoverError(
                f"site {site!r} must be called once per forward, got {len(pairs)} calls.",
                "The loss is measured as a function of its one output.",
                "select other sites.",
            )
        self.complex = pairs[0][0].is_complex()  # then both sides are real here, and have two parts in one more dimension
        self.teacher, self.student = (as_real(output.detach()).clone() for output in pairs[0])

    @property
    def distance(self) -> float:
        """|S - T|, over the minibatch."""
        return float((self.student.double() - self.teacher.double()).norm().item())

    def at(self, weight: float) -> Tensor:
        """Return the output at this weight of the student, as a leaf for gradients."""
        return torch.lerp(self.teacher, self.student, weight).requires_grad_(True)

    def __call__(self, y: Tensor) -> Tensor:
        """Return the loss if the site returned y."""
        with self._returning(y):
            return self._run()

    @contextmanager
    def _returning(self, y: Tensor) -> Iterator[None]:
        """Let the site return y: in a forward, and in a backward too, where activation checkpointing recomputes it."""
        y = torch.view_as_complex(y) if self.complex else y

        def instead(module: nn.Module, args: Any, output: Any) -> Any:
            first = first_floating(output, self.seam.site)
            return merge(output, output, lambda x, _: y if x is first else x, self.seam.site)

        handle = self.seam.register_forward_hook(instead)
        try:
            yield
        finally:
            handle.remove()

    def value(self, weight: float) -> float:
        """Return the loss at a weight of the student."""
        with torch.no_grad():
            return self(self.at(weight)).item()

    def slope(self, weight: float) -> tuple[float, float]:
        """Return the loss at a weight of the student, and the norm of its gradient there."""
        y = self.at(weight)
        with torch.enable_grad(), self._returning(y):
            loss = self._run()
            (gradient,) = torch.autograd.grad(loss, y)
        return loss.item(), gradient.double().norm().item()

    def curvature(self, weight: float) -> Callable[[Tensor], Tensor]:
        """Return the product of the loss's Hessian at a weight of the student with any vector."""
        y = self.at(weight)
        with torch.enable_grad(), self._returning(y):
            (gradient,) = torch.autograd.grad(self._run(), y, create_graph=True)
        if not gradient.requires_grad:  # the loss is linear in y
            return torch.zeros_like

        def product(vector: Tensor) -> Tensor:
            with self._returning(y):
                (found,) = torch.autograd.grad(gradient, y, vector.to(y), retain_graph=True, allow_unused=True)
            return torch.zeros_like(vector) if found is None else found.detach()

        return product

    def _run(self) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return scalar(self.loss_fn(self.model, self.batch))


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Freeze all parameters, so that graphs begin at the site."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _gathered(model: nn.Module) -> Iterator[None]:
    """Keep what FSDP2 gathers until the end: a second derivative needs it again and does not gather."""
    units: list[Any] = [module for module in model.modules() if hasattr(module, "set_reshard_after_backward")]
    for unit in units:
        unit.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_backward(True, recurse=False)
            unit.reshard()

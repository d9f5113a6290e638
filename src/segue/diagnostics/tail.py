"""The tail: the loss as a function of what one site returns, with everything before it and every other gate fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from segue.core.blending import first_floating, merge
from segue.core.handover import Handover
from segue.core.seam import View, Watch
from segue.core.views import isolated
from segue.errors import HandoverError
from segue.training.tasks import LossFn


@contextmanager
def tails(handover: Handover, weights: dict[str, float]) -> Iterator[Callable[[str, Any, LossFn], Tail]]:
    """Fix the student's weight at every site and hand out tails; the run is not touched.

    Attention runs as plain matrix products meanwhile: the fused kernels have no second derivative.
    """
    with isolated(handover), _frozen(handover.model), _gathered(handover.model), sdpa_kernel(SDPBackend.MATH):
        for name, seam in handover.seams.items():
            seam.configure(view=View.BLEND, hold=False)
            seam.teacher_gradient = True  # the loss's own derivatives, whatever the training lets pass
            seam.set_weight(weights[name], weights[name])
        yield lambda site, batch, loss_fn: Tail(handover, site, batch, loss_fn)


class Tail:
    """psi(y): the loss on one minibatch if a site returned y. Knows what its teacher and its student return there."""

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
                f"the loss as a function of the output at site {site!r} was asked for.",
                f"One forward calls that site {len(pairs)} times.",
                "measure sites that are called once.",
            )
        self.teacher, self.student = (output.detach().clone() for output in pairs[0])

    @property
    def distance(self) -> float:
        """|S - T|, over the whole minibatch."""
        return float((self.student.double() - self.teacher.double()).norm().item())

    def at(self, share: float) -> Tensor:
        """Return the output with this share of the student, as a leaf that gradients can be taken to."""
        return torch.lerp(self.teacher, self.student, share).requires_grad_(True)

    def __call__(self, y: Tensor) -> Tensor:
        """Return the loss if the site returned y."""
        with self._returning(y):
            return self._run()

    @contextmanager
    def _returning(self, y: Tensor) -> Iterator[None]:
        """Let the site return y: in a forward, and in the backward too, where activation checkpointing runs it again."""

        def instead(module: nn.Module, args: Any, output: Any) -> Any:
            first = first_floating(output, self.seam.site)
            return merge(output, output, lambda x, _: y if x is first else x, self.seam.site)

        handle = self.seam.register_forward_hook(instead)
        try:
            yield
        finally:
            handle.remove()

    def value(self, share: float) -> float:
        """Return the loss at a share of the student."""
        with torch.no_grad():
            return self(self.at(share)).item()

    def slope(self, share: float) -> tuple[float, float]:
        """Return the loss at a share of the student, and the norm of its gradient there."""
        y = self.at(share)
        with torch.enable_grad(), self._returning(y):
            loss = self._run()
            (gradient,) = torch.autograd.grad(loss, y)
        return loss.item(), gradient.double().norm().item()

    def curvature(self, share: float) -> Callable[[Tensor], Tensor]:
        """Return the product of the loss's Hessian at a share of the student with any vector."""
        y = self.at(share)
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
            return self.loss_fn(self.model, self.batch)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Let no parameter ask for a gradient, so that graphs begin at the site."""
    asking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


@contextmanager
def _gathered(model: nn.Module) -> Iterator[None]:
    """Leave what FSDP2 gathers for a backward whole to the end: a second derivative needs it again, and gathers nothing."""
    units: list[Any] = [module for module in model.modules() if hasattr(module, "set_reshard_after_backward")]
    for unit in units:
        unit.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_backward(True, recurse=False)
            unit.reshard()

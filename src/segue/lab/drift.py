"""Drift: how far the stream after each replaced block is from that of the untouched model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from segue import similarity
from segue.core.blending import first_floating, padding_mask
from segue.core.handover import Handover
from segue.core.modes import evaluating
from segue.sites import Site
from segue.training.tasks import LossFn


class Drift:
    """Compare the blocks' outputs on a fixed batch with those of the model before anything was replaced in it."""

    def __init__(self, model: nn.Module, sites: list[Site], batch: Any, loss_fn: LossFn) -> None:
        self.sites = sites
        self.batch = batch
        self.loss_fn = loss_fn
        self.untouched = self._outputs(model)

    def __call__(self, handover: Handover) -> dict[str, dict[str, float]]:
        """Return the relative squared distance after the block of every site: of the blend, and of the students alone."""
        blend = self._distances(handover.model)
        with handover.as_student():
            students = self._distances(handover.model)
        return {"drift_blend": blend, "drift_students": students}

    def _distances(self, model: nn.Module) -> dict[str, float]:
        mask = padding_mask(self.batch)
        return {
            name: similarity.relative_error(self.untouched[name], output, mask).mean().item()
            for name, output in self._outputs(model).items()
        }

    @torch.no_grad()
    def _outputs(self, model: nn.Module) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = {}

        def keep(site: Site) -> Any:
            def after(module: nn.Module, args: Any, output: Any) -> None:
                outputs[site.name] = first_floating(output, site)

            return after

        handles = [model.get_submodule(block_of(site.members[-1])).register_forward_hook(keep(site)) for site in self.sites]
        try:
            with evaluating(model):
                self.loss_fn(model, self.batch)
        finally:
            for handle in handles:
                handle.remove()
        return outputs


def block_of(site: str) -> str:
    """Return the name of the block that contains a site: up to the last number in its name, or the site itself.

    >>> block_of("blocks.3.attn"), block_of("encoder.layer.0.attention.self"), block_of("mixer")
    ('blocks.3', 'encoder.layer.0', 'mixer')
    """
    parts = site.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else site

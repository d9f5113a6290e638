"""Nothing for something: a site whose module is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from segue.border import checked
from segue.errors import StudentError
from segue.sites import Site

__all__ = ["Drop"]


@checked
@dataclass(frozen=True, kw_only=True)
class Drop:
    """Leave a module out: a layer with its residual connection hands its input on, one without adds nothing.

    >>> Drop()(nn.Linear(4, 4), Site("layers.3"))(torch.ones(2))
    tensor([1., 1.])
    >>> Drop(returns="zeros")(nn.Linear(4, 4), Site("layers.3.mlp"))(torch.ones(2))
    tensor([0., 0.])

    It has no weights to train. The module must return one tensor, of the shape of its input.
    """

    returns: Literal["input", "zeros"] = "input"

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        if site.is_span:
            raise StudentError(
                f"Drop() cannot replace the span at site {site.name!r}.",
                f"It covers {len(site.members)} layers, and one layer takes the place of a span.",
                "select single layers. Nothing was changed.",
            )
        return Dropped(self.returns == "zeros")


class Dropped(nn.Module):
    """Hand the input on, or zeros of its shape."""

    def __init__(self, zeros: bool) -> None:
        super().__init__()
        self.zeros = zeros

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point())
        return torch.zeros_like(x) if self.zeros else x.clone()  # a copy: the model may change it in place

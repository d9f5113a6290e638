"""EMA: an exponential moving average of the weights that train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from segue.border import Rule, checked
from segue.core.handover import Handover
from segue.core.tensor_files import local, sharded_like

Decay = Annotated[float, Rule("a number above 0 and below 1", lambda value: 0 < value < 1)]


@checked
@dataclass(frozen=True, kw_only=True)
class Ema:
    """Average the weights that train over the steps, and evaluate the average beside them.

    After n averaged steps the decay is min(decay, (1 + n) / (10 + n)), so that the first weights do not stay in the average of
    a short run. With `final`, the model has the averaged weights when `fit` returns. Buffers are not averaged.

    >>> Ema(final=True).decay
    0.999

    Args:
        decay: How much of the average stays at a step.
        final: Give the model the averaged weights in the end.
    """

    decay: Decay = 0.999
    final: bool = False

    @checked
    def watch(self, handover: Handover) -> RunningEma:
        """Average what a handover trains, in a loop of one's own; `fit` does this itself.

        ema = segue.Ema().watch(handover)
        ...
        ema.update()  # after every step that was taken
        with ema.applied(), handover.as_student():
            ...  # evaluate; ema.apply() gives the model the averaged weights for good
        """
        return RunningEma(self, list(handover.parameters()), handover.model)


class RunningEma:
    """The averaged weights of a training, on the device of the weights, in float32 at least."""

    def __init__(self, settings: Ema, parameters: Sequence[nn.Parameter], model: nn.Module) -> None:
        self.settings, self.parameters, self.model = settings, parameters, model
        self.steps = 0
        self.weights: list[Tensor] = []  # none before the first step

    @torch.no_grad()
    def update(self) -> None:
        """Count the weights after a step in."""
        if not self.weights:
            self.weights = [_precise(parameter.detach().clone()) for parameter in self.parameters]
        else:
            decay = min(self.settings.decay, (1 + self.steps) / (10 + self.steps))
            now = [_precise(local(parameter)) for parameter in self.parameters]
            torch._foreach_lerp_([local(weight) for weight in self.weights], now, 1 - decay)
        self.steps += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights inside a `with` block."""
        before = [local(parameter).clone() for parameter in self.parameters]
        self.apply()
        try:
            yield
        finally:
            write_weights(self.model, self.parameters, before)

    def apply(self) -> None:
        """Give the model the averaged weights."""
        write_weights(self.model, self.parameters, self.weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights."""
        return {"steps": self.steps, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the average of an earlier process."""
        steps, weights = state["steps"], state["weights"]
        if not (type(steps) is int and steps >= 0 and len(weights) == (len(self.parameters) if steps else 0)):
            raise ValueError(f"an average of {len(weights)} weights over {steps!r:.20} steps")
        if any(weight.shape != parameter.shape for weight, parameter in zip(weights, self.parameters, strict=False)):
            raise ValueError("the averaged weights have other shapes than those of the model")
        pairs = zip(weights, self.parameters, strict=bool(steps))
        self.steps = steps
        self.weights = [_precise(sharded_like(weight.to(parameter.device), parameter)) for weight, parameter in pairs]


@torch.no_grad()
def write_weights(model: nn.Module, parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Overwrite parameters of a model between two steps."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():  # FSDP2 keeps what it gathers in a forward without a backward
            if isinstance(module, FSDPModule):
                module.reshard()
    for parameter, value in zip(parameters, values, strict=True):
        local(parameter).copy_(local(value))


def _precise(tensor: Tensor) -> Tensor:
    """Return a tensor in which a thousandth of a difference does not vanish."""
    return tensor.float() if tensor.element_size() < 4 else tensor

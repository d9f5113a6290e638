"""The last good state of a training, in memory: what its steps have changed, to go back to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from segue.core.tensor_files import local, sharded_like
from segue.training.buffers import StepBuffers
from segue.training.ema import RunningEma


class GoodState:
    """Copies of the weights that train, the optimizer's state, buffers, a gradient scaler and averaged weights."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer,
        roots: Iterable[nn.Module],
        scaler: Any = None,
        ema: RunningEma | None = None,
    ) -> None:
        self.parameters, self.optimizer, self.scaler, self.ema = parameters, optimizer, scaler, ema
        self.buffers = StepBuffers(roots)
        self.step: int | None = None  # at which it was kept; None while nothing is
        self.alphas: dict[str, float] = {}  # of that step, by site
        self.errors: dict[str, float] = {}  # of a local fit, by site
        self._tensors: dict[str, Tensor] = {}  # by the place of a parameter and what of it
        self._numbers: dict[str, Any] = {}  # of the scaler and the average

    @property
    def copied(self) -> int:
        """The bytes that the latest copy took."""
        tensors = [local(tensor) for tensor in self._tensors.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + self.buffers.copied

    def _live(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        averages = self.ema.weights if self.ema is not None else []
        for place, parameter in enumerate(self.parameters):
            found[f"{place}/weight"] = parameter
            found |= {f"{place}/average": averages[place]} if averages else {}
            kept = self.optimizer.state.get(parameter, {})
            found |= {f"{place}/optimizer.{name}": value for name, value in kept.items() if isinstance(value, Tensor)}
        return found

    @torch.no_grad()
    def keep(self, step: int, alphas: dict[str, float], errors: dict[str, float]) -> None:
        """Copy the state as it is now, into the memory of the last copy."""
        self.step, self.alphas, self.errors = step, dict(alphas), dict(errors)
        live = self._live()
        if live.keys() == self._tensors.keys():
            _copy(self._tensors, live)
        else:
            self._tensors = {name: tensor.detach().clone() for name, tensor in live.items()}
        self._numbers = {
            "scaler": {} if self.scaler is None else self.scaler.state_dict(),
            "averaged": 0 if self.ema is None else self.ema.steps,
        }
        self.buffers.keep()

    @torch.no_grad()
    def restore(self) -> None:
        """Give everything back; the copy stays."""
        for place, parameter in enumerate(self.parameters):  # what an optimizer or an average has made since is removed
            kept = self.optimizer.state.get(parameter, {})
            for name in [name for name in kept if f"{place}/optimizer.{name}" not in self._tensors]:
                del kept[name]
            if not kept:
                self.optimizer.state.pop(parameter, None)
        if self.ema is not None:
            self.ema.steps = self._numbers["averaged"]
            self.ema.weights = self.ema.weights if self.ema.steps else []
        _copy(self._live(), self._tensors)
        self.buffers.restore()
        if self.scaler is not None:
            self.scaler.load_state_dict(self._numbers["scaler"])

    def state_dict(self) -> dict[str, Any]:
        """Return the copies, for a checkpoint."""
        return {
            "step": self.step,
            "alphas": self.alphas,
            "errors": self.errors,
            "tensors": self._tensors,
            "buffers": self.buffers.state_dict(),
            **self._numbers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the copies of an earlier process."""
        step, alphas, errors, averaged = (state[name] for name in ("step", "alphas", "errors", "averaged"))
        if not all(type(count) is int and count >= 0 for count in (step, averaged)):
            raise ValueError(f"a good state of step {step!r:.20}, with an average of {averaged!r:.20} steps")
        if any(type(alpha) is not float or not 0.0 <= alpha <= 1.0 for alpha in alphas.values()):
            raise ValueError(f"a good state with the alphas {alphas!r:.60}")
        if not all(type(error) is float and 0 <= error < math.inf for error in errors.values()):
            raise ValueError(f"a good state with the errors {errors!r:.60}")
        found: dict[str, Tensor] = {}
        live = self._live()  # of an optimizer that has taken its own state
        for name, value in state["tensors"].items():
            place, _, what = name.partition("/")
            parameter = self.parameters[int(place)]
            number = value.dim() == 0 and what.startswith("optimizer.")  # it counts its steps in a single number
            if value.shape != (live[name].shape if name in live else value.shape if number else parameter.shape):
                raise ValueError(f"a good state with {name} of shape {tuple(value.shape)}")
            found[name] = sharded_like(value.to(parameter.device), parameter) if value.dim() else value
        if {f"{place}/weight" for place in range(len(self.parameters))} - found.keys():
            raise ValueError("a good state without all weights")
        self.step, self.alphas, self.errors, self._tensors = step, alphas, errors, found
        self._numbers = {"scaler": state["scaler"], "averaged": averaged}
        self.buffers.load_state_dict(state["buffers"])


def _copy(into: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Copy all values to tensors that are there."""
    names = [name for name in into if name in values]
    torch._foreach_copy_([local(into[name]) for name in names], [local(values[name]) for name in names])

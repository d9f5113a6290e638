"""Early stopping: end a training when the students' score no longer improves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from segue.border import NotNegative, PositiveInt, checked
from segue.core.tensor_files import sharded_like
from segue.errors import ConfigError, nearest
from segue.training.buffers import StepBuffers
from segue.training.ema import write_weights

if TYPE_CHECKING:
    from segue.training.fit import Loop


@checked
@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop when so many evaluations in a row bring no better score of the students alone.

    Evaluations count from the first after which alpha is 0 at every site: before, it is the teachers that hold the model up.
    With `Ema(final=True)` the score is that of the averaged weights, which the model then gets.

    >>> EarlyStopping(score="loss", mode="min").patience
    3

    Args:
        score: One of fit(scores=...).
        mode: Which is better, the larger or the smaller score.
        patience: So many evaluations in a row without an improvement end the run.
        min_delta: A smaller difference is no improvement.
        restore_best: Give the model the weights of the best evaluation in the end.
    """

    score: str = "accuracy"
    mode: Literal["max", "min"] = "max"
    patience: PositiveInt = 3
    min_delta: NotNegative = 0.0
    restore_best: bool = False


class RunningEarlyStopping:
    """The best evaluation of a training so far, and its weights if they are asked for."""

    def __init__(self, settings: EarlyStopping, loop: Loop) -> None:
        self.settings, self.loop = settings, loop
        self.buffers = StepBuffers([loop.model])
        self._clear()

    def _clear(self) -> None:
        self.best: float | None = None
        self.best_step: int | None = None
        self.waited = 0  # evaluations since then
        self.evaluated = 0  # the step of the last one
        self.weights: list[Tensor] = []

    @property
    def stopped_at(self) -> int | None:
        """The step after which the training is over, if it is."""
        return self.evaluated if self.waited >= self.settings.patience else None

    def observe(self, metrics: dict[str, Any]) -> None:
        """Compare the scores of an evaluation, which are equal in all processes, with the best."""
        value = self._score(metrics)
        handover = self.loop.handover
        if handover is not None and any(handover.alphas.values()):
            self._clear()  # a guard may have raised alpha again
            return
        self.evaluated = self.loop.done
        better = value if self.settings.mode == "max" else -value
        if math.isfinite(value) and (self.best is None or better > self._least()):
            self.best, self.best_step, self.waited = value, self.loop.done, 0
            if self.settings.restore_best:
                self._keep()
        else:
            self.waited += 1

    def _score(self, metrics: dict[str, Any]) -> float:
        scores: dict[str, float] = metrics["ema" if self._averaged else "scores" if self.loop.handover is None else "students"]
        if self.settings.score not in scores:
            raise ConfigError(
                f"there is no score {self.settings.score!r} to stop early by.",
                nearest(self.settings.score, list(scores)),
                f"name one of {', '.join(scores)}: EarlyStopping(score=...).",
            )
        return scores[self.settings.score]

    def _least(self) -> float:
        assert self.best is not None
        return (self.best if self.settings.mode == "max" else -self.best) + self.settings.min_delta

    @property
    def _averaged(self) -> bool:
        return self.loop.ema is not None and self.loop.ema.settings.final

    def _keep(self) -> None:
        weights = self.loop.ema.weights if self._averaged and self.loop.ema is not None else []
        self.weights = [weight.detach().clone() for weight in weights or self.loop.parameters]
        self.buffers.keep()

    def apply(self) -> None:
        """Give the model the weights and buffers of the best evaluation."""
        write_weights(self.loop.model, self.loop.parameters, self.weights)
        self.buffers.restore()

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, for a checkpoint."""
        plain = {"best": self.best, "best_step": self.best_step, "waited": self.waited, "evaluated": self.evaluated}
        return {**plain, "weights": self.weights, "buffers": self.buffers.state_dict() if self.weights else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as an earlier process would have."""
        best, step, waited, evaluated, weights = (
            state[name] for name in ("best", "best_step", "waited", "evaluated", "weights")
        )
        known = (best is None and step is None) or (
            type(best) is float and math.isfinite(best) and type(step) is int and 0 <= step <= self.loop.total
        )
        counted = all(type(count) is int and 0 <= count <= self.loop.total for count in (waited, evaluated))
        if not (known and counted):
            raise ValueError(f"the best score is {best!r:.20}, of step {step!r:.20}, {waited!r:.20} evaluations ago")
        if weights and [weight.shape for weight in weights] != [parameter.shape for parameter in self.loop.parameters]:
            raise ValueError("the best weights have other shapes than those of the model")
        self.best, self.best_step, self.waited, self.evaluated = best, step, waited, evaluated
        pairs = zip(weights, self.loop.parameters, strict=False)
        self.weights = [sharded_like(weight.to(parameter.device), parameter) for weight, parameter in pairs]
        self.buffers.load_state_dict(state["buffers"])

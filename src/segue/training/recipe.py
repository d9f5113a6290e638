"""The recipe: how long a model trains and with which optimizer settings; what is replaced in it is the plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from torch import nn
from torch.optim import AdamW
from torch.optim.optimizer import Optimizer

from segue.border import Count, NotNegative, PositiveFloat, PositiveInt, Rule, Seed, Unit, checked
from segue.errors import ConfigError
from segue.phases import Kind, Phase, Rates, grouped_by_kind, peak, rate, set_rates
from segue.training.early_stopping import EarlyStopping
from segue.training.ema import Ema
from segue.training.guard import Guard

Beta = Annotated[float, Rule("a number from 0 to below 1", lambda value: 0 <= value < 1)]  # of AdamW


@checked
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model trains; the defaults are the paper's.

    >>> Recipe(epochs=50).total_steps(batches_per_epoch=390)
    19500

    Args:
        steps: Optimizer steps; or give epochs.
        epochs: Passes over the data.
        lr: One learning rate, or one for each kind of parameter.
        final_lr: The rate at the end of the decay.
        warmup: The fraction of the run in which the rate rises to lr.
        decay: How the rate falls from lr to final_lr, or stays.
        weight_decay: Of AdamW; not on biases and norms.
        betas: Of AdamW.
        eps: Of AdamW.
        clip: The largest gradient norm; None clips nothing.
        accumulate: Batches per optimizer step.
        precision: What forwards compute in.
        compile: Compile the model by torch.
        shard: FSDP2 instead of DDP, where there is more than one process.
        on_nan: Stop at a step that is not finite, or leave it out.
        guard: Restores the last good state after a spike, inf or NaN.
        ema: Averages the weights that train.
        early_stopping: Ends the run when the students' score no longer rises.
        seed: Of the order of shuffled batches, dropout and whatever else draws while training.
    """

    steps: PositiveInt | None = None
    epochs: PositiveFloat | None = None
    lr: PositiveFloat | Rates = 5e-4
    final_lr: NotNegative = 0.0
    warmup: Unit = 0.0
    decay: Literal["cosine", "constant"] = "cosine"
    weight_decay: NotNegative = 0.05
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: NotNegative = 1e-8
    clip: PositiveFloat | None = 1.0
    accumulate: PositiveInt = 1
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    compile: bool = False
    shard: bool = False
    on_nan: Literal["stop", "skip"] = "stop"
    guard: Guard | None = None
    ema: Ema | None = None
    early_stopping: EarlyStopping | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                f"Recipe(steps={self.steps}, epochs={self.epochs}) is not valid.",
                "Exactly one of the two is the length of the run.",
                "give steps=1000, or epochs=50.",
            )

    @checked
    def total_steps(self, batches_per_epoch: Count | None) -> int:
        """Return the number of optimizer steps of the run."""
        if self.steps is not None:
            return int(self.steps)
        assert self.epochs is not None
        if batches_per_epoch is None:
            raise ConfigError(
                f"the number of steps in {self.epochs:g} epochs is unknown.",
                "The batches have no len().",
                "give Recipe(steps=...) instead.",
            )
        return max(1, math.floor(self.epochs * batches_per_epoch / self.accumulate))

    @checked
    def rate(self, step: Count, total: PositiveInt) -> float:
        """Return the learning rate of a step: linear warmup, then half a cosine from lr to final_lr.

        >>> recipe = Recipe(steps=30, lr=1e-3, final_lr=1e-6, warmup=1 / 3)
        >>> [f"{recipe.rate(step, 30):.1e}" for step in (0, 9, 10, 20, 30)]
        ['1.0e-04', '1.0e-03', '1.0e-03', '5.0e-04', '1.0e-06']
        """
        return rate(self, step, total)

    @checked
    def optimizer(self, named: Iterable[tuple[str, nn.Parameter]], kinds: Mapping[str, Kind] | None = None) -> Optimizer:
        """Build AdamW over named parameters, with decay on matrices and none on biases and norms.

        With the `kinds` of the parameters by name, each kind has groups of its own, for rates of its own.
        """
        parameters = list(named)
        if not parameters:
            raise ConfigError("the optimizer needs parameters.", "There are none.", "give those that train.")
        of: Mapping[str, Kind] = {name: "new" for name, _ in parameters} if kinds is None else kinds
        groups = grouped_by_kind(((parameter, of[name]) for name, parameter in parameters), self.weight_decay)
        if kinds is None:
            groups = [{key: value for key, value in group.items() if key != "kind"} for group in groups]
        return AdamW(groups, lr=peak(self), betas=self.betas, eps=self.eps)

    @checked
    def set_rate(self, optimizer: Optimizer, step: Count, total: PositiveInt, phases: tuple[Phase, ...] = ()) -> None:
        """Give an optimizer the learning rate of a step, as the phases of a plan say; nothing to save, so nothing to resume."""
        set_rates(optimizer, self, phases, step, total)

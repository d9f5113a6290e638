"""The recipe: how long and how fast a model trains, apart from what is replaced in it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import AdamW
from torch.optim.optimizer import Optimizer

from segue.errors import ConfigError

CHOICES = {"decay": ("cosine", "constant"), "precision": ("float32", "bf16", "fp16"), "on_nan": ("stop", "skip")}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Say how a model trains; the defaults are the paper's.

    >>> Recipe(epochs=50).total_steps(batches_per_epoch=390)
    19500
    """

    steps: int | None = None  # optimizer steps, or
    epochs: float | None = None  # passes over the data
    lr: float = 5e-4
    final_lr: float = 0.0
    warmup: float = 0.0  # the share of the run in which the rate rises to lr
    decay: Literal["cosine", "constant"] = "cosine"
    weight_decay: float = 0.05  # not on biases and norms
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip: float | None = 1.0  # the largest gradient norm
    accumulate: int = 1  # batches per optimizer step
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    compile: bool = False
    shard: bool = False  # FSDP2 instead of DDP, where there is more than one process
    on_nan: Literal["stop", "skip"] = "stop"
    seed: int = 0  # of the order of shuffled batches, dropout and whatever else draws while training

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                f"Recipe(steps={self.steps}, epochs={self.epochs}) was asked for.",
                "A run is as long as one of the two says.",
                "give steps=1000, or epochs=50.",
            )
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"Recipe({name}={getattr(self, name)!r}) was asked for.",
                    f"The choices are {', '.join(map(repr, choices))}.",
                    f"leave it out for {choices[0]!r}.",
                )
        positive = {"steps": self.steps, "epochs": self.epochs, "lr": self.lr, "clip": self.clip, "accumulate": self.accumulate}
        for name, value in positive.items():
            if value is not None and not (_is_number(value) and value > 0):
                _refuse(name, value, "It must be a positive number.")
        for name, value in {"final_lr": self.final_lr, "weight_decay": self.weight_decay}.items():
            if not (_is_number(value) and value >= 0):
                _refuse(name, value, "It must be a number of at least 0.")
        if not (_is_number(self.warmup) and 0 <= self.warmup <= 1):
            _refuse("warmup", self.warmup, "It is a share of the run, from 0 to 1.")
        for name, whole in {"steps": self.steps, "accumulate": self.accumulate}.items():
            if whole is not None and int(whole) != whole:
                _refuse(name, whole, "It must be a whole number.")

    def total_steps(self, batches_per_epoch: int | None) -> int:
        """Count the optimizer steps of the run."""
        if self.steps is not None:
            return int(self.steps)
        assert self.epochs is not None
        if batches_per_epoch is None:
            raise ConfigError(
                f"a run of {self.epochs:g} epochs was asked for.",
                "The batches do not say how many there are (they have no len()).",
                "give Recipe(steps=...) instead.",
            )
        return max(1, math.floor(self.epochs * batches_per_epoch / self.accumulate))

    def rate(self, step: int, total: int) -> float:
        """Return the learning rate of a step: a straight rise, then half a cosine from lr to final_lr.

        >>> recipe = Recipe(steps=30, lr=1e-3, final_lr=1e-6, warmup=1 / 3)
        >>> [f"{recipe.rate(step, 30):.1e}" for step in (0, 9, 10, 20, 30)]
        ['1.0e-04', '1.0e-03', '1.0e-03', '5.0e-04', '1.0e-06']
        """
        rise = round(self.warmup * total)
        if step < rise:
            return self.lr * (step + 1) / rise
        if self.decay == "constant":
            return self.lr
        done = min(1.0, (step - rise) / max(1, total - rise))
        return self.final_lr + (self.lr - self.final_lr) * (0.5 + 0.5 * math.cos(math.pi * done))

    def optimizer(self, named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """Build AdamW over named parameters, with decay on matrices and none on biases and norms."""
        parameters = [parameter for _, parameter in named]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return AdamW([group for group in groups if group["params"]], lr=self.lr, betas=self.betas, eps=self.eps)

    def set_rate(self, optimizer: Optimizer, step: int, total: int) -> None:
        """Give an optimizer the learning rate of a step; nothing to save, so nothing to resume."""
        for group in optimizer.param_groups:
            group["lr"] = self.lr * (self.rate(step, total) / self.lr)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse(name: str, value: object, why: str) -> None:
    raise ConfigError(f"Recipe({name}={value!r}) was asked for.", why, "leave it out for the paper's setting.")

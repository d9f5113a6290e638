"""The learning rates that the steps of an optimizer have: those of a phase, and lower ones after a guard's restore."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch.optim.optimizer import Optimizer

from segue.phases import SCHEDULED, frozen, set_rates

if TYPE_CHECKING:
    from segue.core.handover import Handover


class StepRates:
    """Set rates and weight decay before a step and take them back after it, so that a scheduler of the user's sees its own."""

    def __init__(self) -> None:
        self._hooked: WeakSet[Optimizer] = WeakSet()
        self._scheduled: WeakSet[Optimizer] = WeakSet()
        self._factor: Callable[[], float] | None = None

    def __reduce__(self) -> Any:
        return StepRates, ()  # a copy of a handover has other optimizers

    def schedule(self, handover: Handover, optimizer: Optimizer) -> None:
        """Give the steps of an optimizer the rates of their phase."""
        self._scheduled.add(optimizer)
        self._hook(handover, optimizer)

    def slow_down(self, handover: Handover, optimizer: Optimizer, factor: Callable[[], float]) -> None:
        """Multiply the rates of the steps of an optimizer by what a function returns for each."""
        self._factor = factor
        self._hook(handover, optimizer)

    def _hook(self, handover: Handover, optimizer: Optimizer) -> None:
        if optimizer in self._hooked:
            return
        self._hooked.add(optimizer)
        kept: list[list[dict[str, Any]]] = []  # a step inside another one's closure has its own

        def before(*_: Any) -> None:
            now = [{name: group[name] for name in SCHEDULED if name in group} for group in optimizer.param_groups]
            _write(optimizer, kept[0] if kept else now)
            kept.append(now)
            if not handover.is_running or handover.total_steps is None:
                return
            if optimizer in self._scheduled:
                place = None, handover.plan.phases, handover.steps_done, handover.total_steps
                set_rates(optimizer, *place)
                for parameter in frozen(optimizer, *place):
                    parameter.grad = None  # without one an optimizer leaves a parameter and its state alone
            factor = 1.0 if self._factor is None else self._factor()
            if factor != 1.0:
                for group in optimizer.param_groups:
                    group["lr"] *= factor

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(lambda *_: _write(optimizer, kept.pop()))


def _write(optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)

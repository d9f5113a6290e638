"""What trains in a handover: its parameters by name and kind, and the rates that its phases give them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim.optimizer import Optimizer

from segue.core.shortening import finished_name
from segue.errors import HandoverError
from segue.phases import SCHEDULED, Kind, set_rates

if TYPE_CHECKING:
    from segue.core.handover import Handover


def trained_parameters(handover: Handover) -> Iterator[tuple[str, nn.Parameter, Kind]]:
    """Yield what trains: its name in the finished model, the parameter, and its kind."""
    sites = handover.sites
    places = {f"{name}.student.": site for site in sites for name in site.names}
    found = False
    for name, parameter in handover.model.named_parameters():
        if parameter.requires_grad:  # which teachers, and a frozen backbone, do not
            found = True
            place = next((place for place in places if name.startswith(place)), None)
            if place is None:
                yield finished_name(name, sites), parameter, "backbone"
                continue
            inner = name.removeprefix(place)
            kind: Kind = "copied" if inner in handover.copied[places[place].name] else "new"
            yield finished_name(place.removesuffix("student.") + inner, sites), parameter, kind
    if not found:
        raise HandoverError(
            "the handover has no parameters to train.",
            f"Its students ({type(next(iter(handover.seams.values())).student).__name__}) have none, "
            "and the model around them is frozen.",
            'let the model adapt: Plan(train="all").',
        )


def schedule_rates(handover: Handover, optimizer: Optimizer) -> None:
    """Let every step of an optimizer have the rates and weight decay of its phase, and what it had before afterwards."""
    kept: list[list[dict[str, Any]]] = []  # a step inside another one's closure has its own

    def before(*_: Any) -> None:
        kept.append([{name: group[name] for name in SCHEDULED if name in group} for group in optimizer.param_groups])
        if handover.is_running and handover.total_steps is not None:
            set_rates(optimizer, None, handover.plan.phases, handover.steps_done, handover.total_steps)

    def after(*_: Any) -> None:
        for group, own in zip(optimizer.param_groups, kept.pop(), strict=True):
            group.update(own)

    if handover.plan.phases:
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

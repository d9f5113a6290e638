"""What trains in a handover: its parameters by name and kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from segue.core.shortening import finished_name
from segue.errors import HandoverError
from segue.phases import Kind

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


def summary(handover: Handover) -> str:
    """Say how many parameters train, of which kinds, and what the teachers add until the end."""
    trained = Counter[str]()
    for _, parameter, kind in trained_parameters(handover):
        trained[kind] += parameter.numel()
    teachers = {id(p): p for seam in handover.seams.values() if seam.teacher is not None for p in seam.teacher.parameters()}
    rest = sum(p.numel() for p in handover.model.parameters() if id(p) not in teachers)  # the finished model
    total, kinds = sum(trained.values()), ", ".join(f"{kind} {count:,}" for kind, count in sorted(trained.items()))
    frozen = sum(p.numel() for p in teachers.values())
    return f"trainable: {total:,} of {rest:,} parameters ({total / rest:.1%}; {kinds}); teachers beside them: {frozen:,}"

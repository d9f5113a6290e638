"""The search for the one hidden layer of a module, and the error that says why there is none."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from segue.errors import StudentError
from segue.sites import Site
from segue.students.hidden_layer.calls import changes_when_doubled, lacks_activation, own_calls, randomised
from segue.students.hidden_layer.proposals import complete, parts, stacked
from segue.students.hidden_layer.units import Hidden, is_map, matrix


class Search(NamedTuple):
    """What was found in a module: a hidden layer, or why there is none."""

    hidden: Hidden | None
    reason: str = ""
    inside: tuple[str, ...] = ()  # the modules inside it that are MLPs


def hidden_layer(teacher: nn.Module, site: Site, student: str) -> Hidden:
    """Find the hidden layer of an MLP, or raise an error that says why there is none.

    Shapes propose which layers enter and leave it. Doubling every hidden unit verifies it: with random weights, the module
    must return the same as before when it is called as such modules are.
    """
    found = search(teacher)
    if found.hidden is not None:
        return found.hidden
    maps = {name: matrix(part).weight.shape for name, part in teacher.named_modules() if is_map(part)}
    listed = ", ".join(f"{name or 'itself'} {into} -> {out}" for name, (out, into) in list(maps.items())[:6])
    if found.inside:
        hint = f"choose the MLP inside it: {' or '.join(repr(f'{site.name}.{name}') for name in found.inside)}."
    elif len(maps) == 1:
        hint = (
            "an MLP may be split over two modules, such as BERT's `intermediate` and `output` or OPT's `fc1` and `fc2`: "
            "choose the layer that contains both, or use LowRankMlp(rank=...) on either."
        )
    elif maps:
        hint = (
            "LowRankMlp(rank=...) takes any module with linear layers; or write your own student: fn(teacher, site) -> module."
        )
    else:
        hint = "choose modules with two linear layers; or write your own student: fn(teacher, site) -> module."
    raise StudentError(
        f"{student} cannot replace the module at site {site.name!r}.",
        f"It is {type(teacher).__name__}, in which no hidden layer is found; its linear layers are {listed or 'none'}"
        f"{'; ' + found.reason if found.reason else ''}.",
        f"{hint} Nothing was changed.",
    )


def search(module: nn.Module) -> Search:
    """Look for the one hidden layer of a module."""
    maps = [name for name, part in module.named_modules() if is_map(part)]
    whole = list(stacked(module))
    if (len(maps) > 3 or (whole and len(maps) > 1)) and (inside := _inside(module)):
        return Search(None, "it contains MLPs that are modules of their own", inside)
    if not whole and len(maps) in (2, 3):
        whole = list(complete(module, maps))
    some = list(parts(module, maps)) if len(maps) > 2 else []
    if not whole and not some:
        return Search(None)
    probe = randomised(module)
    calls = own_calls(probe, (whole or some)[0])
    if isinstance(calls, str):
        return Search(None, calls, () if len(maps) > 3 else _inside(module))
    reasons = []
    for hidden in whole:
        if not (reason := changes_when_doubled(probe, hidden, calls)):
            return Search(hidden)
        reasons.append(reason)
    verified = []
    for hidden in some:
        if reason := changes_when_doubled(probe, hidden, calls) or lacks_activation(probe, hidden, calls):
            reasons.append(reason)
        else:
            verified.append(hidden)
    if len(verified) == 1:
        return Search(verified[0])
    if verified:
        return Search(None, f"it has {len(verified)} hidden layers: {', '.join(map(str, verified[:3]))}")
    return Search(None, reasons[0], () if len(maps) > 3 else _inside(module))


def _inside(module: nn.Module) -> tuple[str, ...]:
    """Return the names of up to three modules inside this one that are MLPs."""
    found: list[str] = []
    for name, part in module.named_modules():
        nested = any(name.startswith(f"{outer}.") for outer in found)
        if name and not nested and search(part).hidden is not None:
            found.append(name)
            if len(found) == 3:
                break
    return tuple(found)

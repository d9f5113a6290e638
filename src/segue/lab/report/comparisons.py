"""Comparisons: which methods differ, with a reference named beforehand or one whose choice is adjusted for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any, Literal

from segue import methods as published
from segue.errors import ConfigError, nearest
from segue.reporting.statistics import ALPHA, Difference, Ranks, average_ranks, holm_selected, paired_difference

if TYPE_CHECKING:
    from segue.lab.report.summary import Group, Method

Measure = Literal["final", "area"]
MEASURES: tuple[Measure, ...] = ("final", "area")
Standing = Literal["best", "like the best", "worse", "unknown"]
OURS = ("dcr", "adaptive", "local_fit", "transfer")  # what most names of Segue's own methods and their variants have
Key = tuple[str, frozenset[str]]  # a group and two of its methods


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One method against the reference of its group, seed by seed."""

    group: str
    measure: Measure
    method: str
    label: str
    reference: str
    reference_label: str
    difference: Difference
    holm: float | None  # the p-value, adjusted for all comparisons of this measure that could have been made
    family: int  # the number of these


def is_dcr(method: str) -> bool:
    """Whether a method is DCR or a variant of it."""
    return "dcr" in method.lower()


def is_ours(method: Method) -> bool:
    """Whether a method is Segue's own, by its name or its plan: then it is no baseline. The rest are the other methods."""
    if any(part in method.method.lower() for part in OURS):
        return True
    return method.method not in published.names() and any(_has_own_plan(run.run_info.config.get("plan")) for run in method.runs)


def _has_own_plan(plan: Any) -> bool:
    """Whether a saved plan does what only Segue's methods do: many local updates of a batch, or a blend that moves by degrees.

    >>> _has_own_plan({"phases": [{"local": True, "split": 4}]}), _has_own_plan({"phases": [{"local": True}]})
    (True, False)
    """
    if not isinstance(plan, dict):
        return False
    phases = plan.get("phases") or [plan]
    if any(phase.get("local") and max(phase.get("split", 1), phase.get("reuse", 1)) > 1 for phase in phases):
        return True
    blends = (plan.get("gate") or {}).get("kind") == "gates.Blend"
    return blends and any(_is_gradual(phase.get("schedule") or {}) for phase in phases)


def _is_gradual(schedule: dict[str, Any]) -> bool:
    """Whether a saved schedule moves alpha by degrees, neither staying where it is nor only jumping."""
    if schedule.get("kind") == "schedules.Piecewise":
        return any(now[0] < later[0] and now[1] != later[1] for now, later in pairwise(schedule["points"]))
    return schedule.get("kind") not in (None, "schedules.Constant")


def are_rivals(leader: Method, method: Method) -> bool:
    """Whether a method is named beside the leader: beside DCR one that is not Segue's own, beside any other one of DCR's."""
    return not is_ours(method) if is_dcr(leader.method) else is_dcr(method.method)


def best(methods: Sequence[Method], measure: Measure) -> Method | None:
    """Select the method with the best mean; methods with a value for every seed precede the others."""
    known = [(found, method) for method in methods if (found := method.of(measure)) is not None]
    return max(known, key=lambda pair: (pair[0].complete, pair[0].mean))[1] if known else None


def paired(a: Method, b: Method, measure: Measure) -> Difference | None:
    """Compare two methods over the seeds that both have."""
    common = [seed for seed in a.seeds if seed in b.by_seed[measure]]
    return paired_difference([(a.by_seed[measure][seed], b.by_seed[measure][seed]) for seed in common])


def check_reference(reference: str | None, groups: Sequence[Group]) -> None:
    """Refuse a reference that no group has."""
    names = list(dict.fromkeys(method.method for group in groups for method in group.methods))
    if reference is not None and reference not in names:
        raise ConfigError(
            f"no run has the method {reference!r}, the reference.",
            nearest(reference, names),
            "name one of the methods of these runs, or none: then it is the best other method, and its choice is adjusted for.",
        )


def compare(groups: Sequence[Group], reference: str | None) -> list[Comparison]:
    """Compare every method with the reference of its group: the named one, or the best other method, none of Segue's own.

    It is chosen by the scores that it is then tested on. So the p-values are adjusted for the comparisons with every method
    that could have come out best; with a named reference there is one comparison per method.
    """
    return [found for measure in MEASURES for found in _compare(groups, measure, reference)]


def _compare(groups: Sequence[Group], measure: Measure, reference: str | None) -> list[Comparison]:
    p_values: dict[Key, float | None] = {}
    shown: dict[Key, tuple[Group, Method, Method, Difference]] = {}
    for group in groups:
        candidates = [m for m in group.methods if (not is_ours(m) if reference is None else m.method == reference)]
        chosen = best(candidates, measure)
        for candidate in candidates:
            for method in group.methods:
                difference = None if method is candidate else paired(method, candidate, measure)
                if difference is None:
                    continue
                key = (group.name, frozenset((method.method, candidate.method)))
                p_values[key] = difference.p
                if candidate is chosen:
                    shown[key] = (group, method, candidate, difference)
    family = sum(p is not None for p in p_values.values())
    return [
        Comparison(
            group=group.name,
            measure=measure,
            method=method.method,
            label=method.label,
            reference=chosen.method,
            reference_label=chosen.label,
            difference=difference,
            holm=adjusted,
            family=family,
        )
        for (group, method, chosen, difference), adjusted in zip(
            shown.values(), holm_selected(p_values, list(shown)), strict=True
        )
    ]


def standings(methods: Sequence[Method], measure: Measure) -> dict[str, Standing]:
    """Compare every method of a group with its best; the tests are adjusted for all pairs, since the data chose the best."""
    leader = best(methods, measure)
    if leader is None or sum(len(method.seeds) > 1 for method in methods) < 2:  # nothing to compare with
        return {method.method: "unknown" for method in methods}
    pairs = {frozenset((a.method, b.method)): paired(a, b, measure) for a, b in combinations(methods, 2)}
    others = [method.method for method in methods if method is not leader]
    shown = [frozenset((name, leader.method)) for name in others]
    adjusted = holm_selected({key: None if found is None else found.p for key, found in pairs.items()}, shown)
    found: dict[str, Standing] = {leader.method: "best"}
    for name, key, p in zip(others, shown, adjusted, strict=True):
        difference = pairs[key]
        if difference is None or difference.untested or p is None:
            found[name] = "unknown"
        else:
            found[name] = "worse" if p < ALPHA else "like the best"
    return found


def rank(groups: Sequence[Group]) -> Ranks | None:
    """Rank the methods that every group has by their final means; None where there are too few methods or groups."""
    finals = {
        method.method: [own.final.mean for group in groups if (own := group.method(method.method)) and own.final]
        for group in groups
        for method in group.methods
    }
    return average_ranks({name: means for name, means in finals.items() if len(means) == len(groups)}) if groups else None

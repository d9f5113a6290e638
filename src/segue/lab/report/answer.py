"""The answer of a report, in three sentences: what was compared, how it ended, and what it took."""

from __future__ import annotations

from typing import TYPE_CHECKING

from segue.lab.report.comparisons import are_rivals, best, is_dcr
from segue.lab.report.curves import handover_points
from segue.lab.report.findings import best_in_groups
from segue.reporting.formatting import FALLING, counted, flops, shortened
from segue.reporting.statistics import FEWEST

if TYPE_CHECKING:
    from segue.lab.report.summary import Group, Held, Method, Summary


def answer(summary: Summary) -> list[str]:
    """Answer in three sentences."""
    if not summary.groups:
        return []
    if len(summary.groups) > 1:
        return [_compared(summary), best_in_groups(summary), _unbroken_everywhere(summary)]
    (group,) = summary.groups
    return [_compared(summary), _ended(group, summary), _took(group, summary)]


def _compared(summary: Summary) -> str:
    groups = summary.groups
    sites = sorted({len(group.sites) for group in groups})
    steps = sorted({run.train_info.total_steps for group in groups for method in group.methods for run in method.runs})
    seeds = sorted({len(method.seeds) for group in groups for method in group.methods})
    places = f" in {len(groups)} settings" if len(groups) > 1 else ""
    methods = f"{counted(len(summary.methods), 'method')} {'replaces' if len(summary.methods) == 1 else 'replace'}"
    each = "one seed" if seeds == [1] else f"{_span(seeds)} seeds"
    each += " each" if len(summary.methods) > 1 else ""
    return (
        f"{methods} {_span(sites)} module{'' if sites == [1] else 's'} of a trained model{places}, "
        f"in {_span(steps)} step{'' if steps == [1] else 's'} with {each}."
    )


def _span(values: list[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def _ended(group: Group, summary: Summary) -> str:
    write, leader = summary.score_format, best(group.methods, "final")
    if leader is None or leader.final is None:
        return f"No run ended with a finite {group.score}."
    teacher = f" (the teacher: {write.value(group.teacher)})" if group.teacher is not None else ""
    name, ends = shortened(leader.label), f"at {write.estimate(leader.final)} {group.score}{teacher}"
    if len(group.methods) == 1:
        return f"Alone, the students of {name} end {ends}."
    if group.one_seed:
        return f"{name} ends highest, {ends}, but with one seed any difference may be chance."
    other = best([one for one in group.methods if are_rivals(leader, one)], "final")
    kind = "other method" if is_dcr(leader.method) else "DCR variant"
    second = "" if other is None else f"; the best {kind}, {shortened(other.label)}, at {write.estimate(other.final)}"
    return f"Alone, the students of {name} end highest, {ends}{second}; {_tested(group, leader)}."


def _tested(group: Group, leader: Method) -> str:
    others = [method for method in group.methods if method is not leader]
    alike = [method for method in others if method.standing["final"] == "like the best"]
    unknown = [method for method in others if method.standing["final"] == "unknown"]
    if len(unknown) == len(others):
        return f"with fewer than {FEWEST} common seeds that differ nothing is called significant"
    if not alike and not unknown:
        return f"all {len(others)} others are significantly lower" if len(others) > 1 else "the other is significantly lower"
    lower = len(others) - len(alike) - len(unknown)
    text = f"{len(alike)} of the {len(others)} others cannot be told from it, {lower} are significantly lower"
    return text if not unknown else f"{text}, {len(unknown)} cannot be tested"


def _took(group: Group, summary: Summary) -> str:
    parts = []
    reached = _first_to(group)
    if reached is not None:
        method, held, spent = reached
        first = "is held first with" if len(group.methods) > 1 else "is held with"
        parts.append(
            f"{100 * held.fraction:.0f} % of the teacher's {group.score} {first} {shortened(method.label)}, after {spent}"
        )
    elif any(held.defined for method in group.methods for held in method.held):
        seeds = "" if group.one_seed else " in more than half of its seeds"
        holds = "no method holds" if len(group.methods) > 1 else "the method does not hold"
        parts.append(f"{holds} 90 % of the teacher's {group.score} to the end{seeds}")
    parts += _unbroken(group, summary)
    text = "; ".join(parts) or "every method trains its students without teachers beside them"
    return f"{text[0].upper()}{text[1:]}."


def _first_to(group: Group) -> tuple[Method, Held, str] | None:
    """Find the highest fraction of the teacher's score that a method holds, and the one that needs least work for it."""
    for index in reversed(range(len(group.methods[0].held))):
        found = [
            (held.flops.median, method, held)
            for method in group.methods
            if (held := method.held[index]).defined and held.flops is not None and held.flops.median is not None
        ]
        if found:
            work, method, held = min(found, key=lambda one: one[0])
            return method, held, flops(work) + (" (median)" if len(method.seeds) > 1 else "")
    return None


def _unbroken(group: Group, summary: Summary) -> list[str]:
    """Say how far from the teacher the blend came on the way, of the best method or else of the one that kept it closest."""
    worst = {method.label: low for method in group.methods if (low := worst_blend(method, group.score)) is not None}
    if not worst:
        return []
    falls = group.score in FALLING
    closest, leader = (min if falls else max)(worst, key=lambda name: worst[name]), best(group.methods, "final")
    label = leader.label if leader is not None and leader.label in worst else closest
    of = f" of {shortened(label)}" if len(group.methods) > 1 else ""
    way = "rises above" if falls else "falls below"
    return [f"while teachers are part of it, the blend{of} never {way} {summary.score_format.value(worst[label])}"]


def _unbroken_everywhere(summary: Summary) -> str:
    lows = {
        label: low
        for group in summary.groups
        for method in group.methods
        if (low := worst_blend(method, group.score)) is not None
        for label in [f"{shortened(method.label)} in {shortened(group.name)}"]
    }
    if not lows:
        return "Every method trains its students without teachers beside them."
    kept, broken = max(lows, key=lambda name: lows[name]), min(lows, key=lambda name: lows[name])
    write = summary.score_format.value
    return (
        f"While teachers are part of the blend, its {summary.groups[0].score} stays highest with {kept} "
        f"(never below {write(lows[kept])}) and falls deepest with {broken} ({write(lows[broken])})."
    )


def worst_blend(method: Method, score: str) -> float | None:
    """Return the worst score of the blend, mean over seeds, at the evaluations of the handover; None without a handover."""
    steps = {float(point.step) for run in method.runs for point in handover_points(run) if point.alpha > 0}
    known = zip(method.line.step, method.line.overall["blend"].mean, strict=True)
    return (max if score in FALLING else min)(
        (value for step, value in known if step in steps and value is not None), default=None
    )

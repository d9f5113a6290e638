"""Findings: what the numbers show, as sentences that say what is significant and what is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from segue.lab.report.comparisons import are_rivals, best, is_dcr
from segue.lab.report.curves import finite
from segue.reporting.formatting import ScoreFormat, counted, duration, flops, listed, p_value, shortened, significant
from segue.reporting.statistics import ALPHA, FEWEST

if TYPE_CHECKING:
    from segue.lab.report.comparisons import Comparison, Measure
    from segue.lab.report.curves import Curve
    from segue.lab.report.summary import Group, Method, Summary
    from segue.reporting.records import Result
    from segue.reporting.statistics import TimeTo

MEASURE_NAMES: dict[Measure, str] = {"final": "final {score}", "area": "mean {score} over the run"}


def measure_name(measure: Measure, score: str) -> str:
    """Return the name of a measure in text."""
    return MEASURE_NAMES[measure].format(score=score)


def overview(summary: Summary) -> list[str]:
    """Say what all groups together show."""
    found = [comparison for group in summary.groups for comparison in group.comparisons]
    if not found:
        return ["Nothing is compared: that takes two methods in a group, one of which is not DCR."]
    found_all = []
    if len(summary.groups) > 1:
        found_all += [best_in_groups(summary), *_ranked(summary)]
    if not summary.comparisons:
        single = all(c.difference.pairs < 2 for c in found)
        why = "With one seed per method" if single else f"Without {FEWEST} common seeds that differ"
        return [*found_all, f"{why} nothing is significant: any difference may be chance."]
    which = "the best other method of the group" if summary.reference is None else _named_reference(summary)
    for measure in MEASURE_NAMES:
        family = [c for c in found if c.measure == measure and c.holm is not None]
        if not family:
            continue
        name = measure_name(measure, summary.groups[0].score)
        head = f"{name[0].upper()}{name[1:]}: {counted(len(family), 'comparison')} with {which}"
        if all(c.difference.untested for c in family):
            found_all.append(f"{head}; none can be called significant with fewer than {FEWEST} seeds.")
            continue
        alone = [c for c in family if significant_alone(c)]
        adjusted = [c for c in family if significant_adjusted(c)]
        choices = f" for the {family[0].family} that could have been chosen" if family[0].family > len(family) else ""
        found_all.append(
            f"{head}; {len(alone) or 'none'} significant at 5 % on its own, "
            f"{len(adjusted) or 'none'} after Holm's adjustment{choices}"
            + (f" ({_joined([_where(c, summary) for c in adjusted])})." if adjusted else ".")
        )
    return found_all


def of_group(group: Group, score_format: ScoreFormat) -> list[str]:
    """Say what the runs of one group show."""
    found = [_leader(group, score_format)]
    for measure in MEASURE_NAMES if not group.one_seed else ():
        found += _against_reference(group, measure, score_format)
    found += [*_speed(group), *_mechanisms(group)]
    return [sentence for sentence in found if sentence]


def notes(by_method: Mapping[str, Sequence[Result]], methods: Sequence[Method]) -> list[str]:
    """Say what limits the numbers of a group."""
    runs = [run for of_method in by_method.values() for run in of_method]
    found = []
    single = [method.label for method in methods if len(method.seeds) < 2]
    if len(single) == len(methods):
        found.append("One seed per method: there are no intervals.")
    elif single:
        found.append(f"One seed and so no interval: {listed(single)}.")
    few = [method.label for method in methods if 1 < len(method.seeds) < FEWEST]
    if few:
        whose = "" if len(few) == len(methods) else f" ({listed(few)})"
        found.append(f"Fewer than {FEWEST} seeds{whose}: differences are described, none is called significant.")
    for method in methods:
        lost = [
            run.run_info.seed
            for run in by_method[method.method]
            if finite(run.train_info.final.get(run.train_info.score)) is None
        ]
        if lost:
            found.append(
                f"{shortened(method.label)}: {len(lost)} of {counted(len(method.seeds), 'seed')} ended without a finite score "
                "(diverged or not measured); the means are over the others."
            )
        skipped = sum(run.train_info.skipped_steps for run in by_method[method.method])
        restores = len(method.line.restores)
        if restores:
            found.append(
                f"{shortened(method.label)}: the guard has restored a good state {counted(restores, 'time')} over all seeds "
                "(ticks at the bottom of the curves)."
            )
        elif skipped:
            found.append(f"{shortened(method.label)}: {counted(skipped, 'step')} skipped over all seeds.")
    if len({frozenset(method.seeds) for method in methods}) > 1:
        found.append("The methods have different seeds; differences are over those that both have.")
    budgets = sorted({run.train_info.total_steps for run in runs})
    if len(budgets) > 1:
        found.append(f"The numbers of steps differ: {listed([str(budget) for budget in budgets])}.")
    different = [method.label for method in methods if method.line.interpolated]
    if different:
        found.append(f"Seeds are evaluated at different steps, and their curves interpolated: {listed(different)}.")
    return found + _teacher_notes(runs)


def _teacher_notes(runs: Sequence[Result]) -> list[str]:
    scores = sorted({run.train_info.score for run in runs})
    found = [f"The runs have different scores: {listed(scores)}."] if len(scores) > 1 else []
    teachers = [finite(run.train_info.teacher_eval.get(run.train_info.score)) for run in runs]
    if any(teacher is None for teacher in teachers):
        return [*found, "The teacher's score is missing in some runs: percentages of it are undefined there."]
    if any(teacher is not None and teacher <= 0 for teacher in teachers):
        return [*found, "The teacher's score is not above zero: percentages of it are undefined."]
    if len(set(teachers)) > 1:
        found.append("The teacher differs between runs; each run is compared with its own, the figures show the mean.")
    return found


def significant_alone(comparison: Comparison) -> bool:
    """Whether a difference is significant at 5 % on its own."""
    p = comparison.difference.p
    return not comparison.difference.untested and p is not None and p < ALPHA


def significant_adjusted(comparison: Comparison) -> bool:
    """Whether a difference is significant at 5 % among all that were tested."""
    return not comparison.difference.untested and comparison.holm is not None and comparison.holm < ALPHA


def verdict(comparison: Comparison) -> str:
    """Say whether a difference is significant."""
    if comparison.difference.untested:
        return comparison.difference.untested
    way = "better" if comparison.difference.mean > 0 else "worse"
    if significant_adjusted(comparison):
        return f"significantly {way}"
    if significant_alone(comparison):
        return f"{way} on its own, not significant after adjustment"
    return "not significant"


def best_in_groups(summary: Summary) -> str:
    """Say which method ends highest in which groups."""
    wins: dict[str, list[str]] = {}
    for group in summary.groups:
        for method in group.methods:
            if method is best(group.methods, "final"):
                wins.setdefault(method.label, []).append(group.name)
    parts = [f"{shortened(label)} in {listed(names)}" for label, names in wins.items()]
    chance = ", but with one seed any difference may be chance" if all(group.one_seed for group in summary.groups) else ""
    return f"Best final {summary.groups[0].score} by its mean: {'; '.join(parts)}{chance}." if parts else ""


def _ranked(summary: Summary) -> list[str]:
    ranks, labels = summary.ranks, dict(summary.methods)
    if ranks is None:
        return []
    order = listed([f"{shortened(labels[name])} {value:.1f}" for name, value in ranks.average.items()])
    pairs = [f"{shortened(labels[a])} from {shortened(labels[b])}" for a, b in ranks.apart()]
    apart = f"apart are {_joined(pairs)}" if pairs else "no two methods are that far apart"
    return [
        f"Average rank by final {summary.groups[0].score} over {counted(ranks.settings, 'group')}, 1 is best: {order}. "
        f"Critical difference {ranks.critical_difference:.1f} (Nemenyi, 5 %): {apart}. Friedman's p {_is(ranks.friedman)}."
    ]


def _named_reference(summary: Summary) -> str:
    label = dict(summary.methods)[summary.reference or ""]
    return f"{shortened(label)}, the reference"


def _where(comparison: Comparison, summary: Summary) -> str:
    way = "above" if comparison.difference.mean > 0 else "below"
    place = f" in {shortened(comparison.group)}" if len(summary.groups) > 1 else ""
    return f"{shortened(comparison.label)} {way}{place}"


def _leader(group: Group, score_format: ScoreFormat) -> str:
    alone = group.methods[0] if len(group.methods) == 1 else None
    leader = best(group.methods, "final")
    if leader is None or leader.final is None:
        return f"No run of this group ended with a finite {group.score}."
    teacher = f"The teacher has {score_format.value(group.teacher)}. " if group.teacher is not None else ""
    alike = [method.label for method in group.methods if method.standing["final"] == "like the best"]
    unknown = alone is None and any(method.standing["final"] == "unknown" for method in group.methods)
    rest = f"; not distinguishable from it: {listed(alike)}" if alike else ""
    if group.one_seed and alone is None:
        rest = "; with one seed any difference may be chance"
    elif unknown and not alike:
        rest = f"; whether the others are lower cannot be tested: that takes {FEWEST} common seeds with different values"
    reached = f"{score_format.estimate(leader.final)}, by {shortened(leader.label)}{rest}"
    which = "mean" if alone else "best mean"
    return f"{teacher}The {which} {group.score} of the students alone at the end is {reached}."


def _against_reference(group: Group, measure: Measure, score_format: ScoreFormat) -> list[str]:
    found = [comparison for comparison in group.comparisons if comparison.measure == measure]
    if not found:
        return []
    name = measure_name(measure, group.score)
    reference = _named(group, found[0].reference, measure, score_format)
    head = f"{name[0].upper()}{name[1:]} against the reference, {reference}"
    by_verdict: dict[str, list[Comparison]] = {}
    for comparison in sorted(found, key=lambda c: (c.difference.p is None, c.difference.p or 0.0)):
        by_verdict.setdefault(verdict(comparison), []).append(comparison)
    parts = [f"{text}: {_joined([_described(c, score_format) for c in alike])}" for text, alike in by_verdict.items()]
    return [f"{head}. {'. '.join(part[0].upper() + part[1:] for part in parts)}."]


def _joined(parts: list[str]) -> str:
    shown = parts if len(parts) <= 10 else [*parts[:10], f"{len(parts) - 10} more"]
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]


def _named(group: Group, name: str, measure: Measure, score_format: ScoreFormat) -> str:
    method = group.method(name)
    assert method is not None
    return f"{shortened(method.label)} ({score_format.estimate(method.of(measure))})"


def _described(comparison: Comparison, score_format: ScoreFormat) -> str:
    """Name a method and its difference, for DCR with its interval; the table has those of the others."""
    difference = comparison.difference
    if is_dcr(comparison.method) and difference.half is not None:
        low, high = (score_format.change(difference.mean + side * difference.half, unit=False) for side in (-1, 1))
        adjusted = "" if comparison.holm is None else f", adjusted {p_value(comparison.holm)}"
        numbers = f"{score_format.change(difference.mean)}, {low} to {high}, p {_is(difference.p or 0.0)}{adjusted}"
        return f"{shortened(comparison.label)} ({numbers})"
    return f"{shortened(comparison.label)} ({score_format.change(difference.mean)})"


def _is(p: float) -> str:
    return p_value(p) if p < 0.001 else f"= {p_value(p)}"


def _speed(group: Group) -> list[str]:
    found = []
    for index in range(len(group.methods[0].held)):
        reached = [(method, method.held[index]) for method in group.methods if _known(method.held[index].epochs)]
        share = f"{100 * group.methods[0].held[index].fraction:.0f} % of the teacher's {group.score}"
        if not any(method.held[index].defined for method in group.methods):
            return []
        if not reached:
            seeds = "" if group.one_seed else " in more than half of its seeds"
            reaches = "No method reaches and keeps" if len(group.methods) > 1 else "The method does not reach and keep"
            found.append(f"{reaches} {share}{seeds}.")
            break
        by_epochs = min(reached, key=lambda pair: _median(pair[1].epochs))
        by_seconds = min(reached, key=lambda pair: _median(pair[1].seconds))
        first = "first " if len(group.methods) > 1 else ""
        epochs, seconds, work = by_epochs[1].epochs, by_epochs[1].seconds, by_epochs[1].flops
        text = f"{share} is reached {first}by {shortened(by_epochs[0].label)}: after {significant(_median(epochs))} epochs"
        text += f" ({duration(_median(seconds))}, {flops(_median(work))}{'' if group.one_seed else '; medians'})"
        if by_seconds[0] is not by_epochs[0]:
            text += f"; in time first by {shortened(by_seconds[0].label)}, after {duration(_median(by_seconds[1].seconds))}"
        others = [(m, h) for m, h in reached if are_rivals(by_epochs[0], m)]
        if others:
            second = min(others, key=lambda pair: _median(pair[1].epochs))
            kind = "other method" if is_dcr(by_epochs[0].method) else "DCR variant"
            text += f"; the first {kind} is {shortened(second[0].label)}, after {significant(_median(second[1].epochs))} epochs"
        missing = [
            f"{shortened(method.label)} ({held.held} of {held.seeds})"
            for method in group.methods
            if (held := method.held[index]).held < held.seeds
        ]
        found.append(f"{text}." + (f" Not in every seed: {_joined(missing)}." if missing else ""))
    return found


def _mechanisms(group: Group) -> list[str]:
    kinds: list[tuple[str, Callable[[Method], Curve]]] = [
        ("the students' mean gradient norm", lambda method: method.early_gradient),
        ("the drift of the residual stream of the blend", lambda method: method.early_drift),
    ]
    found = []
    for name, read in kinds:
        known = [
            (shortened(method.label), sum(values) / len(values))
            for method in group.methods
            if (values := [mean for mean in read(method).mean if mean is not None])
        ]
        if len(known) > 1:
            low, high = min(known, key=lambda pair: pair[1]), max(known, key=lambda pair: pair[1])
            found.append(
                f"In the first fifth of the training, {name}, over all sites, is smallest with {low[0]} "
                f"({significant(low[1])}) and largest with {high[0]} ({significant(high[1])})."
            )
    return found


def _known(found: TimeTo | None) -> bool:
    return found is not None and found.median is not None


def _median(found: TimeTo | None) -> float:
    assert found is not None
    assert found.median is not None
    return found.median

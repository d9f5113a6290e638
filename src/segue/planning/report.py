"""The report of a plan: tables that a stranger understands, as rows for the terminal and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from segue.planning.candidates import KEEP, Option
from segue.planning.planned import Choice, Planned
from segue.reporting.formatting import counted, duration, flops, memory, significant
from segue.schedules import PerSite, Piecewise

NAMES = {
    "flops": "FLOPs",
    "parameters": "weights",
    "cache_bytes": "cache",
    "prefill": "prefill",
    "decode": "decode",
    "train": "train",
}
STRONG = 5  # pairs that are listed

Table = tuple[str, list[str], list[list[str]]]  # title, headings, rows


def tables(found: Planned) -> list[Table]:
    """Return the tables of a plan: its sites, the frontier, the options and the strongest pairs."""
    return [_sites(found), _frontier(found), _options(found), _costs(found), *_pairs(found)]


def sentences(found: Planned) -> list[str]:
    """Return what the numbers mean, in a few sentences."""
    choice, prediction = found.choice, found.prediction
    low, high = choice.interval
    within = f" ({significant(low)} to {significant(high)} in nine cases of ten)" if math.isfinite(high) else ""
    saved = ", ".join(f"{NAMES[name]} {value:.1%}" for name, value in choice.saved.items())
    sure = (
        f"Predicted from {prediction.measured} measured subsets; on held-out ones R2 is {prediction.r2:.2f}."
        if prediction.r2 is not None
        else f"Predicted from {counted(prediction.measured, 'measured subset')}: too few for an interval."
    )
    return [
        f"Replaced: {len(choice.subset)} of {len(found.sites)} sites. Before training the KL to the original is "
        f"{significant(choice.kl)}{within}, and "
        f"{choice.differing:.1%} of the first choices differ.",
        f"Saved of the complete model ({found.costs.shape}; below 0 it costs more): {saved}.",
        sure,
        *([f"Another choice may be better by at most {significant(choice.gap)}."] if choice.gap > 0 else []),
        *_phases(found),
        f"Planning took {found.spent['inputs']:,.0f} inputs, {flops(found.spent['flops'])} and "
        f"{duration(found.spent['seconds'])}.",
        *_refusals(found),
        *found.notes,
    ]


def _phases(found: Planned) -> list[str]:
    """Say how a plan without turns and ramps trains, and which one has them."""
    if found.plan == found.staggered:
        return []
    names = ", then ".join(phase.name for phase in found.plan.phases)
    return [f"plan.json trains all sites at once: {names}. Turns and ramps are those of staggered.json."]


def _refusals(found: Planned) -> list[str]:
    """Say once for each candidate where it does not fit, with the first reason."""
    lines = []
    for candidate in dict.fromkeys(name for _, name in found.refused):
        places = {site: why for (site, name), why in found.refused.items() if name == candidate}
        site, why = next(iter(places.items()))
        lines.append(f"{candidate} does not fit {counted(len(places), 'site')} ({site} first). {why}")
    return lines


def _sites(found: Planned) -> Table:
    turn = {option[0]: i for i, option in enumerate(found.order, start=1)}
    headings = ["site", "operator", "turn", "ramp", "KL alone", "KL added", NAMES[found.metric]]
    rows = []
    for site, name in found.operators().items():
        if name == KEEP:
            rows.append([site, KEEP, *[""] * (len(headings) - 2)])
            continue
        option = site, name
        damages = (found.prediction.of([option]), _added(found, option))
        saved = f"{found.costs.saved(option, found.metric):.1%}"
        ramp = _ramp(found.staggered.schedule, site)
        rows.append([site, name, str(turn[site]), ramp, *map(_short, damages), saved])
    return (
        "The plan: each site in its turn, its ramp in the course of the run, what it damages before training and saves",
        headings,
        rows,
    )


def _ramp(schedule: object, site: str) -> str:
    """Return when alpha falls at a site, as text; nothing for a schedule of the user's own."""
    own = schedule.schedules.get(site) if isinstance(schedule, PerSite) else None
    return f"{own.points[0][0]:.0%}-{own.points[-1][0]:.0%}" if isinstance(own, Piecewise) else ""


def _added(found: Planned, option: Option) -> float:
    """Return what an option adds to those before it."""
    before = found.order[: found.order.index(option)]
    return max(0.0, found.prediction.of([*before, option]) - found.prediction.of(before))


def _frontier(found: Planned) -> Table:
    metrics = list(found.costs.total)
    headings = ["sites", *(NAMES[name] for name in metrics), "KL", "at most", "differing"]
    rows = [[str(len(point.subset)), *_point(point, metrics)] for point in found.frontier]
    return "What can be saved of the model, and the least damage for it (at most: in nine cases of ten)", headings, rows


def _point(point: Choice, metrics: Sequence[str]) -> list[str]:
    saved = [f"{point.saved[name]:.1%}" for name in metrics]
    return [*saved, _short(point.kl), _short(point.interval[1]), f"{point.differing:.1%}"]


def _options(found: Planned) -> Table:
    options = set(found.prediction.options)

    def cell(option: Option) -> str:
        return f"{_short(found.prediction.of([option]))} ({found.errors[option]:.2f})" if option in options else "-"

    rows = [[site.name, *(cell((site.name, name)) for name in found.students)] for site in found.sites]
    return "Each candidate alone: KL (relative error of its output)", ["site", *found.students], rows


def _costs(found: Planned) -> Table:
    """Return what a site costs on average, with its original and with each candidate."""
    costs = found.costs
    rows = []
    for metric in costs.total:
        row = [NAMES[metric]]
        for name in found.students:
            options = [option for option in found.prediction.options if option[1] == name]
            before = sum(costs.teachers[site][metric] for site, _ in options) / len(options)
            after = sum(costs.students[option][metric] for option in options) / len(options)
            row.append(f"{_amount(metric, before)} -> {_amount(metric, after)}")
        rows.append(row)
    return f"Cost of a site, original -> candidate, mean over its sites ({costs.shape})", ["", *found.students], rows


def _pairs(found: Planned) -> list[Table]:
    options, pairs = found.prediction.options, found.prediction.pairs
    flat = [(abs(float(pairs[i, j])), i, j) for i in range(len(options)) for j in range(i + 1, len(options))]
    strong = sorted((each for each in flat if each[0] > 0), reverse=True)[:STRONG]
    rows = [[" ".join(options[i]), " ".join(options[j]), f"{float(pairs[i, j]):+.3g}"] for _, i, j in strong]
    return [("The strongest pairs: KL beyond the sum of both", ["first", "second", "KL"], rows)] if rows else []


def _short(value: float) -> str:
    """Format a number for a narrow column; an interval without an end has no number."""
    return f"{value:.2g}" if math.isfinite(value) else "?"


def _amount(metric: str, value: float) -> str:
    if metric == "flops":
        return flops(value)
    if metric == "parameters":
        return f"{value:,.0f}"
    return memory(value) if metric == "cache_bytes" else f"{1000 * value:.2f} ms"


def markdown(found: Planned) -> str:
    """Format tables and sentences."""
    parts = []
    for title, headings, rows in tables(found):
        lines = [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]
        parts.append("\n".join([f"**{title}**", "", *lines]))
    return "\n\n".join([*parts, "\n".join(f"- {sentence}" for sentence in sentences(found))])

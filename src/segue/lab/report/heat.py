"""Heat maps for papers: sites down, evaluations across, one map for each method on one scale of colours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from segue.lab.report.summary import Group
from segue.reporting.formatting import shortened, significant

WIDTH = 3.3  # inches: a column of a two-column paper
LEFT, RIGHT, BOTTOM, TOP, GAP, TITLE, BAR = 0.6, 0.08, 0.36, 0.04, 0.1, 0.15, 0.38
ROW, LEAST, MOST = 0.09, 0.4, 1.1  # height of a site, of the smallest map and of the largest
LETTERS = 9  # of a site's name
RATIO = 5  # of the largest value to the smallest from which colours follow the logarithm
# Of each quantity by site: its name, and whether colours may follow the logarithm
QUANTITIES = {
    "cosine": ("interface cosine", False),
    "relative_error": ("relative error of the student", True),
    "gradient_norm": ("gradient norm", True),
    "drift_blend": ("drift of the residual stream, blend", True),
}


class Map(NamedTuple):
    """What one method shows: a row for each site, a column for each step; NaN where nothing was measured."""

    label: str
    steps: list[float]
    rows: list[list[float]]


def heat_figures(group: Group, note: str) -> dict[str, Callable[[], Any]]:
    """Return what draws each heat map that the runs of a group have measured."""
    found = {quantity: maps(group, quantity) for quantity in QUANTITIES}
    return {f"heat_{name}": partial(_figure, group.sites, name, shown, note) for name, shown in found.items() if shown}


def maps(group: Group, quantity: str) -> list[Map]:
    """Collect the means over seeds of one quantity, of every method that measured it."""
    found = []
    for method in group.methods:
        curves = [method.line.by_site[quantity][site] for site in group.sites]
        if any(curve.known for curve in curves):
            rows = [[float("nan") if value is None else value for value in curve.mean] for curve in curves]
            found.append(Map(method.label, method.line.step, rows))
    return found


def _figure(sites: list[str], quantity: str, shown: list[Map], note: str) -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    name, may_be_log = QUANTITIES[quantity]
    columns = 2 if len(shown) > 1 else 1
    lines = -(-len(shown) // columns)
    tall = max(LEAST, min(MOST, ROW * len(sites)))
    wide = (WIDTH - LEFT - RIGHT - GAP * (columns - 1)) / columns
    height = TOP + lines * (TITLE + tall) + BOTTOM + BAR + 0.18
    figure = Figure(figsize=(WIDTH, height))
    norm = _norm(shown, log=may_be_log)
    for index, each in enumerate(shown):
        line, column = divmod(index, columns)
        bottom = height - TOP - (line + 1) * (TITLE + tall)
        axes = figure.add_axes(((LEFT + column * (wide + GAP)) / WIDTH, bottom / height, wide / WIDTH, tall / height))
        _fill(axes, each, sites, norm, names=column == 0, steps=index + columns >= len(shown))
    axes = figure.add_axes((LEFT / WIDTH, (BAR + 0.06) / height, (WIDTH - LEFT - RIGHT) / WIDTH, 0.07 / height))
    bar = figure.colorbar(ScalarMappable(norm), cax=axes, orientation="horizontal")
    scale = ", log scale" if type(norm).__name__ == "LogNorm" else ""
    bar.set_ticks([norm.vmin, norm.vmax], labels=[significant(norm.vmin), significant(norm.vmax)])
    lowest, highest = bar.ax.get_xticklabels()
    lowest.set_horizontalalignment("left")
    highest.set_horizontalalignment("right")
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, pad=2)
    bar.set_label(f"{name}{scale}", labelpad=-6)
    figure.text(0.02, 0.05 / height, note, color="#555555")
    return figure


def _fill(axes: Any, each: Map, sites: list[str], norm: Any, *, names: bool, steps: bool) -> None:
    axes.imshow(each.rows, aspect="auto", interpolation="nearest", norm=norm)
    axes.grid(visible=False)
    axes.set_facecolor("#eeeeee")  # not measured
    axes.set_title(shortened(each.label, 24), loc="left", pad=2, color="#333333")
    short, pattern = short_names(sites)
    every = max(1, -(-len(sites) // 6))
    places = range(0, len(sites), every)
    axes.set_yticks(places, [shortened(short[place], LETTERS) for place in places] if names else [])
    last = len(each.steps) - 1
    ticks = sorted({0, last // 2, last})
    axes.set_xticks(ticks, [f"{each.steps[tick]:g}" for tick in ticks] if steps else [])
    axes.set_xlabel("step" if steps else "")
    axes.set_ylabel(shortened(pattern, 26) if names else "")
    axes.tick_params(length=2, pad=2)


def short_names(names: list[str]) -> tuple[list[str], str]:
    """Return what differs between dotted names, and the pattern of the rest; the names themselves if nothing is shared.

    >>> short_names(["blocks.0.attn", "blocks.1.attn"])
    (['0', '1'], 'blocks.*.attn')
    """
    parts = [name.split(".") for name in names]
    least = min(map(len, parts))
    head = next((at for at in range(least - 1) if len({each[at] for each in parts}) > 1), least - 1)
    tail = next((at for at in range(least - 1 - head) if len({each[-1 - at] for each in parts}) > 1), least - 1 - head)
    if len(names) < 2 or head + tail == 0:
        return names, ""
    first = parts[0]
    pattern = ".".join([*first[:head], "*", *first[len(first) - tail :]])
    return [".".join(each[head : len(each) - tail]) for each in parts], pattern


def _norm(shown: list[Map], *, log: bool) -> Any:
    """Return one scale for all maps: from the smallest value to the largest, along the logarithm where that shows more."""
    from matplotlib.colors import LogNorm, Normalize

    known = [value for each in shown for row in each.rows for value in row if value == value]
    positive = [value for value in known if value > 0]
    if log and positive and max(positive) > RATIO * min(positive):
        return LogNorm(min(positive), max(positive), clip=True)
    low, high = min(known), max(known)
    return Normalize(low, high if high > low else low + 1)

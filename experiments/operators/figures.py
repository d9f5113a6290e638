"""Figures of operators for papers: what each recovers by which method, and how much faster it answers."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

from experiments.operators.comparison import Comparison
from experiments.operators.speed import Speed
from experiments.operators.text import leads, operator_styles
from segue.lab.report import figures
from segue.reporting.formatting import shortened, significant
from segue.reporting.palette import line_styles
from segue.reporting.statistics import Estimate

NAMES = 1.05  # inches for the names of operators
LINE, GAP = 0.085, 0.08  # inches per method, and between operators
PLOT = 2.3  # inches: height of the speed-ups
SOFT = "#555555"


def draw(compared: Comparison, speed: Speed | None, folder: Path) -> list[Path]:
    """Draw the figures as PNG and PDF; speed only where it was measured."""
    paths = figures.write(folder, "operators", lambda: recovered(compared)) if compared.seeds("recovered") else []
    if speed is not None and speed.timed:
        paths += figures.write(folder, "speed", lambda: speed_up(speed))
    return paths


def recovered(compared: Comparison) -> Any:
    """Draw one dot with its interval per operator and method."""
    from matplotlib.figure import Figure

    names = [name for name, _ in compared.methods]
    style_of = line_styles(names)
    block = LINE * len(names) + GAP
    columns = 2 if len(names) > 1 and all(len(label) <= 22 for _, label in compared.methods) else 1
    legend = figures.LEGEND_ROW * -(-len(names) // columns) + 0.16  # and the teacher's name
    found = [one for operator in compared.operators for one in operator.found["recovered"].values() if one is not None]
    left, right = _frame([100 * one.mean for one in found])
    notes = textwrap.wrap("; ".join(_notes(compared, found, left, right)), figures.NOTE_LETTERS)
    below = 0.36 + 0.03 + figures.NOTE_ROW * len(notes)
    height = figures.TOP + legend + block * len(compared.operators) + below
    figure = Figure(figsize=(figures.WIDTH, height))
    width = figures.WIDTH - NAMES - figures.RIGHT
    axes = figure.add_axes(
        (NAMES / figures.WIDTH, below / height, width / figures.WIDTH, block * len(compared.operators) / height)
    )
    for row, operator in enumerate(compared.operators):
        if row % 2:
            axes.axhspan(row * block, (row + 1) * block, color="#f4f5f7", linewidth=0, zorder=0)
        for place, name in enumerate(names):
            one, lead = operator.found["recovered"].get(name), operator.leads["recovered"]
            if one is None:
                continue
            y, style = row * block + GAP / 2 + LINE * (place + 0.5), style_of[name]
            if one.half is not None:
                axes.plot([100 * (one.mean - one.half), 100 * (one.mean + one.half)], [y, y], color=style.light, linewidth=0.8)
            axes.plot(100 * one.mean, y, style.marker, color=style.light, markeredgewidth=0, zorder=4)
            if leads(lead) and lead is not None and lead.best == name:
                axes.plot(
                    100 * one.mean, y, "o", markersize=6.5, fillstyle="none", color="#222222", markeredgewidth=0.8, zorder=5
                )
    axes.axvline(100, color="#222222", linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    axes.annotate("teacher ", (100, 1), xycoords=("data", "axes fraction"), ha="right", va="bottom", color="#222222")
    axes.set_xlim(left, right)
    axes.set_ylim(block * len(compared.operators), 0)
    places = [block * (row + 0.5) for row in range(len(compared.operators))]
    axes.set_yticks(places, [_two_lines(operator.name) for operator in compared.operators])
    axes.tick_params(axis="y", length=0, pad=4)
    axes.tick_params(axis="x", length=2, pad=2)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"share of the teacher's {shortened(compared.score, 20)} (%)")
    figures.legend(figure, {style_of[name]: label for name, label in compared.methods}, columns, 1 - figures.TOP / height)
    figure.text(0.02, 0.05 / height, "\n".join(notes), color=SOFT, linespacing=1.2)
    return figure


def speed_up(speed: Speed) -> Any:
    """Draw the speed-up against the number of tokens, each line named where it ends."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    longest_name = max(len(shortened(name, 18)) for name in speed.timed)
    aside = 0.12 + 0.06 * longest_name
    notes = textwrap.wrap(
        f"forward of one module, {speed.setting}; {speed.where}; bars: the middle half of the rounds", figures.NOTE_LETTERS
    )
    below = 0.36 + 0.03 + figures.NOTE_ROW * len(notes)
    height = figures.TOP + PLOT + below
    figure = Figure(figsize=(figures.WIDTH, height))
    box = (figures.LEFT / figures.WIDTH, below / height, (figures.WIDTH - figures.LEFT - aside) / figures.WIDTH, PLOT / height)
    axes = figure.add_axes(box)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    style_of = operator_styles(list(speed.timed))
    for name, points in speed.timed.items():
        style, x = style_of[name], [one.tokens for one in points]
        y = [one.faster.median for one in points]
        spread = [
            [one.faster.median - one.faster.low for one in points],
            [one.faster.high - one.faster.median for one in points],
        ]
        axes.errorbar(
            x, y, spread, color=style.light, marker=style.marker, markeredgewidth=0, elinewidth=0.7, linewidth=1.1, zorder=3
        )
    every = [value for points in speed.timed.values() for one in points for value in (one.faster.low, one.faster.high)]
    low, high = min(1.0, *every) / 1.25, max(1.0, *every) * 1.25
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{significant(value)}x")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.axhline(1, color="#222222", linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    axes.set_xticks(speed.tokens, [str(tokens) for tokens in speed.tokens])
    axes.xaxis.set_minor_locator(NullLocator())
    if len(speed.tokens) > 6:
        for label in axes.get_xticklabels()[-2::-2]:
            label.set_visible(False)
    axes.tick_params(length=2, pad=2)
    axes.margins(x=0.03)
    axes.set_xlabel("tokens")
    axes.set_ylabel("times faster than the teacher")
    _name_ends(axes, speed, {name: style.light for name, style in style_of.items()})
    figure.text(0.02, 0.05 / height, "\n".join(notes), color=SOFT, linespacing=1.2)
    return figure


def apart(places: Sequence[float], least: float, high: float) -> list[float]:
    """Move places apart, upwards where there is room below a limit.

    >>> apart([0.5, 0.5, 0.0], 0.1, 1.0)
    [0.5, 0.6, 0.0]
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for before, after in pairwise(order):
        moved[after] = max(moved[after], moved[before] + least)
    if order and moved[order[-1]] > high:
        moved[order[-1]] = high
        for after, before in pairwise(reversed(order)):
            moved[before] = min(moved[before], moved[after] - least)
    return moved


def _name_ends(axes: Any, speed: Speed, colours: dict[str, str]) -> None:
    low, high = axes.get_ylim()
    first, last = axes.get_xlim()
    ends = [(name, points[-1].tokens, points[-1].faster.median, colours[name]) for name, points in speed.timed.items()]
    ends.append(("teacher", speed.tokens[-1], 1.0, "#222222"))
    shares = [log(times / low) / log(high / low) for _, _, times, _ in ends]
    for (name, tokens, _, colour), share, place in zip(ends, shares, apart(shares, 0.118 / PLOT, 1.0), strict=True):
        reached = log(tokens / first) / log(last / first)
        axes.plot([reached, 1.025], [share, place], transform=axes.transAxes, color=colour, linewidth=0.5, clip_on=False)
        axes.text(1.035, place, shortened(name, 18), transform=axes.transAxes, va="center", color=colour)


def _frame(means: Sequence[float]) -> tuple[float, float]:
    """Choose limits by the means: an interval of two seeds would leave nothing to be seen."""
    low, high = min([*means, 100.0]), max([*means, 100.0])
    margin = 0.08 * (high - low or 10.0)
    return low - margin, high + margin


def _notes(compared: Comparison, found: Sequence[Estimate], left: float, right: float) -> list[str]:
    counts = compared.seeds("recovered")
    if counts == [1]:
        return ["one seed: no interval"]
    seeds = f"{counts[-1]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    notes = [f"mean and 95 % interval over {seeds}"]
    if any(
        one.half is not None and not left <= 100 * (one.mean - one.half) <= 100 * (one.mean + one.half) <= right
        for one in found
    ):
        notes.append("wide ones leave the frame")
    ringed = any(leads(operator.leads["recovered"]) for operator in compared.operators)
    return [
        *notes,
        "ringed: significantly above the next method" if ringed else "no best method is significantly above the next",
    ]


def _two_lines(name: str) -> str:
    return "\n".join(textwrap.wrap(shortened(name, 32), 16, max_lines=2, placeholder="…"))

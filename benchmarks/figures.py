"""Draw the figures of docs/performance.md from saved numbers, at column width.

Command: python -m benchmarks.performance --render; seconds.
Expected: one PNG per measurement that has a curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks import mixer_figures, replaced, saturation, step_time
from benchmarks.timing import Ratio
from benchmarks.trainees import (
    AGAIN,
    BLEND,
    BLEND_BY_HAND,
    BY_HAND,
    FINALIZED,
    GUIDED,
    GUMBEL,
    KL,
    TAKEOVER,
    TEACHERS,
    THESEUS,
    TORCHDISTILL,
    VIEW,
)
from segue.lab.report.figures import SETTINGS
from segue.reporting.palette import OWN, LineStyle

WIDTH = 4.6  # inches: a column of the page
DPI = 200
METHODS = {
    THESEUS: OWN["theseus"],
    GUMBEL: OWN["theseus_gumbel"],
    BLEND: OWN["dcr"],
    BLEND_BY_HAND: OWN["dcr"],
    GUIDED: OWN["dcr_dfg"],
    KL: OWN["distillation"],
    TORCHDISTILL: OWN["distillation"],
}
SHORT = {BLEND: "DCR blend", KL: "KL distillation"}


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings = {
        "steps": ("steps", _steps),
        "replaced": ("replaced", _replaced),
        "saturation": ("saturation", _saturation),
        "mixers-time": ("mixers", mixer_figures.times),
        "mixers-memory": ("mixers", mixer_figures.memory),
        "decoding": ("decoding", mixer_figures.decoding),
    }
    paths = []
    for name, (measurement, drawing) in drawings.items():
        if measurement in results:
            with plt.rc_context(SETTINGS):
                figure = drawing(results[measurement])
                paths.append(folder / f"performance-{name}.png")
                figure.savefig(paths[-1], dpi=DPI, metadata={"Software": None})
                plt.close(figure)
    return paths


def _style(name: str) -> LineStyle:
    return METHODS.get(name, OWN["student_only"])


def _steps(result: dict[str, Any]) -> Any:
    """One line per step: its time ratio with interval, and its FLOP ratio as a tick."""
    ratios, counted = step_time.ratios(result), result["flops"]
    names = [name for name in (AGAIN, VIEW, TAKEOVER, FINALIZED, *METHODS) if name in ratios and name != TEACHERS]
    figure, axes = plt.subplots(figsize=(WIDTH, 0.55 + 0.19 * len(names)), layout="constrained")
    for place, name in enumerate(names):
        r, style = ratios[name], _style(name)
        axes.plot([r.low, r.high], [place, place], color=style.light, linewidth=1.4, solid_capstyle="butt")
        axes.plot(r.median, place, style.marker, color=style.light, markersize=4.5)
        axes.plot(counted[name] / counted[BY_HAND], place, "|", color="black", markersize=9, markeredgewidth=0.9)
    axes.plot([], [], "|", color="black", markersize=8, label="by operations")
    axes.plot([], [], "o-", color="#606060", markersize=4, label="by the clock, 95 % interval")
    axes.axvline(1, color="#a0a0a0", linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("one step / the same step of student-only, built by hand")
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return figure


def _replaced(result: dict[str, Any]) -> Any:
    """Time and FLOP ratios against the number of replaced modules, and the way to the break-even."""
    points = result["points"]
    counts = [p["count"] for p in points]
    figure, axes = plt.subplots(figsize=(WIDTH, 2.3), layout="constrained")
    for name in replaced.COMPARED:
        _curve(axes, counts, [replaced.ratio(p, name) for p in points], [replaced.flop_ratio(p, name) for p in points], name)
    axes.axhline(1, color="#a0a0a0", linewidth=0.8, zorder=0)
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.set_xlabel("replaced attentions, k")
    axes.set_ylabel("step / student-only step")
    crossing = replaced.break_even(result)
    beyond = f"break-even by operations: k = {crossing:.1f}" + (", beyond this model" if crossing > counts[-1] else "")
    axes.text(0.99, 0.03, beyond, transform=axes.transAxes, ha="right", va="bottom")
    if crossing <= counts[-1]:
        axes.axvline(crossing, color="black", linewidth=0.8, dashes=(1, 1.5))
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def _saturation(result: dict[str, Any]) -> Any:
    """Above, ratios against size; below, the rate of student-only; a grey field where the machine is saturated."""
    figure, grid = plt.subplots(
        2, 2, figsize=(WIDTH, 3.3), layout="constrained", sharex="col", sharey="row", height_ratios=(3, 2)
    )
    for column, (axis, key) in enumerate(saturation.AXES.items()):
        points = result[axis]
        sizes = [p[key] for p in points]
        above, below = grid[0][column], grid[1][column]
        for name in saturation.COMPARED:
            measured = [saturation.ratio(p, name) for p in points]
            _curve(above, sizes, measured, [saturation.flop_ratio(p, name) for p in points], name, label=column == 0)
        below.plot(sizes, [saturation.rate(p) for p in points], "s-", color=OWN["student_only"].light)
        start = saturation.saturated_from(points)
        for axes in (above, below):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(sizes))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xticks(sizes, [str(size) for size in sizes])
            if start is not None:
                axes.axvspan(sizes[start], sizes[-1], color="#000000", alpha=0.06, linewidth=0)
        above.axhline(1, color="#a0a0a0", linewidth=0.8, zorder=0)
        below.set_xlabel(f"{key} ({_fixed(axis, points)})" + ("" if start is None else "; grey: saturated"))
    grid[0][0].set_ylabel("step / student-only step")
    grid[1][0].set_ylabel("GFLOP/s")
    grid[1][0].set_ylim(0, 1.1 * max(saturation.rate(p) for axis in saturation.AXES for p in result[axis]))
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def _fixed(axis: str, points: list[dict[str, Any]]) -> str:
    return f"{points[0]['tokens']} tokens" if axis == "batch" else f"batch {points[0]['batch']}"


def _curve(axes: Any, x: Sequence[float], measured: list[Ratio], counted: list[float], name: str, label: bool = True) -> None:
    """Draw a measured curve with its interval, and its FLOP ratios dashed."""
    style, short = _style(name), SHORT[name]
    axes.fill_between(x, [r.low for r in measured], [r.high for r in measured], color=style.light, alpha=0.18, linewidth=0)
    said = f"{short}, by the clock" if label else None
    axes.plot(x, [r.median for r in measured], color=style.light, marker=style.marker, label=said)
    axes.plot(x, counted, color=style.light, dashes=(3, 2), linewidth=0.9, label=f"{short}, by operations" if label else None)

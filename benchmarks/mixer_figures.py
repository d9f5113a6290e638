"""Draw how the time and the memory of mixers and of decoding grow with the sequence; every curve has its name at its end.

Command: python -m benchmarks.performance --render; seconds.
Expected: parallel lines of slope 1, and softmax crossing them with slope 2.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from benchmarks.decoding import STATIC
from benchmarks.mixers import BOTH, CAUSAL, FORWARD, MB, PASSES, SOFTMAX, UNFUSED
from benchmarks.timing import outer_place
from segue.reporting.palette import BLUE, CYAN, GREY, MAGENTA, ORANGE, RED, TEAL

WIDTH = 6.4  # inches: two panels with names at their sides
LINE = 0.105  # inches between two names
LOOKS: dict[str, tuple[str, str, tuple[float, ...]]] = {  # colour, marker, dashes
    SOFTMAX: ("#000000", "s", ()),
    UNFUSED: ("#000000", "D", (2, 1.5)),
    STATIC: ("#000000", "h", (6, 1.5)),
    "linear, elu": (BLUE[0], "o", ()),
    "linear, relu": (BLUE[0], "v", (2, 1.5)),
    "linear, hedgehog": (BLUE[0], "^", (6, 1.5)),
    "gated linear": (MAGENTA[0], "o", (2, 1.5)),
    "gated delta": (MAGENTA[0], "^", (6, 1.5)),
    "Performer": (MAGENTA[0], "P", ()),
    "Linformer": (TEAL[0], "<", ()),
    "window": (ORANGE[0], ">", ()),
    "window + linear": (RED[0], "X", ()),
    "Nystrom": (CYAN[0], "d", ()),
    "Fourier": (GREY[1], "*", ()),
}


class Curve(NamedTuple):
    """One line with its interval."""

    tokens: list[int]
    middle: list[float]
    low: list[float]
    high: list[float]


def times(result: dict[str, Any]) -> Any:
    """Draw forward above and forward + backward below, bidirectional on the left and causal on the right."""
    figure, grid = plt.subplots(2, 2, figsize=(WIDTH, 5.2), sharex=True, sharey="row")
    figure.subplots_adjust(left=0.09, right=0.85, top=0.955, bottom=0.075, wspace=0.5, hspace=0.13)
    for row, kind in zip(grid, PASSES, strict=True):
        for axes, causal in zip(row, (False, True), strict=True):
            _panel(axes, result, {name: _time(result, name, kind) for name in _names(result, causal, "milliseconds", kind)})
        row[0].set_ylabel(f"{kind}, ms")
    _finish(grid, "one thread, median and 95 % interval")
    return figure


def memory(result: dict[str, Any]) -> Any:
    """Draw the peak of forward + backward, bidirectional on the left and causal on the right."""
    figure, row = plt.subplots(1, 2, figsize=(WIDTH, 2.9), sharex=True, sharey=True)
    figure.subplots_adjust(left=0.09, right=0.85, top=0.92, bottom=0.135, wspace=0.5)
    for axes, causal in zip(row, (False, True), strict=True):
        _panel(axes, result, {name: _memory(result, name) for name in _names(result, causal, "peak")})
    row[0].set_ylabel(f"peak of {BOTH}, MB")
    _finish([row], "counted, without inputs and weights")
    return figure


def decoding(result: dict[str, Any]) -> Any:
    """Draw tokens per second on the left and the bytes of the cache on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 2.9), sharex=True)
    figure.subplots_adjust(left=0.09, right=0.83, top=0.92, bottom=0.135, wspace=0.72)
    names, lengths = list(result["points"][0]["bytes"]), [p["tokens"] for p in result["points"]]
    _panel(left, result, {name: _rates(result, name) for name in names})
    sizes = {name: [p["bytes"][name] / MB for p in result["points"]] for name in names}
    _panel(right, result, {name: Curve(lengths, *([sizes[name]] * 3)) for name in names})
    left.set_title("tokens per second", loc="left")
    right.set_title("cache, MB", loc="left")
    for axes, note in ((left, "one thread, median and 95 % interval"), (right, "counted")):
        axes.set_xlabel(f"tokens of context ({note})")
        _label(axes)
    left.yaxis.set_minor_formatter("{x:g}")
    return figure


def _rates(result: dict[str, Any], name: str) -> Curve:
    found = [sorted(1000 / spent for spent in p["milliseconds"][name]) for p in result["points"]]
    place = outer_place(len(found[0]))
    middle = [statistics.median(rates) for rates in found]
    lengths = [p["tokens"] for p in result["points"]]
    return Curve(lengths, middle, [rates[place] for rates in found], [rates[-1 - place] for rates in found])


def _names(result: dict[str, Any], causal: bool, key: str, kind: str = FORWARD) -> list[str]:
    """Return what was measured with or without a view of the future, whichever lengths it reached."""
    at_points = (p[key][kind] if key == "milliseconds" else p[key] for p in result["points"])
    return [name for name in dict.fromkeys(name for found in at_points for name in found) if name.endswith(CAUSAL) == causal]


def _time(result: dict[str, Any], name: str, kind: str) -> Curve:
    found = {p["tokens"]: sorted(p["milliseconds"][kind][name]) for p in result["points"] if name in p["milliseconds"][kind]}
    places = {tokens: outer_place(len(values)) for tokens, values in found.items()}
    return Curve(
        list(found),
        [statistics.median(values) for values in found.values()],
        [values[places[tokens]] for tokens, values in found.items()],
        [values[-1 - places[tokens]] for tokens, values in found.items()],
    )


def _memory(result: dict[str, Any], name: str) -> Curve:
    found = {p["tokens"]: p["peak"][name] / MB for p in result["points"] if name in p["peak"]}
    return Curve(list(found), *([list(found.values())] * 3))


def _panel(axes: Any, result: dict[str, Any], curves: dict[str, Curve]) -> None:
    """Draw the curves and write each name where it ends, moved apart where they would touch."""
    lengths = [p["tokens"] for p in result["points"]]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name, curve in curves.items():
        colour, marker, dashes = LOOKS[name.removesuffix(CAUSAL)]
        width = 1.6 if name.startswith(SOFTMAX) else 1.0
        axes.fill_between(curve.tokens, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(
            curve.tokens, curve.middle, color=colour, marker=marker, dashes=dashes, linewidth=width, markersize=2.8, label=name
        )
    axes.yaxis.set_major_locator(LogLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])


def _finish(grid: Any, note: str) -> None:
    """Write titles and names, once the scales are known."""
    for row in grid:
        for axes in row:
            axes.tick_params(labelleft=axes is row[0])
            _label(axes)
    grid[0][0].set_title("bidirectional", loc="left")
    grid[0][1].set_title("causal", loc="left")
    for axes in grid[-1]:
        axes.set_xlabel(f"tokens ({note})")


def _label(axes: Any) -> None:
    """Write every name at the right edge, at the height where its curve ends, with a thin line between the two."""
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = {line: to_axes.transform((line.get_xdata()[-1], line.get_ydata()[-1])) for line in axes.get_lines()}
    lines = sorted(ends, key=lambda line: float(ends[line][1]))
    height = axes.get_position().height * axes.figure.get_figheight()
    heights = spread([float(ends[line][1]) for line in lines], LINE / height)
    for line, y in zip(lines, heights, strict=True):
        (end_x, end_y), colour = ends[line], line.get_color()
        axes.plot(
            [end_x, 1.02, 1.05], [end_y, y, y], color=colour, linewidth=0.4, alpha=0.7, transform=axes.transAxes, clip_on=False
        )
        name = line.get_label().removesuffix(CAUSAL).removeprefix("softmax, ")
        axes.text(1.06, y, name, color=colour, transform=axes.transAxes, va="center", ha="left", fontsize=6.5)


def spread(heights: list[float], least: float) -> list[float]:
    """Move rising heights apart to the least distance, within 0 and 1 where there is room."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + least) if moved else height)
    ceiling = 1.0
    for place in reversed(range(len(moved))):
        moved[place] = min(moved[place], ceiling)
        ceiling = moved[place] - least
    return moved

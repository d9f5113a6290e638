"""Figures of a plan: the frontier, sites x candidates, interactions of pairs; only these need matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from segue.reporting.palette import require_matplotlib

if TYPE_CHECKING:
    from segue.planning.planned import Planned

INK, WARM, COOL = "#222222", "#c2571a", "#1f6f8b"


def draw(found: Planned, folder: Path) -> list[Path]:
    """Draw frontier.png, options.png and pairs.png, and return their paths."""
    require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _frontier(found, folder / "frontier.png"),
        _options(found, folder / "options.png"),
        _pairs(found, folder / "pairs.png"),
    ]


def _frontier(found: Planned, path: Path) -> Path:
    figure, axes = _figure(5.2, 3.2)
    metric, points = found.metric, found.frontier
    x = [100 * point.saved[metric] for point in points]
    axes.fill_between(x, [p.interval[0] for p in points], [p.interval[1] for p in points], color=COOL, alpha=0.15, linewidth=0)
    axes.plot(x, [point.kl for point in points], "o-", color=COOL, markersize=4, label="least damage, predicted")
    axes.plot(100 * found.choice.saved[metric], found.choice.kl, "D", color=WARM, label="the plan")
    for place, point in zip(x, points, strict=True):
        axes.annotate(str(len(point.subset)), (place, point.kl), xytext=(0, 6), textcoords="offset points", fontsize=7)
    axes.set(xlabel=f"{metric} saved, % of the model (numbers: replaced sites)", ylabel="KL before training", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    return _written(figure, path)


def _options(found: Planned, path: Path) -> Path:
    names = list(found.students)
    places = [site.name for site in found.sites]
    options = set(found.prediction.options)
    values = [[found.prediction.of([(p, n)]) if (p, n) in options else float("nan") for n in names] for p in places]
    figure, axes = _figure(2.4 + 1.1 * len(names), 1.0 + 0.28 * len(places))
    shown = axes.imshow(values, aspect="auto", cmap="viridis_r")
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
    axes.set_yticks(range(len(places)), places, fontsize=8)
    chosen = dict(found.choice.subset)
    for row, place in enumerate(places):
        if place in chosen:
            axes.plot(names.index(chosen[place]), row, "D", color=WARM, markersize=6)
    axes.set_title("KL of each student alone; chosen ones are marked", fontsize=9)
    figure.colorbar(shown, ax=axes)
    return _written(figure, path)


def _pairs(found: Planned, path: Path) -> Path:
    options, pairs = found.prediction.options, found.prediction.pairs
    both = (pairs + pairs.T).tolist()
    most = max((abs(value) for row in both for value in row), default=0.0) or 1.0
    side = 2.0 + 0.3 * len(options)
    figure, axes = _figure(side + 3.2, side)
    shown = axes.imshow(both, cmap="RdBu_r", vmin=-most, vmax=most)
    several = len(found.students) > 1
    labels = [f"{site} {name if several else ''}  {i}" for i, (site, name) in enumerate(options, start=1)]
    axes.set_xticks(range(len(labels)), range(1, len(labels) + 1), fontsize=7)  # a label on both sides leaves no room
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.set_title("KL of a pair beyond the sum of both", fontsize=9)
    figure.colorbar(shown, ax=axes)
    return _written(figure, path)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _written(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=160, bbox_inches="tight")  # long names are not cut off
    return path

"""What a finished training looks like: a table of its evaluations, and a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from segue.display import Table, picture
from segue.errors import ConfigError, nearest

if TYPE_CHECKING:
    from segue.training.fit import Fit

SIDES = {"blend": "#0b3bd1", "students": "#d06417", "scores": "#404040"}  # what an evaluation scores, and its colour


def table(fit: Fit, *, most: int | None = None) -> Table:
    """List the evaluations, with at most so many scores of each side."""
    sides = [(side, name) for side in SIDES for name in _names(fit, side)[:most]]
    known = [key for key in ("alpha", "loss", "lr") if any(point.get(key) is not None for point in fit.history)]
    headings = ("step", *known, *(f"{side} {name}" if side != "scores" else name for side, name in sides))
    rows = [
        (
            str(point["step"]),
            *(_text(point.get(key)) for key in known),
            *(_text(point.get(side, {}).get(name)) for side, name in sides),
        )
        for point in fit.history
    ]
    ended = [] if fit.stopped_at is None else [f"early stopping ended it at step {fit.stopped_at}; best step {fit.best_step}"]
    skipped = [f"{fit.skipped} steps left out"] if fit.skipped else []
    return Table(
        f"Fit({type(fit.model).__name__}, {fit.total_steps} steps, {fit.seconds:.1f} s)", headings, rows, [*ended, *skipped]
    )


def plot(fit: Fit, score: str | None) -> Any:
    """Draw a score of every side over the steps, and the mean alpha below where there is one."""
    names = [*dict.fromkeys(name for side in SIDES for name in _names(fit, side))]
    if not names:
        raise ConfigError("Fit.plot() needs evaluations.", "The history has no scores.", "give fit validation batches.")
    score = names[0] if score is None else score
    if score not in names:
        raise ConfigError(f"there is no score {score!r}.", nearest(score, names), "give the name of a score, or leave it out.")
    alphas = [(point["step"], point["alpha"]) for point in fit.history if "alpha" in point]
    figure = picture("Fit.plot()", height=4.2 if alphas else 3.2)
    above, *below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1)) if alphas else [figure.subplots()]
    for side, colour in SIDES.items():
        points = [(point["step"], point[side][score]) for point in fit.history if score in point.get(side, {})]
        if points:
            label = {"blend": "blend of both", "students": "students alone"}.get(side)
            above.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=label)
    above.set_ylabel(score)
    if alphas:
        above.legend(frameon=False)
        below[0].plot(*zip(*alphas, strict=True), color="#555555")
        below[0].set_ylabel("mean alpha")
        below[0].set_ylim(-0.05, 1.05)
    for axes in (above, *below):
        axes.spines[["top", "right"]].set_visible(False)
    (above, *below)[-1].set_xlabel("optimizer step")
    return figure


def _names(fit: Fit, side: str) -> list[str]:
    return [*dict.fromkeys(name for point in fit.history for name in point.get(side, {}))]


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"

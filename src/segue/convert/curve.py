"""The curve of a conversion: quality of original, blend and students over the steps, and alpha below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.convert.tasks import Task


def draw(path: Path, task: Task, original: float, points: list[dict[str, Any]], alphas: list[float]) -> None:
    """Draw the looks of a training; `alphas` is the teacher's mean share at every step."""
    from matplotlib.figure import Figure

    steps = [point["step"] for point in points]
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.axhline(original, color="#888888", linestyle="--", label="original")
    for name, colour in (("blend", "#1f77b4"), ("students", "#d62728")):
        label = "model as it is" if name == "blend" else "students alone"
        above.plot(steps, [task.of(point[name]) for point in points], marker="o", markersize=3, color=colour, label=label)
    if task.quality == "perplexity":
        above.set_yscale("log")
        above.yaxis.set_major_formatter("{x:g}")
        above.yaxis.set_minor_formatter("{x:g}")
        above.tick_params(axis="y", which="minor", labelsize=7)
    above.set_ylabel(f"held-out {task.quality}{task.unit}")
    above.legend(frameon=False)
    below.plot(alphas, color="#555555")
    below.set_ylabel("alpha\n(teacher's share)")
    below.set_xlabel("optimizer step")
    below.set_ylim(-0.05, 1.05)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)

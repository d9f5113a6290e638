"""Pictures of what the diagnostics found; matplotlib is asked for only here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from segue.errors import MissingExtraError

if TYPE_CHECKING:
    from segue.diagnostics.costs import Cost

SIZE = (6.4, 3.2)
INK, SOFT, WARM, COOL = "#222222", "#8a8a8a", "#c2571a", "#1f6f8b"


def draw_cost(cost: Cost, path: Path) -> Path:
    """Draw the operations of every step of a run beside those of student-only training and full-teacher distillation."""
    figure, (axes,) = _figure(1)
    scale, unit = _unit(max(cost.per_step))
    axes.plot([flops / scale for flops in cost.per_step], color=COOL, label="this plan", drawstyle="steps-post")
    for phase, style in ((cost.student_only, "--"), (cost.distillation, ":")):
        axes.axhline(phase.flops / scale, color=SOFT if style == "--" else WARM, linestyle=style, label=phase.name)
    axes.set(xlabel="step", ylabel=f"{unit} per step", ylim=(0, None), xlim=(0, cost.steps))
    axes.set_title(
        f"whole run: {cost.to_student_only:.3f} x student-only, {cost.to_distillation:.3f} x full-teacher distillation",
        fontsize=9,
    )
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return _written(figure, path)


def _figure(panels: int) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError(
            "a picture was to be drawn.", "matplotlib is not installed.", "pip install segue[lab]"
        ) from None
    figure = Figure(figsize=(SIZE[0], SIZE[1] * panels), layout="constrained")
    axes = [figure.add_subplot(panels, 1, panel + 1) for panel in range(panels)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _written(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    return path


def _unit(most: float) -> tuple[float, str]:
    for power, unit in ((1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs")):
        if most >= power:
            return power, unit
    return 1.0, "FLOPs"

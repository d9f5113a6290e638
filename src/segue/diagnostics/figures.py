"""Figures of what the diagnostics measured; only these need matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from segue.errors import ConfigError
from segue.reporting.palette import require_matplotlib

if TYPE_CHECKING:
    from segue.diagnostics.costs import Cost
    from segue.diagnostics.curvature import CurvatureBias
    from segue.diagnostics.gradient_variance import GateGradientVariance
    from segue.diagnostics.loss_path import LossPath

SIZE = (6.4, 3.2)
INK, SOFT, WARM, COOL = "#222222", "#8a8a8a", "#c2571a", "#1f6f8b"


def draw_cost(cost: Cost, path: Path) -> Path:
    """Draw the operations of every step of a run, with those of student-only training and full-teacher distillation."""
    figure, (axes,) = _figure(1)
    scale, unit = _unit(max(cost.per_step))
    axes.plot([flops / scale for flops in cost.per_step], color=COOL, label="this plan", drawstyle="steps-post")
    for phase, style in ((cost.student_only, "--"), (cost.distillation, ":")):
        axes.axhline(phase.flops / scale, color=SOFT if style == "--" else WARM, linestyle=style, label=phase.name)
    axes.set(xlabel="step", ylabel=f"{unit} per step", ylim=(0, None), xlim=(0, cost.steps))
    axes.set_title(
        f"complete run: {cost.to_student_only:.3f} x student-only, {cost.to_distillation:.3f} x full-teacher distillation",
        fontsize=9,
    )
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return _written(figure, path)


def draw_loss_path(path: LossPath, place: Path) -> Path:
    """Draw the loss from teacher to student at every site, and the largest rise relative to its bound."""
    figure, (above, below) = _figure(2)
    colour = _shades(len(path.sites))
    for index, (name, site) in enumerate(path.sites.items()):
        above.plot(path.weights, site.losses, color=colour(index), label=name)
        ratios = [rise / bound if bound > 0 else 0.0 for rise, bound in zip(site.rises, site.bounds, strict=True)]
        below.plot(path.weights[1:], ratios[1:], color=colour(index), label=name)
    above.set(ylabel="loss", xlim=(0, 1))
    below.set(xlabel="weight of the student", ylabel="rise / bound", xlim=(0, 1), ylim=(0, None))
    above.set_title("one site changes from its teacher to its student", fontsize=9)
    above.legend(frameon=False, fontsize=7, ncols=2, loc="best")
    return _written(figure, place)


def draw_variance(found: GateGradientVariance, place: Path) -> Path:
    """Draw the variance by the gates, one alone and all together, with the paper's formula and the variance over data."""
    settings = [("one gate varies", found.alone), ("all gates vary", found.together)]
    shown = [(title, setting) for title, setting in settings if setting is not None]
    figure, panels = _figure(len(shown))
    for axes, (title, setting) in zip(panels, shown, strict=True):
        sites = list(setting.sites.values())
        places = list(range(len(sites)))
        errors = [2 * site.standard_error for site in sites]
        axes.bar([x - 0.2 for x in places], [site.gate for site in sites], 0.4, yerr=errors, color=WARM, label="by the gates")
        axes.bar([x + 0.2 for x in places], [site.data for site in sites], 0.4, color=COOL, label="over data")
        predicted = [site.predicted for site in sites]
        axes.plot([x - 0.2 for x in places], predicted, "_", color=INK, markersize=14, label="the paper's formula")
        axes.set_ylabel("variance of the gradient")
        axes.set_title(f"{title} ({setting.how})", fontsize=9)
        _name_sites(axes, list(setting.sites))
    panels[0].legend(frameon=False, fontsize=8)
    return _written(figure, place)


def draw_curvature(found: CurvatureBias, place: Path) -> Path:
    """Draw the bias of random mixing, with the paper's bound and the sharper one along the segment."""
    figure, (axes,) = _figure(1)
    places = list(range(len(found.sites)))
    series = (
        ("bound", "bound (paper)", "v", WARM),
        ("along_bound", "bound along the segment", "s", SOFT),
        ("bias", "bias", "o", COOL),
    )
    for name, label, marker, colour in series:
        axes.plot(places, [getattr(site, name) or None for site in found.sites.values()], marker, color=colour, label=label)
    axes.set(ylabel="loss", yscale="log")
    axes.set_title("bias of random mixing, and its bounds", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    _name_sites(axes, list(found.sites))
    return _written(figure, place)


def _name_sites(axes: Any, names: list[str]) -> None:
    axes.set_xticks(
        range(len(names)), names, rotation=0 if len(names) <= 4 else 30, ha="center" if len(names) <= 4 else "right"
    )
    axes.tick_params(axis="x", labelsize=8)


def _shades(count: int) -> Any:
    import matplotlib

    shades = matplotlib.colormaps["viridis"]
    return lambda index: shades(0.9 * index / max(1, count - 1))


def _figure(panels: int) -> tuple[Any, Any]:
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SIZE[0], SIZE[1] * panels), layout="constrained")
    axes = [figure.add_subplot(panels, 1, panel + 1) for panel in range(panels)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _written(figure: Any, path: Path) -> Path:
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise ConfigError(
            f"no figure can be written as {path.name!r}.", f"Matplotlib writes {', '.join(sorted(kinds))}.", "name a .png file."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    return path


def _unit(most: float) -> tuple[float, str]:
    for power, unit in ((1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs")):
        if most >= power:
            return power, unit
    return 1.0, "FLOPs"

"""What trackers get besides numbers: how each student's weights are distributed, and heat maps of sites by steps as an image.

All of it goes through Accelerate's own calls. Only TensorBoard has one for histograms; the others get them in the image.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from segue.core.handover import Handover
from segue.core.tensor_files import full

MAPS = {  # by name in the metrics; whether colours follow the logarithm
    "cosine": ("interface cosine", False),
    "relative_error": ("relative error", True),
    "gradient_norm": ("gradient norm", True),
    "drift_blend": ("drift of the residual stream", True),
}
BINS = 40
SHOWN_SITES = 24  # names beside a map
IMAGE = "sites"
ONE_IMAGE = ("aim", "clearml")  # their calls take an image, those of the others a list of images


def tracker_settings(folder: str | None) -> dict[str, dict[str, Any]]:
    """Return by tracker the settings that keep its files in the folder of the run; without them W&B writes where one stands."""
    return {} if folder is None or "WANDB_DIR" in os.environ else {"wandb": {"dir": folder}}


def send(accelerator: Any, history: Sequence[Mapping[str, Any]], handover: Handover, step: int) -> None:
    """Send the state of every site to the trackers of a training; called in all processes, as sharded weights are gathered."""
    weights = {name: student_weights(seam.student) for name, seam in handover.seams.items()}
    trackers: list[Any] = accelerator.trackers if accelerator.is_main_process else []
    for tracker in trackers:
        if hasattr(tracker.tracker, "add_histogram"):
            for name, values in weights.items():
                tracker.tracker.add_histogram(f"students/{name}", values, global_step=step)
    if any(hasattr(tracker, "log_images") or hasattr(tracker, "log_figure") for tracker in trackers):
        figure = draw(history, weights)
        if figure is not None:
            _show(trackers, figure, step)


@torch.no_grad()
def student_weights(student: torch.nn.Module) -> Tensor:
    """Return all finite weights of a student that train, as one vector on the CPU."""
    found = [full(parameter.detach()).float().flatten().cpu() for parameter in student.parameters() if parameter.requires_grad]
    weights = torch.cat([torch.zeros(0), *found])
    finite = weights[weights.isfinite()]
    return finite if len(finite) else torch.zeros(1)


def draw(history: Sequence[Mapping[str, Any]], weights: Mapping[str, Tensor]) -> Any:
    """Draw heat maps of what the evaluations measured at every site, and the weights' histograms; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    sites = list(weights)
    maps = [(title, log, values) for name, (title, log) in MAPS.items() if (values := by_site(history, name, sites))]
    figure = Figure(figsize=(9, 2.6 * ((len(maps) + 2) // 2)), layout="constrained")
    axes = figure.subplots((len(maps) + 2) // 2, 2, squeeze=False).flatten()
    for place, (title, log, (steps, rows)) in zip(axes, maps, strict=False):
        _heat_map(place, rows, sites, log=log)
        place.set_title(f"{title}{', log scale' if log else ''}", fontsize=9)
        ticks = sorted({0, len(steps) // 2, len(steps) - 1})
        place.set_xticks(ticks, [str(steps[i]) for i in ticks], fontsize=8)
    place = axes[len(maps)]
    limit = max((float(values.abs().max()) for values in weights.values()), default=0.0) or 1.0
    counts = [torch.histc(values, BINS, -limit, limit).log1p().tolist() for values in weights.values()]
    _heat_map(place, counts, sites, log=False)
    place.set_title("weights of the students, log counts", fontsize=9)
    place.set_xticks([0, BINS // 2, BINS - 1], [f"{-limit:.2g}", "0", f"{limit:.2g}"], fontsize=8)
    for empty in axes[len(maps) + 1 :]:
        empty.axis("off")
    return figure


def by_site(
    history: Sequence[Mapping[str, Any]], name: str, sites: Sequence[str]
) -> tuple[list[int], list[list[float]]] | None:
    """Return the steps at which a quantity was measured, and its values there, a row for each site; None if it never was."""
    points = [metrics for metrics in history if metrics.get(name)]
    if not points:
        return None
    return [point["step"] for point in points], [[point[name].get(site, float("nan")) for point in points] for site in sites]


def _heat_map(axes: Any, rows: list[list[float]], sites: Sequence[str], *, log: bool) -> None:
    from matplotlib.colors import LogNorm

    known = [value for row in rows for value in row if value > 0]
    norm = LogNorm(min(known), max(known)) if log and known and max(known) > min(known) else None
    image = axes.imshow(rows, aspect="auto", interpolation="nearest", norm=norm)
    axes.figure.colorbar(image, ax=axes)
    every = max(1, -(-len(sites) // SHOWN_SITES))
    axes.set_yticks(range(0, len(sites), every), sites[::every], fontsize=7)


def _show(trackers: Sequence[Any], figure: Any, step: int) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Gg]lyph")  # the name of a site may have letters that the font lacks
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
    picture = torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8)
    width, height = canvas.get_width_height()
    picture = picture.view(height, width, 4)[..., :3]
    for tracker in trackers:
        if tracker.name == "tensorboard":
            tracker.log_images({IMAGE: picture.permute(2, 0, 1)[None].numpy()}, step=step)
        elif hasattr(tracker, "log_images"):
            image = picture.numpy()
            tracker.log_images({IMAGE: image if tracker.name in ONE_IMAGE else [image]}, step=step)
        elif hasattr(tracker, "log_figure"):
            tracker.log_figure(figure, f"{IMAGE}/step_{step:08}.png")

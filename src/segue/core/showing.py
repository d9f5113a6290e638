"""What a handover looks like: one line, a table of its sites, and a figure of its alphas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from segue.display import Table, picture
from segue.phases import alpha_of
from segue.similarity import Similarities

if TYPE_CHECKING:
    from segue.core.handover import Handover

POINTS = 201  # of a curve


def line(handover: Handover) -> str:
    """Say where a handover is."""
    alphas = sorted({f"{alpha:.3g}" for alpha in handover.alphas.values()})
    span = alphas[0] if len(alphas) == 1 else f"{alphas[0]} to {alphas[-1]}"
    sites = f"{len(handover.sites)} site{'s' * (len(handover.sites) != 1)}"
    return (
        f"Handover({type(handover.model).__name__}, {sites}, step {handover.steps_done} of "
        f"{handover.total_steps or 'an unknown total'}, alpha {span})"
    )


def table(handover: Handover) -> Table:
    """List the sites with alpha, the student's weight, the cosine where it was measured, and the parameters of both sides."""
    step, compared = handover.compared or (0, Similarities())
    headings = ("site", "student", "alpha", "weight", "parameters", "teacher's")
    rows = []
    for name, seam in handover.seams.items():
        teacher = "released" if seam.teacher is None else _count(seam.teacher)
        numbers = f"{handover.alphas[name]:.3g}", f"{seam.state.weight:.3g}", _count(seam.student), teacher
        cosine = (f"{compared[name].cosine:.4f}" if name in compared else "",) if compared else ()
        rows.append((name, _name(seam.student), *numbers, *cosine))
    return Table(line(handover), (*headings, *((f"cosine at step {step}",) if compared else ())), rows)


def plot(handover: Handover) -> Any:
    """Draw the alpha of every site; that of an adaptive schedule on its slowest course."""
    figure = picture("handover.plot()")
    axes = figure.subplots()
    scale = handover.total_steps or 1
    progress = [point / (POINTS - 1) for point in range(POINTS)]
    sites_of: dict[tuple[float, ...], list[str]] = {}  # a line for each course: of sites that go alike only the last would show
    for site in handover.sites:
        sites_of.setdefault(tuple(alpha_of(handover.plan, at, site) for at in progress), []).append(site.name)
    for alphas, (first, *others) in sites_of.items():
        axes.plot([scale * at for at in progress], alphas, label=f"{first} and {len(others)} more" if others else first)
    axes.axvline(scale * handover.progress, color="#888888", linestyle=":", label="now")
    axes.set_xlabel("optimizer step" if handover.total_steps else "part of the run")
    axes.set_ylabel("alpha, the teacher's share")
    axes.set_ylim(-0.05, 1.05)
    axes.spines[["top", "right"]].set_visible(False)
    if len(sites_of) <= 12:
        axes.legend(frameon=False, fontsize=8)
    return figure


def _name(student: Any) -> str:
    """Name a student as the plan does: all attention operators build modules of one class."""
    operator = getattr(student, "operator", None)
    return operator if isinstance(operator, str) else type(student).__name__


def _count(module: Any) -> str:
    return f"{sum(parameter.numel() for parameter in module.parameters()):,}"

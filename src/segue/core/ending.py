"""The end of a teacher and of a handover: the students alone, or the original model again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from segue.core import surgery
from segue.core.modes import Watch
from segue.core.shortening import shorten_, warn_of
from segue.core.step_state import StepState, closed_for_good
from segue.core.student_steps import begin_step
from segue.core.transaction import all_or_nothing
from segue.core.verify import require_same_when_shortened
from segue.errors import HandoverError

if TYPE_CHECKING:
    from segue.core.handover import Handover


def finalize_(handover: Handover, *, force: bool) -> nn.Module:
    """Put the students in place of the seams, or change nothing."""
    model, sites = handover.model, handover.sites
    sharing = {name: alpha for name, alpha in handover.alphas.items() if alpha > 0}
    if sharing and not force:
        name, alpha = next(iter(sharing.items()))
        raise HandoverError(
            "finalize_() needs alpha 0 at every site.",
            f"{len(sharing)} of {len(sites)} teachers still have a share; at {name!r} alpha is {alpha:.3g}.",
            "train until the schedule reaches 0, or call finalize_(force=True). Nothing was changed.",
        )
    if handover.last_input is not None and not handover.is_compiled:
        with all_or_nothing(model, handover):
            require_same_when_shortened(handover, *handover.last_input)
    record = {**handover.describe(), "earlier": getattr(model, "segue", None)}
    with all_or_nothing(model, handover):
        students = {site: surgery.finished(handover.seams[site.name].student) for site in sites}
        for site, student in students.items():
            surgery.put_at(model, site, student)
        handover.end("finalized")
        differences = shorten_(model, sites)
        warn_of(model, [text for text in differences if text not in handover.unrebuilt])
        model.segue = record  # type: ignore[assignment]
    begin_step(handover.seams.values(), handover.plan.seed, handover.steps_done, progress=1.0)
    handover.forget()
    return model


def cancel_(handover: Handover) -> nn.Module:
    """Put the teachers back in their places, or change nothing."""
    model = handover.model
    with all_or_nothing(model, handover):
        for site in handover.sites:
            surgery.put_back(model, site, handover.seams[site.name].require_teacher())
        handover.end("cancelled")
        handover.backbone.restore_tensors()
    handover.forget()
    return model


def release_teachers(handover: Handover, state: StepState) -> None:
    """Free the teachers that no later step of the run needs."""
    assert handover.total_steps is not None
    plan = handover.plan
    if plan.distill is not None and plan.train == "students" and handover.auxiliary.cached is None:
        return  # the distillation needs the original model to the end
    gone: list[nn.Module] = []
    for site in handover.sites:
        seam = handover.seams[site.name]
        if seam.teacher is None or state.sites[site.name].needs_teacher:
            continue
        if handover.is_compiled and not (seam.state.closed_in_graph and seam.state.watch is Watch.NOTHING):
            continue  # compiled code still computes it, until its group closes
        if closed_for_good(plan, site, handover.steps_done, handover.total_steps, handover.closed_loop.alphas):
            if handover.on_release is not None:
                handover.on_release(site.name, seam.require_teacher())
            gone.append(seam.release_teacher())
            handover.backbone.forget(gone[-1])
    surgery.free(gone, handover.model)

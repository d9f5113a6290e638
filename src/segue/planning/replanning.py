"""replan(): the order and pace of the sites that are left in a running handover, measured where the others have taken over."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from segue.border import Fraction, checked
from segue.core.blending import call_arguments, padding_mask
from segue.core.handover import Handover
from segue.core.modes import View
from segue.core.views import isolated
from segue.errors import HandoverError
from segue.planning.candidates import Option
from segue.planning.damage import counted, logits
from segue.planning.pacing import UNTIL, staggered
from segue.planning.signals import on_batches
from segue.schedules import Constant, PerSite, Schedule

STUDENT = "student"  # the candidate of every site of a running handover


@dataclass(frozen=True)
class Replanned:
    """The sites that are left, in their new order, the damage that each adds there, and the schedule of the rest."""

    order: tuple[str, ...]
    added: dict[str, float]  # KL beyond that of the sites before it
    errors: dict[str, float]  # relative error of each student, on the stream as it is now
    schedule: PerSite


@checked
def replan(handover: Handover, batches: Iterable[Any], *, window: Fraction = UNTIL) -> Replanned:
    """Order the sites that are left of a running handover anew, and give it the schedule of that order.

    A static plan is measured around the original model; once half of the sites have taken over, that is another model. Here
    the sites are added one by one, each time the one that adds the least damage to those that stand alone already.

        segue.planning.replan(handover, batches)  # in the middle of a run

    Args:
        handover: A running handover.
        batches: A few, as the model is called.
        window: The fraction of the run, from where it is now, in which the sites follow one another.
    """
    handover.require_teachers("replan()")
    total = handover.total_steps
    if total is None or handover.plan.phases or handover.closed_loop.sites:
        raise HandoverError(
            "replan() needs a handover with a schedule and a length.",
            "It has phases, an adaptive schedule, or no total_steps.",
            "give Plan(schedule=...) and total_steps=n. Nothing was changed.",
        )
    left = [name for name, alpha in handover.alphas.items() if alpha > 0]
    if not left:
        raise HandoverError(
            "replan() needs a site that is left.", "All teachers have handed over.", "call finalize_(). Nothing was changed."
        )
    measured = on_batches(batches)
    errors = _errors(handover, measured.batches, left)
    done = [name for name in handover.seams if name not in left]
    order: list[str] = []
    added: dict[str, float] = {}
    before = _damage(handover, measured.batches, done)
    while left:
        damages = {name: _damage(handover, measured.batches, [*done, name]) for name in left}
        best = min(damages, key=damages.__getitem__)
        added[best], before = damages[best] - before, damages[best]
        left.remove(best)
        done.append(best)
        order.append(best)
    schedule = _schedule(handover, order, errors, window)
    handover.reschedule(schedule)
    return Replanned(tuple(order), added, errors, schedule)


def _schedule(handover: Handover, order: list[str], errors: Mapping[str, float], window: float) -> PerSite:
    """Let the sites that have taken over stay so, and the others go on from the alpha that they have."""
    start = handover.progress
    options: list[Option] = [(name, STUDENT) for name in order]
    ramps = staggered(options, {option: errors[option[0]] for option in options}, start, min(1.0, start + window * (1 - start)))
    found: dict[str, Schedule] = {name: Constant(alpha=0.0) for name in handover.seams if name not in order}
    for name in order:
        ramp: Any = ramps.schedules[name]
        first, last = ramp.points
        found[name] = dataclasses.replace(ramp, points=((first[0], handover.alphas[name]), last))
    return PerSite(schedules=found)


def _damage(handover: Handover, batches: Iterable[Any], alone: Iterable[str]) -> float:
    """Return the KL of the model in which these students stand alone, from the original."""
    kl, count = 0.0, 0
    for batch in batches:
        found = []
        for students in ([], list(alone)):
            with _showing(handover, students):
                found.append(counted(logits(handover.model, batch), padding_mask(batch)).log_softmax(-1))
        kl += float(F.kl_div(found[1], found[0], reduction="sum", log_target=True))
        count += len(found[0])
    return kl / count


@contextmanager
def _showing(handover: Handover, students: list[str]) -> Iterator[None]:
    with isolated(handover), torch.no_grad():
        for name, seam in handover.seams.items():
            seam.configure(view=View.STUDENT if name in students else View.TEACHER)
        yield


def _errors(handover: Handover, batches: Iterable[Any], names: list[str]) -> dict[str, float]:
    """Return the relative error of each student on the stream of the students."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for batch in batches:
        args, kwargs = call_arguments(batch)
        with handover.comparing(padding_mask(batch)) as similar:
            handover.model(*args, **kwargs)
        for name in names:
            found[name].append(similar[name].relative_error)
    return {name: sum(values) / len(values) for name, values in found.items()}

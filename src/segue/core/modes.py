"""Modes: what the forward of a seam computes and records, decided by one pure function from what the handover writes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class View(Enum):
    """Which side a forward shows."""

    BLEND = "blend"
    TEACHER = "teacher"
    STUDENT = "student"


class Watch(Enum):
    """Which outputs a forward records for the losses and measurements outside the model."""

    NOTHING = "nothing"
    PAIR = "pair"  # computes both sides, whatever the weight
    STUDENT = "student"


class Mode(Enum):
    """What a forward computes, and whose output it returns."""

    TEACHER = "teacher"  # the teacher alone, as in the original model
    STUDENT = "student"  # the student alone, as in the finished model
    SKIP_STUDENT = "skip student"  # the teacher alone; in training the student gets zero gradients
    BLEND = "blend"  # both, joined by the weight
    HOLD = "hold"  # both; returns the teacher's output, and the student, its input detached, learns from guidance alone
    COMPARE = "compare"  # both; returns the student's output


@dataclass(frozen=True, kw_only=True)
class SeamState:
    """What the handover writes into a seam."""

    weight: float = 0.0  # the student's, for this step, in training
    mean: float = 0.0  # its mean over the gate's noise, in evaluation
    view: View = View.BLEND
    watch: Watch = Watch.NOTHING
    measuring: bool = False  # record in evaluation and without gradients too
    hold: bool = False  # return the teacher's output; the student learns from guidance alone
    compared: bool = False  # both sides have run once and return the same kind of output, so one may be left out
    closed_in_graph: bool = False  # compiled code leaves the teacher out; set for groups of sites at a time


def mode_of(state: SeamState, weight: float | None, *, learning: bool, compared: bool) -> tuple[Mode, Watch]:
    """Return what a forward does and what it records; `weight` is None where it is a tensor, in compiled code.

    `learning` is a training forward with gradients; without `compared` no side may be left out because of the weight.
    """
    watch = state.watch if learning or state.measuring else Watch.NOTHING
    if state.view is View.TEACHER:
        return Mode.TEACHER, Watch.NOTHING
    if state.view is View.STUDENT:
        return (Mode.COMPARE if watch is Watch.PAIR else Mode.STUDENT), watch
    if state.hold:
        return (Mode.SKIP_STUDENT if watch is Watch.NOTHING and (compared or not learning) else Mode.HOLD), watch
    if weight == 1.0 and compared and watch is not Watch.PAIR:
        return Mode.STUDENT, watch
    if weight == 0.0 and compared and watch is Watch.NOTHING:
        return Mode.SKIP_STUDENT, watch
    return Mode.BLEND, watch


def modes_of(
    state: SeamState, weight: float | None, mean: float | None, *, compared: bool
) -> dict[tuple[bool, bool], tuple[Mode, Watch]]:
    """Return the mode of every kind of forward: (in training or not, with gradients or not)."""
    kinds = [(training, gradients) for training in (True, False) for gradients in (True, False)]
    return {(t, g): mode_of(state, weight if t else mean, learning=t and g, compared=compared) for t, g in kinds}

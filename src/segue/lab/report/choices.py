"""Choices that were made before the runs: the reference of the comparisons, and each method's settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from segue.lab.report.curves import finite
from segue.reporting.formatting import NOTHING, ScoreFormat, counted, listed
from segue.reporting.records import Result

if TYPE_CHECKING:
    from segue.lab.report.summary import Group, Method

TITLE = "How the settings were chosen"
CHOSEN = ["Method", "Settings", "Held-out score", "Trials", "Of", "Remarks"]
READING = (
    "segue tune chose them before these runs: the settings of each method's best trial, scored on training examples that are "
    "held out, with other seeds than those of the runs."
)


def reference_of(runs: Sequence[Result], given: str | None) -> tuple[str | None, list[str]]:
    """Return the method to compare with, and what is to be said: the given one, else the one that the runs name beforehand."""
    named = sorted({run.run_info.reference for run in runs if run.run_info.reference is not None})
    if given is not None:
        other = [name for name in named if name != given]
        return given, [f"The runs name another reference: {listed(other)}."] if other else []
    if not named:
        return None, []
    if len(named) > 1 or any(run.run_info.reference is None for run in runs):
        return None, [f"The runs do not all name the same reference ({listed(named)}): the best other method is taken."]
    if all(run.run_info.method != named[0] for run in runs):
        return None, [f"The reference {named[0]} has no finished run: the best other method is taken."]
    return named[0], []


def rows(group: Group, score_format: ScoreFormat) -> list[list[str]]:
    """Return what was chosen for each method, in the order of `CHOSEN`; nothing if all settings were chosen by hand."""
    found = {method.label: _choices(method) for method in group.methods}
    if not any(found.values()):
        return []
    return [_row(label, choices, score_format) for label, choices in found.items()]


def reading(group: Group) -> str:
    """Say how settings are chosen, and whether every method had as many trials."""
    trials = {choice.get("trials") for method in group.methods for choice in _choices(method)}
    tuned = all(_choices(method) for method in group.methods)
    equal = "Every method had as many trials." if tuned and len(trials) == 1 else "The methods do not all have as many trials."
    return f"{READING} {equal}"


def _choices(method: Method) -> list[dict[str, Any]]:
    """Return the different choices behind the runs of a method; usually one."""
    found: list[dict[str, Any]] = []
    for run in method.runs:
        if run.run_info.choice and run.run_info.choice not in found:
            found.append(run.run_info.choice)
    return found


def _row(label: str, choices: list[dict[str, Any]], score_format: ScoreFormat) -> list[str]:
    if not choices:
        return [label, "by hand", *[NOTHING] * 4]
    if len(choices) > 1:
        return [label, f"{len(choices)} different choices", *[NOTHING] * 4]
    (choice,) = choices
    settings = ", ".join(f"{path} {value:g}" for path, value in choice["settings"].items())
    steps = [] if choice["steps"] is None else [counted(choice["steps"], "step")]
    remarks = [f"{path} at an edge of the values tried" for path in choice["at_edge"]]
    remarks += [f"{path} not varied" for path in choice["not_varied"]]
    return [
        label,
        settings,
        score_format.value(finite(choice["score"])),
        str(choice["trials"]),
        ", ".join([*steps, counted(choice["seeds"], "seed"), f"{choice['hold_out']} held out"]),
        "; ".join(remarks) or NOTHING,
    ]

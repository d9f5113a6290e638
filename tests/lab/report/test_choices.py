"""Choices made before the runs: the reference that the runs name, and the settings that `segue tune` chose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from segue.lab.report import choices, tables
from segue.lab.report.page import page_data
from segue.lab.report.summary import summarize
from segue.reporting.formatting import NOTHING
from segue.reporting.records import Result
from tests.lab.report.saved_runs import run

CHOICE = {
    "settings": {"recipe.lr": 0.004, "plan.guidance.weight": 4.0},
    "at_edge": ["plan.guidance.weight"],
    "not_varied": [],
    "trials": 8,
    "steps": 125,
    "seeds": 2,
    "hold_out": 259,
    "score": 0.9125,
}


def made(reference: str | None = None, **chosen: dict[str, Any] | None) -> list[Result]:
    """Make up runs that name a reference, and choices by method."""
    return [
        replace(one, run_info=replace(one.run_info, reference=reference, choice=chosen.get(method)))
        for method in ("student_only", "distillation", "dcr")
        for seed in range(5)
        for one in [run(method=method, seed=seed, evaluations=3, sites=1)]
    ]


def references(results: list[Result], **settings: Any) -> set[str]:
    return {one.reference for group in summarize(results, **settings).groups for one in group.comparisons}


def test_the_reference_that_the_runs_name_is_used():
    summary = summarize(made("student_only"))
    assert summary.reference == "student_only"
    assert references(made("student_only")) == {"student_only"}
    assert summary.comparisons == 2  # one per method, not one per method that could have been chosen
    assert "named beforehand" in tables.reading(summary)
    assert not summary.notes
    assert summarize(made()).reference is None


def test_another_reference_than_the_runs_name_is_said():
    summary = summarize(made("student_only"), reference="dcr")
    assert summary.reference == "dcr"
    assert summary.notes == ["The runs name another reference: student_only."]
    assert not summarize(made("student_only"), reference="student_only").notes


def test_runs_that_disagree_name_none():
    one, *rest = made("student_only")
    for other in ("dcr", None):
        mixed = [replace(one, run_info=replace(one.run_info, reference=other)), *rest]
        summary = summarize(mixed)
        assert summary.reference is None
        assert "do not all name the same reference" in summary.notes[0]


def test_a_reference_without_a_finished_run_is_said():
    summary = summarize([one for one in made("student_only") if one.run_info.method != "student_only"])
    assert summary.reference is None
    assert summary.notes == ["The reference student_only has no finished run: the best other method is taken."]


def test_chosen_settings_stand_in_the_table_and_on_the_page():
    other = {**CHOICE, "settings": {"recipe.lr": 0.0005}, "at_edge": [], "not_varied": [], "steps": None, "score": None}
    results = made(student_only=other, distillation=None, dcr=CHOICE)
    summary = summarize(results)
    (group,) = summary.groups
    rows = choices.rows(group, summary.score_format)
    assert rows == [
        ["Student only", "recipe.lr 0.0005", NOTHING, "8", "2 seeds, 259 held out", NOTHING],
        ["KL distillation", "by hand", NOTHING, NOTHING, NOTHING, NOTHING],
        [
            "DCR",
            "recipe.lr 0.004, plan.guidance.weight 4",
            "91.2 %",
            "8",
            "125 steps, 2 seeds, 259 held out",
            "plan.guidance.weight at an edge of the values tried",
        ],
    ]
    written = tables.markdown(summary)
    assert choices.TITLE in written
    assert "| DCR | recipe.lr 0.004, plan.guidance.weight 4 |" in written
    assert "The methods do not all have as many trials." in written
    assert page_data(summary, results, "t")["groups"][0]["chosen"] == rows


def test_equal_trials_are_said_and_untuned_runs_have_no_table():
    tuned = summarize(made(student_only=CHOICE, distillation=CHOICE, dcr=CHOICE))
    assert "Every method had as many trials." in choices.reading(tuned.groups[0])
    assert choices.TITLE not in tables.markdown(summarize(made()))


def test_seeds_with_different_choices_are_said():
    results = made(dcr=CHOICE)
    last = replace(results[-1], run_info=replace(results[-1].run_info, choice={**CHOICE, "trials": 3}))
    (group,) = summarize([*results[:-1], last]).groups
    assert choices.rows(group, summarize(results).score_format)[2][1] == "2 different choices"


@pytest.mark.parametrize("missing", ["choice", "reference"])
def test_results_of_version_0_1_0_have_neither(missing):
    assert getattr(run().run_info, missing) is None

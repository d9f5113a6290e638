"""The paper's own scale: a trial without a GPU, and the hours that the page states."""

from __future__ import annotations

import re
import sys

import pytest
from experiments.paper.runs import runs

from tests.helpers.processes import ROOT

UNITS = {"T": 1e12, "P": 1e15}


def test_a_trial_keeps_the_model_and_the_size_of_the_images():
    found, trial = (runs(folder="data", seeds=1, methods=("dcr_dfg",), trial=value)[0] for value in (False, True))
    assert (trial.task.model.name, trial.task.size) == (found.task.model.name, 224)
    assert (found.task.model.pretrained, trial.task.model.pretrained) == (True, False)
    assert (trial.recipe.steps, trial.batch, trial.teacher.batch) == (2, 2, 2)
    assert [stage.head_only for stage in trial.teacher.stages] == [True, False]
    assert trial.plan == found.plan
    assert trial.task == trial.teacher.task  # the teacher's scores are known when the run begins


def test_the_hours_on_the_page_follow_from_its_operations(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "tools"))
    import paper_cost

    monkeypatch.delitem(sys.modules, "paper_cost")
    page = paper_cost.PAGE.read_text(encoding="utf-8")
    text = page[page.index(paper_cost.BEGIN) : page.index(paper_cost.END)]
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) (\w)FLOPs \| ([\d.]+) (\w)?FLOPs \| ([\d.]+) \|$", text, re.MULTILINE)
    assert len(rows) == 9  # the teacher and eight methods
    total = 0.0
    for name, training, unit, evaluations, other, hours in rows:
        counted = float(training) * UNITS[unit] + float(evaluations) * UNITS.get(other, 1.0)
        assert paper_cost.hours(counted) == pytest.approx(float(hours), abs=0.006), name
        total += counted * (1 if name.startswith("teacher") else paper_cost.SEEDS)
    assert f"| all of them, {paper_cost.SEEDS} seeds | | | {paper_cost.hours(total):.0f} |" in text

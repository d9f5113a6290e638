"""The recipes: what all arms share, and what each is tuned by."""

from __future__ import annotations

from pathlib import Path

from experiments.recipes import runs as recipes

from segue.lab.experiment import Experiment
from segue.lab.report.summary import summarize
from segue.lab.report.tables import columns
from segue.lab.tune import axes_of
from segue.reporting import records as results
from segue.training.evaluation import evaluation_steps
from tests.helpers.processes import ROOT


def test_arms_differ_in_their_plan_and_rate_alone():
    found = Experiment(recipes.__file__).runs()
    assert len(found) == 5 * len(recipes.ARMS)
    first, *others = found[: len(recipes.ARMS)]
    for run in others:
        assert (run.task, run.teacher, run.batch, run.data_fraction) == (first.task, first.teacher, 64, first.data_fraction)
        assert run.recipe.steps == 500
    assert {run.reference for run in found} == {"student_only"}
    assert first.task.load(data_fraction=first.data_fraction).examples == 320
    assert isinstance(first.evaluations, int)
    assert sorted(evaluation_steps(first.evaluations, 500)) == list(range(50, 501, 50))  # tenths of the run


def test_a_part_of_the_arms_can_be_run():
    assert {run.method for run in recipes.runs(seeds=1, only="halo")} == {"halo_50"}


def test_a_local_fit_has_a_rate_of_its_own_to_tune():
    tuned = {run.method: [axis.path for axis in axes_of(run)] for run in recipes.runs(seeds=1)}
    assert tuned["student_only"] == ["recipe.lr"]
    assert tuned["dcr_dfg_kl"] == ["recipe.lr", "plan.guidance.weight", "plan.distill.weight"]
    assert tuned["fit_4x4_jump"] == ["plan.phases.0.lr", "plan.phases.1.lr", "plan.distill.weight"]


def test_the_page_has_the_numbers_of_the_committed_results():
    summary = summarize(results.read_all(Path(recipes.__file__).parent / "results"))
    group = summary.groups[0]
    shown = {column.key: column for column in columns(group, summary.score_format)}
    page = (ROOT / "docs" / "single-experiments.md").read_text(encoding="utf-8")
    assert {len(method.seeds) for method in group.methods} == {5}
    for method in group.methods:
        final, area, early, late = (shown[key].cell(method).text for key in ("final", "area", "flops_1", "flops_2"))
        row = next(line for line in page.splitlines() if line.startswith(f"| {method.label} | ") and "lr 0." in line)
        assert row.endswith(f"| {final} | {area} | {early} | {late} |")

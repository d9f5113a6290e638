"""The recipes: what all arms share, and what each is tuned by."""

from __future__ import annotations

from experiments.recipes import runs as recipes

from segue.lab.experiment import Experiment
from segue.lab.tune import axes_of
from segue.training.evaluation import evaluation_steps


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

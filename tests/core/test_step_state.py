"""The step state: schedule, gate and losses as plain numbers."""

import numpy as np
import pytest

import segue
from segue.core.step_state import checked_total, closed_for_good, closed_in_graphs, progress_at, step_state
from segue.errors import PlanError
from segue.gates import Bernoulli, GumbelSoftmax
from segue.losses import FeatureGuidance
from segue.schedules import Constant, Hold, Linear
from segue.sites import Site
from tests.helpers.tiny import start

HERE = Site("here")


def at(step, total=10, **settings):
    plan = segue.Plan(sites="here", **{"schedule": Linear(), **settings})
    return step_state(plan, [HERE], step, total).sites["here"]


def test_a_blend_has_one_weight_for_training_and_evaluation():
    state = at(3)
    assert (state.alpha, state.weight, state.mean) == (0.7, 1 - 0.7, 1 - 0.7)
    assert not state.closed
    assert at(10).closed


def test_a_coin_has_a_mean_for_evaluation():
    weights = {at(step, gate=Bernoulli()).weight for step in range(1, 10)}
    assert weights == {0.0, 1.0}
    assert at(3, gate=Bernoulli()).mean == 1 - 0.7
    assert at(1, gate=GumbelSoftmax()).mean == pytest.approx(0.184, abs=1e-3)


def test_a_teacher_is_needed_while_guidance_asks_for_it():
    guidance = FeatureGuidance(schedule=Constant(alpha=1.0))
    assert at(10, guidance=guidance).needs_teacher
    assert not at(10).needs_teacher


def test_hold_needs_a_share_of_one():
    assert at(0, schedule=Hold(fraction=0.5)).hold
    assert not at(6, schedule=Hold(fraction=0.5)).hold


def test_a_run_of_unknown_length_stands_at_its_start():
    assert [progress_at(3, None), progress_at(3, 6), progress_at(9, 6)] == [0.0, 0.5, 1.0]
    assert at(3, total=None).alpha == 1.0


def test_a_teacher_is_free_only_if_no_later_step_needs_it():
    rebound = segue.Plan(sites="here", schedule=lambda progress, site: 0.0 if progress < 0.5 else 0.2)
    assert step_state(rebound, [HERE], 2, 10).sites["here"].closed
    assert not closed_for_good(rebound, HERE, 2, 10)
    assert closed_for_good(segue.Plan(sites="here", schedule=Linear(until=0.5)), HERE, 5, 10)


@pytest.mark.parametrize(
    ("step", "total", "first", "last"),
    [(2, 10, 5, 5), (0, 10_000, 7_777, 7_777), (20_000, 30_000, 25_001, 25_001), (0, 35_000, 29_000, 29_002)],
)
def test_a_single_later_step_is_seen_and_in_a_long_run_one_of_a_few(step, total, first, last):
    asked = []

    def schedule(progress, site):
        asked.append(round(progress * total))
        return 0.5 if first <= asked[-1] <= last else 0.0

    assert not closed_for_good(segue.Plan(sites="here", schedule=schedule), HERE, step, total)
    asked.clear()
    first = last = total + 1
    assert closed_for_good(segue.Plan(sites="here", schedule=schedule), HERE, step, total)
    assert len(asked) <= 2 * 10_000
    assert (asked[0], asked[-1]) == (step, total)


def test_compiled_code_closes_sites_in_groups_and_opens_them_at_once():
    closing, seen = [], set()
    for number in range(1, 7):
        seen = closed_in_graphs({f"{i}" for i in range(number)}, seen, sites=6)
        closing.append(len(seen))
    assert closing == [0, 0, 3, 3, 3, 6]
    assert closed_in_graphs({"0", "1"}, seen, sites=6) == {"0", "1"}


@pytest.mark.parametrize("weight", [2.0, -0.1, float("nan"), None, "half"])
def test_a_gate_that_returns_no_weight_is_refused(weight):
    with pytest.raises(PlanError, match="the gate must return a number from 0 to 1, got"):
        at(0, gate=lambda alpha, noise: weight)


@pytest.mark.parametrize("total", [0, -1, 1.5, True, "10"])
def test_a_run_has_a_positive_number_of_steps(total):
    with pytest.raises(PlanError) as error:
        checked_total(total)
    assert str(error.value) == (
        f"total_steps must be a positive integer, got {total!r}.\n"
        "  It is the number of optimizer steps of the run.\n"
        "  Hint: count them: epochs * len(loader) // accumulation."
    )


def test_the_number_of_steps_may_be_a_number_of_numpy():
    handover = start(total_steps=None)
    handover.total_steps = np.int64(4)
    assert handover.total_steps == 4
    assert type(handover.total_steps) is int

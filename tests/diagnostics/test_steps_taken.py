"""What a run really computed, against torch's own counter at every step of it."""

import dataclasses
import itertools

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import segue
from segue.core.steps_taken import LETTERS, StepsTaken, site_of, work_of
from segue.diagnostics.costs import Cost, cost
from segue.errors import PlanError
from segue.gates import Bernoulli
from segue.losses import FeatureGuidance, LogitDistillation
from segue.phases import Phase
from segue.schedules import Adaptive, Linear
from segue.training.tasks import Classification
from tests.helpers.tiny import SITES, Net, batch, constant
from tests.training.fit_cases import Stop, fit
from tests.training.test_guard import BAD, GUARD, STEPS, poisoned, recipe

EAGER = Adaptive(until=0.9, budget=1.0, fastest=0.2, memory=0.01, every=1)  # the sites of Net do not close together
QUICK = segue.Recipe(steps=20, lr=3e-2)
GUIDED = {"sites": SITES, "guidance": FeatureGuidance(schedule=constant(1.0))}


class Marked(Classification):
    """A loss that reads a counter when each step begins."""

    def __init__(self, counter):
        super().__init__()
        self.counter, self.marks = counter, []

    def __call__(self, model, batch):
        self.marks.append(int(self.counter.get_total_flops()))
        return super().__call__(model, batch)


def counted_fit(plan, batches=None, **settings):
    """Train, and return the run with the operations of each of its steps."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = Marked(counter)
        fitted = fit(Net(), plan, batches, loss, evaluations=0, validation=None, **settings)
    marks = [*loss.marks, int(counter.get_total_flops())]
    return fitted, [after - before for before, after in itertools.pairwise(marks)]


def bill(plan, fitted, total=None):
    return cost(
        Net(),
        plan,
        batch(0, size=4),
        total_steps=total or fitted.total_steps,
        loss_fn=Classification(),
        steps_taken=fitted.steps_taken,
    )


class Own:
    """A schedule with a state of its own, as a user writes one."""

    def __init__(self):
        self.calls = 0

    def __call__(self, progress, site):
        return 0.0 if self.calls > 3 * site.index + 4 else 0.5

    def observe(self):
        self.calls += 1

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


ADAPTIVE = {
    "blend": segue.Plan(sites=SITES, guidance=FeatureGuidance(), schedule=EAGER),
    "guided to the end": segue.Plan(**GUIDED, schedule=EAGER),
    "coins and distillation": segue.Plan(**GUIDED, schedule=EAGER, gate=Bernoulli(), distill=LogitDistillation()),
    "after a local fit": segue.Plan(
        sites=SITES,
        guidance=FeatureGuidance(),
        phases=(Phase(name="fit", length=0.3, local=True, task=0.0, reuse=2), Phase(name="rest", schedule=EAGER)),
    ),
    "teachers are released": segue.Plan(sites=SITES, guidance=FeatureGuidance(), schedule=EAGER, release=True),
}


@pytest.mark.parametrize("name", ADAPTIVE)
def test_an_adaptive_run_costs_what_its_steps_cost(name):
    plan = ADAPTIVE[name]
    fitted, real = counted_fit(plan, recipe=QUICK)
    found = bill(plan, fitted)
    assert list(found.per_step) == real
    assert not found.adaptive
    assert "at most" not in str(found)
    slowest = dataclasses.replace(fitted, steps_taken=None)
    if plan.guidance == FeatureGuidance():  # otherwise both sides are needed to the end
        assert sum(real) < bill(plan, slowest).flops
    assert bill(plan, slowest).adaptive
    assert Cost.from_dict(found.to_dict()).flops == pytest.approx(found.flops)


def test_sites_close_one_by_one_and_each_kind_of_step_is_noted_once():
    fitted, _ = counted_fit(ADAPTIVE["blend"], recipe=QUICK)
    spans = fitted.steps_taken.spans
    assert [spans[0][0], spans[-1][1]] == [0, 20]
    assert all(before[1] == after[0] and before[2] != after[2] for before, after in itertools.pairwise(spans))
    closed = [sum(site_of(letter)[0].closed for letter in kind) for _, _, kind in spans]
    assert len(set(closed)) >= 3
    assert closed == sorted(closed)


@pytest.mark.parametrize("schedule", [Linear(until=0.55), EAGER])
@pytest.mark.parametrize("how", ["huge", "nan"])
def test_a_run_whose_guard_went_back_and_raised_alpha_costs_what_its_steps_cost(schedule, how):
    plan = segue.Plan(sites=SITES, guidance=FeatureGuidance(), schedule=schedule)
    fitted, real = counted_fit(plan, poisoned(BAD, how=how), recipe=recipe(GUARD))
    (event,) = fitted.events
    assert event["restored"] < BAD
    found = bill(plan, fitted)
    assert len(real) == STEPS  # steps that were taken back are among them
    assert list(found.per_step) == real
    if schedule != EAGER:
        assert [*fitted.steps_taken.by_step()] == [15, 16, 17, 18]  # half of the steps that were left
        assert bill(plan, dataclasses.replace(fitted, steps_taken=None)).flops < sum(real)


def test_a_run_as_planned_notes_nothing():
    for plan in (segue.Plan(**GUIDED, gate=Bernoulli()), segue.methods.local_fit(sites=SITES), None):
        assert fit(Net(), plan, recipe=recipe(GUARD)).steps_taken is None


def test_a_schedule_of_ones_own_that_adapts_is_counted_too():
    schedule = Own()
    plan = segue.Plan(**GUIDED, schedule=schedule)
    loss = Classification()

    def observed(model, batch):
        schedule.observe()
        return loss(model, batch)

    fitted = fit(Net(), plan, None, observed, steps=20)
    closed = [sum(site_of(letter)[0].closed for letter in kind) for kind in fitted.steps_taken.by_step().values()]
    assert closed == sorted(closed)
    assert set(closed) == {0, 1, 2, 3}


@pytest.mark.parametrize(("tolerance", "most"), [(3.0, 2), (5.0, 3)])
def test_students_that_rest_cost_nothing(tolerance, most):
    phases = (
        Phase(name="fit", length=0.5, local=True, task=0.0, tolerance=tolerance),
        Phase(name="rest", schedule=constant(0.0)),
    )
    plan = segue.Plan(sites=SITES, guidance=FeatureGuidance(), phases=phases)
    fitted, real = counted_fit(plan, recipe=QUICK)
    resting = [sum(site_of(letter)[1] for letter in kind) for kind in fitted.steps_taken.by_step().values()]
    assert max(resting) == most
    assert list(bill(plan, fitted).per_step) == real


@pytest.mark.parametrize("at", [4, 9])
def test_a_resumed_run_knows_its_steps_before(at, tmp_path):
    plan = ADAPTIVE["blend"]
    straight = fit(Net(), plan, None, Stop("error", 99), recipe=QUICK)
    settings = {"recipe": QUICK, "folder": tmp_path, "checkpoint_every": 3}
    with pytest.raises(RuntimeError, match="the power failed"):
        fit(Net(), plan, None, Stop("error", at), **settings)
    resumed = fit(Net(), plan, None, Stop("error", 99), **settings, resume=True)
    assert resumed.steps_taken.spans == straight.steps_taken.spans


def test_every_letter_stands_for_its_flags():
    for number, letter in enumerate(LETTERS):
        site, rests = site_of(letter)
        closed, hold, blends, alone, guided = (bool(number & 1 << place) for place in range(5))
        if (closed and (blends or not alone or hold)) or (blends and alone) or (hold and (blends or alone)):
            continue  # no step has such a site
        assert work_of(site) == (closed, hold, blends, alone, guided)
        assert rests == (number >= 32)


@pytest.mark.parametrize(
    "state",
    [None, 3, [3], [[0, 1]], [[0, 0, "AA"]], [[-1, 2, "AA"]], [[0, 2, "A"]], [[0, 2, "A!"]], [[0, 2, 3]], [[0, 2.0, "AA"]],
     [[0, 5, "AA"], [4, 6, "AA"]], [[0, 10, "AA"]], [[True, 5, "AA"]]],
)  # fmt: skip
def test_forged_steps_are_refused(state):
    taken = StepsTaken(sites=2, total=9)
    taken.load_state_dict([[0, 3, "AB"]])
    with pytest.raises((ValueError, TypeError)):
        taken.load_state_dict(state)
    assert taken.spans == [[0, 3, "AB"]]


def test_the_steps_of_another_run_are_refused():
    with pytest.raises(PlanError) as error:
        cost(Net(), segue.Plan(**GUIDED), batch(0)[0], total_steps=9, steps_taken=StepsTaken(sites=2, total=9))
    assert str(error.value) == (
        "steps_taken must be those of a run with this plan.\n"
        "  They have 2 sites and 9 steps, the plan 3 and 9.\n"
        "  Hint: give the plan and total_steps of the run: segue.cost(..., total_steps=fit.total_steps). Nothing was changed."
    )

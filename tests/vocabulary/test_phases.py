import dataclasses
import math

import pytest
import torch

import segue
from segue.errors import PlanError
from segue.losses import FeatureGuidance, LogitDistillation
from segue.phases import Phase, Rates, alpha_of, at, course, distill_of, ends, frozen, guidance_of, holds, rate, set_rates
from segue.schedules import Constant, Hold, Linear, aggr20
from segue.sites import Site
from tests.helpers.tiny import SITES

SITE = Site("x")
LOCAL = Phase(name="local fit", length=0.2, local=True, lr=4e-3, weight_decay=0.0)
RAMP = Phase(name="handover", length=0.3, schedule=Linear())
AFTER = Phase(name="students alone", guidance=0.05)
THREE = (LOCAL, RAMP, AFTER)


def plan(*phases: Phase, **settings) -> segue.Plan:
    return segue.Plan(
        sites=SITES,
        **{"phases": phases or THREE, "guidance": FeatureGuidance(weight=2.0), "distill": LogitDistillation(), **settings},
    )


def test_every_step_belongs_to_one_phase():
    for total in (1, 7, 10, 333, 1000):
        named = [at(THREE, step / total)[0].name for step in range(total)]
        assert named == sorted(named, key=[phase.name for phase in THREE].index)
        assert sum(name == "local fit" for name in named) == math.ceil(0.2 * total)
    assert at(THREE, 0.35) == (RAMP, pytest.approx(0.5))
    assert at(THREE, 1.0) == (AFTER, 1.0)


def test_a_phase_too_short_for_a_number_does_no_harm():
    for phases in ((Phase(name="all", length=1.0), Phase(name="b", length=1e-7)), (RAMP, AFTER, Phase(name="b", length=1e-17))):
        assert at(phases, 1.0) == (phases[-1], 1.0)
        assert alpha_of(plan(*phases), 1.0, SITE) == 0.0


def test_open_lengths_have_the_rest_in_equal_parts():
    parts = [Phase(name=name, length=length) for name, length in (("a", None), ("b", 0.4), ("c", None))]
    assert ends(parts) == pytest.approx([0.3, 0.7, 1.0])
    assert ends(parts)[-1] == 1.0


def test_alpha_and_losses_of_three_phases():
    points = (0.0, 0.19, 0.2, 0.35, 0.5, 1.0)
    assert [alpha_of(plan(), p, SITE) for p in points] == pytest.approx([1, 1, 1, 0.5, 0, 0])
    assert [holds(plan(), p, SITE) for p in points] == [True, True, False, False, False, False]
    assert [guidance_of(plan(), p, SITE) for p in points] == pytest.approx([2, 2, 2, 1, 0.1, 0.1])
    assert [distill_of(plan(), p, SITE) for p in points] == [0, 0, 1, 1, 1, 1]


def test_a_strength_may_be_a_schedule_of_its_own():
    phase = Phase(name="all", schedule=Linear(until=0.5), guidance=Linear(end=0.5), distill=Constant(alpha=0.25))
    assert guidance_of(plan(phase), 0.5, SITE) == 1.5
    assert distill_of(plan(phase), 0.5, SITE) == 0.25


def test_a_plan_without_phases_is_what_it_was():
    old = segue.Plan(sites=SITES, schedule=Hold(fraction=0.5), guidance=FeatureGuidance(weight=3.0))
    assert [alpha_of(old, p, SITE) for p in (0.0, 0.55)] == [1.0, pytest.approx(0.3)]
    assert guidance_of(old, 0.05, SITE) == pytest.approx(3 * 0.65)
    assert distill_of(old, 0.0, SITE) == 0.0


def test_phases_are_saved_with_the_plan():
    made = plan(Phase(name="a", length=0.5, local=True, lr=Rates(new=1e-2, copied=1e-4), split=4, reuse=2), AFTER)
    assert segue.Plan.from_dict(made.to_dict()) == made
    without = {name: value for name, value in segue.Plan(sites=SITES).to_dict().items() if name != "phases"}
    assert segue.Plan.from_dict(without) == segue.Plan(sites=SITES)  # as 0.1.0 wrote it


@pytest.mark.parametrize(
    ("phases", "settings", "text"),
    [
        ((Phase(name="a", length=0.5),), {}, "lengths of the phases must add up to 1"),
        ((Phase(name="a", length=1.0), Phase(name="b")), {}, "lengths of the phases must add up to 1"),
        ((Phase(name="a", length=0.5), Phase(name="a")), {}, "two phases have the same name"),
        (THREE, {"guidance": None}, "'local fit' is local and has nothing to learn from"),
        (THREE, {"schedule": Linear()}, "Plan(phases=...) and the schedule of its alpha exclude each other"),
        (THREE, {"guidance": FeatureGuidance(schedule=Linear())}, "the schedule of its guidance exclude"),
        (THREE, {"distill": LogitDistillation(schedule=Linear())}, "the schedule of its distill exclude"),
    ],
)
def test_phases_that_do_not_fit_are_refused(phases, settings, text):
    with pytest.raises(PlanError) as caught:
        plan(*phases, **settings)
    assert text in str(caught.value)


def test_a_schedule_that_nobody_would_tell_of_measurements_is_refused():
    class Own:
        def __call__(self, progress: float, site: Site) -> float:
            return 1.0 - progress

        def observe(self, progress: float, similarity: object) -> None: ...

    with pytest.raises(PlanError, match=r"the schedule of the phase 'mine' has observe\(\)"):
        plan(Phase(name="mine", schedule=Own()))
    assert segue.Plan(sites=SITES, schedule=Own()).phases == ()


def test_only_local_phases_reuse_their_batches():
    with pytest.raises(PlanError, match="has split, reuse or tolerance, and is not local"):
        Phase(name="a", reuse=2)


def test_a_phase_has_its_own_curve_and_its_neighbours_share_the_recipes():
    recipe = segue.Recipe(steps=100, lr=1e-3, warmup=0.25)
    assert course(recipe, THREE, 7, 100) == (LOCAL, 7, 20)
    assert course(recipe, THREE, 20, 100) == (recipe, 0, 80)
    assert course(recipe, THREE, 99, 100) == (recipe, 79, 80)
    middle = (RAMP, LOCAL, AFTER)
    assert course(recipe, middle, 10, 100) == (recipe, 10, 30)
    assert course(recipe, middle, 50, 100) == (recipe, 0, 50)
    assert course(recipe, (), 10, 100) == (recipe, 10, 100)
    assert course(None, THREE, 20, 100)[0] is None


def test_rates_and_decay_of_the_groups():
    weight, bias, norm = (torch.zeros(shape, requires_grad=True) for shape in ((2, 2), (2,), (3,)))
    optimizer = torch.optim.AdamW(
        [
            {"params": [weight], "kind": "copied", "weight_decay": 0.05},
            {"params": [bias], "kind": "new", "weight_decay": 0.0},
            {"params": [norm], "kind": "backbone", "weight_decay": 0.0},
        ]
    )
    first = Phase(name="a", length=0.5, lr=Rates(new=1e-2, copied=1e-4), weight_decay=0.0, warmup=0.5)
    recipe = segue.Recipe(steps=8, lr=1e-3, decay="constant")
    set_rates(optimizer, recipe, (first, AFTER), 0, 8)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5e-4, 0.5e-2, 0.5e-2])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.0, 0.0]
    set_rates(optimizer, recipe, (first, AFTER), 4, 8)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3] * 3
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.05, 0.0, 0.0]
    set_rates(optimizer, None, (first, AFTER), 6, 8)  # a framework sets the rate there
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3] * 3


def test_a_fresh_phase_begins_with_an_optimizer_without_state():
    """Moments of a loss with smaller gradients would make the steps of the next phase many times too long."""

    def steps(fresh: bool, gradients=(1e-3,) * 300 + (1.0,) * 300) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.AdamW([weight], lr=1.0, weight_decay=0.0)
        two = LOCAL, Phase(name="students alone", lr=1.0, decay="constant", fresh=fresh)
        found = []
        for step, gradient in enumerate(gradients):
            set_rates(optimizer, None, (dataclasses.replace(two[0], length=0.5), two[1]), step, len(gradients))
            before = weight.item()
            weight.grad = torch.full_like(weight, gradient)
            optimizer.step()
            found.append(before - weight.item())
        return found

    assert steps(fresh=True)[300:] == pytest.approx([1.0] * 300, rel=1e-3)
    assert max(steps(fresh=False)[300:]) > 3
    whole = (Phase(name="all", lr=1.0, fresh=True),)  # the first phase takes a state as it is
    optimizer = torch.optim.AdamW([weight := torch.nn.Parameter(torch.zeros(1))])
    optimizer.state[weight]["known"] = 1
    set_rates(optimizer, None, whole, 0, 8)
    assert optimizer.state[weight] == {"known": 1}


def test_the_decay_of_a_phase_does_not_depend_on_which_parameter_is_first():
    bias, weight = torch.zeros(2, requires_grad=True), torch.zeros(2, 2, requires_grad=True)
    for order in ([bias, weight], [weight, bias]):  # as of AdamW(handover.parameters())
        optimizer = torch.optim.AdamW(order, weight_decay=0.1)
        set_rates(optimizer, None, (Phase(name="a", weight_decay=0.0),), 0, 8)
        assert optimizer.param_groups[0]["weight_decay"] == 0.0


def test_rates_need_groups_by_kind():
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    with pytest.raises(PlanError, match=r"no groups for Rates"):
        set_rates(optimizer, None, (Phase(name="a", lr=Rates(new=1.0)),), 0, 2)


def test_the_rate_is_warmup_then_half_a_cosine():
    phase = Phase(name="a", lr=1e-3, final_lr=1e-6, warmup=1 / 3)
    assert [f"{rate(phase, step, 30):.1e}" for step in (0, 9, 10, 20, 30)] == [
        "1.0e-04",
        "1.0e-03",
        "1.0e-03",
        "5.0e-04",
        "1.0e-06",
    ]
    assert aggr20() == segue.Plan(sites=SITES).schedule


def test_a_rate_of_zero_freezes_one_kind():
    rates = Rates(new=1e-2, copied=0.0)
    assert rates.frozen == {"copied"}
    assert Rates(new=1e-2).frozen == set()
    new, copied = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [new], "kind": "new"}, {"params": [copied], "kind": "copied"}])
    phases = (Phase(name="a", length=0.5, lr=rates), Phase(name="b", lr=1e-3))
    assert frozen(optimizer, None, phases, 0, 4) == [copied]
    assert frozen(optimizer, None, phases, 2, 4) == []
    with pytest.raises(PlanError) as caught:
        frozen(torch.optim.AdamW([{"params": [copied], "kind": "copied"}]), None, phases, 0, 4)
    assert str(caught.value).splitlines()[0] == "nothing trains in the phase 'a'."
    with pytest.raises(PlanError, match="positive"):
        Rates(new=0.0)

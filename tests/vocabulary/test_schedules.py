import itertools
import math

import pytest

import segue
from segue.errors import PlanError
from segue.schedules import (
    Adaptive,
    Constant,
    Cosine,
    Hold,
    Linear,
    PerSite,
    Piecewise,
    Staggered,
    adaptive_at,
    aggr20,
    alpha_at,
    is_adaptive,
    is_hold,
    mean_of,
)
from segue.sites import Site
from tests.helpers.tiny import SITES, Net, batch, optimizer_for, start, train

SITE = Site("blocks.0.attn")
ROW = [Site(f"blocks.{i}.attn", index=i, depth=i, count=4) for i in range(4)]
REQUIRED = {  # what the contracts must give to those without defaults
    Piecewise: {"points": ((0.0, 1.0), (0.5, 0.0))},
    Hold: {"fraction": 0.3},
    PerSite: {"schedules": {"blocks.0.*": Linear()}},
}
REACH_ZERO = [
    aggr20(),
    aggr20(start=0.9),
    Constant(),
    Linear(),
    Linear(until=0.3),
    Cosine(),
    Cosine(until=0.7),
    Hold(fraction=0.1),
    Hold(fraction=0.5, then=Constant()),
    Hold(fraction=1.0),
    Staggered(),
    Staggered(then=Cosine(), order="back", overlap=0.0),
    Staggered(order=(2, 0, 3, 1), overlap=1.0, until=0.4),
    PerSite(schedules={"blocks.{0,1}.attn": Linear(until=0.3)}),
    Adaptive(),
    Hold(fraction=0.3, then=Adaptive(until=1.0)),
]


@pytest.mark.parametrize(
    ("progress", "alpha"),
    [(0, 1.0), (0.05, 0.65), (0.1, 0.3), (0.15, 0.15), (0.2, 0.0), (0.21, 0.0), (1.0, 0.0)],
)
def test_aggr20_is_appendix_a1(progress, alpha):
    assert aggr20()(progress, SITE) == pytest.approx(alpha, abs=1e-15)


@pytest.mark.parametrize(("progress", "rate"), [(0, 0.1), (0.05, 0.4), (0.1, 0.7), (0.15, 0.85), (0.2, 1.0), (1, 1.0)])
def test_theseus_inverse_of_aggr20(progress, rate):
    assert 1 - aggr20(start=0.9)(progress, SITE) == pytest.approx(rate, abs=1e-15)


@pytest.mark.parametrize("total", [1, 7, 20, 100, 999, 1000])
@pytest.mark.parametrize("schedule", REACH_ZERO, ids=repr)
def test_values_are_shares_and_reach_exactly_zero(schedule, total):
    for site in ROW:
        values = [schedule(step / total, site) for step in range(total + 1)]
        assert all(0 <= value <= 1 for value in values)
        assert values[-1] == 0.0
        assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(values))


def test_linear_and_cosine():
    assert Linear(start=0.8, end=0.2, until=0.5)(0.25, SITE) == pytest.approx(0.5)
    assert Linear(start=0.8, end=0.2, until=0.5)(0.5, SITE) == 0.2
    assert Linear(start=0.06, end=0.02)(1.0, SITE) == 0.02  # 0.06 + (0.02 - 0.06) is a little more
    assert Cosine()(0.25, SITE) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert Cosine(until=0.5)(0.25, SITE) == pytest.approx(0.5)


def test_piecewise_jumps_where_two_points_have_the_same_progress():
    jump = Piecewise(points=((0.3, 0.0), (0.3, 1.0)))
    assert [jump(x, SITE) for x in (0.0, 0.2999, 0.3, 1.0)] == [0.0, 0.0, 1.0, 1.0]


def test_piecewise_goes_straight_on_both_sides_of_an_inner_jump():
    jump = Piecewise(points=((0.0, 1.0), (0.5, 0.8), (0.5, 0.2), (1.0, 0.0)))
    assert [jump(x, SITE) for x in (0.25, math.nextafter(0.5, 0), 0.75)] == pytest.approx([0.9, 0.8, 0.1])
    assert jump(0.5, SITE) == 0.2


def test_hold_holds_then_follows_the_rest():
    hold = Hold(fraction=0.5, then=Linear())
    assert [hold(x, SITE) for x in (0, 0.49)] == [1, 1]
    assert hold(0.75, SITE) == pytest.approx(0.5)
    assert is_hold(hold, 0.49, SITE)
    assert not is_hold(hold, 0.5, SITE)
    assert not is_hold(Linear(), 0.0, SITE)


def test_staggered_runs_one_after_the_other():
    front = Staggered(then=Linear(), overlap=0.0)
    assert [front(0.25, site) for site in ROW] == [0, 1, 1, 1]
    assert [front(0.625, site) for site in ROW] == pytest.approx([0, 0, 0.5, 1])
    back = Staggered(then=Linear(), order="back", overlap=0.0)
    assert [back(0.25, site) for site in ROW] == [1, 1, 1, 0]
    own = Staggered(then=Linear(), order=(2, 0, 3, 1), overlap=0.0)
    assert [own(0.5, site) for site in ROW] == [0, 1, 0, 1]
    assert [Staggered(then=Linear(), overlap=1.0)(0.3, site) for site in ROW] == pytest.approx([0.7] * 4)


def test_staggered_overlaps_by_the_given_fraction():
    halves = Staggered(then=Linear(), overlap=0.5)  # windows of 2/5, starting every 1/5
    assert [halves(0.4, site) for site in ROW] == pytest.approx([0, 0.5, 1, 1])


def test_staggered_asks_what_it_wraps_for_progress_from_0_to_1():
    asked = Staggered(then=lambda progress, site: progress, overlap=0.0, until=0.8)
    assert [asked(x, ROW[1]) for x in (0.0, 0.2, 0.3, 0.4, 0.8, 1.0)] == pytest.approx([0, 0, 0.5, 1, 1, 1])


def test_staggered_keeps_the_hold_of_what_it_wraps():
    schedule = Staggered(then=Hold(fraction=0.5, then=Linear()), overlap=0.0)
    assert [is_hold(schedule, 0.3, site) for site in ROW] == [False, True, True, True]


def test_per_site_takes_the_first_pattern_that_matches():
    schedule = PerSite(schedules={"blocks.{0,1}.*": Constant(alpha=0.3), "**": Constant(alpha=0.5)})
    assert [schedule(0, site) for site in ROW] == [0.3, 0.3, 0.5, 0.5]
    assert PerSite(schedules={"head": Constant()})(0.0, SITE) == 1.0
    assert is_hold(PerSite(schedules={"blocks.0.*": Hold(fraction=0.5)}), 0, ROW[0])


@pytest.mark.parametrize("answer", [1.5, -0.1, math.nan, math.inf, None, "half"])
def test_a_users_function_is_checked_and_the_site_named(answer):
    with pytest.raises(PlanError) as error:
        alpha_at(lambda progress, site: answer, 0.25, SITE)
    assert str(error.value) == (
        f"a schedule must return a number from 0 to 1, got {answer!r}.\n"
        "  It is asked for site 'blocks.0.attn' at progress 0.25.\n"
        "  Hint: return alpha, the teacher's share: 1 is the teacher alone, 0 the student alone."
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Constant(alpha=1.1), r"Constant\(alpha=...\) must be a number from 0 to 1, got 1.1."),
        (lambda: Linear(start=-0.1), r"Linear\(start=...\) must be a number from 0 to 1, got -0.1."),
        (lambda: Cosine(until=0.0), r"Cosine\(until=...\) must be a number above 0 and at most 1, got 0.0."),
        (lambda: Piecewise(points=((0.5, 1.0), (0.2, 0.0))), r"The progress of its points is \[0.5, 0.2\]."),
        (lambda: Piecewise(points=((0.0, 1.0), (0.5, 0.5), (1.2, 0.0))), "must be in the order of progress, from 0 to 1."),
        (lambda: Piecewise(points=((0.0, 2.0),)), "In it, item 1 of item 0 is 2.0, of type float."),
        (lambda: Piecewise(points=((math.nan, 0.5),)), r"must be a sequence of pairs \(progress, alpha\) from 0 to 1, got"),
        (lambda: Piecewise(points="x"), r"from 0 to 1, got 'x'."),
        (lambda: Hold(fraction=0.5, then=Linear), r"call the class to make one: Linear\(\)."),
        (lambda: PerSite(schedules={"a": None}), "In it, the value at 'a' is None, of type NoneType."),
        (lambda: Constant(alpha=True), "must be a number from 0 to 1, got True."),
        (lambda: Piecewise(points=()), r"The progress of its points is \[\]."),
        (lambda: Hold(fraction=0.0), r"Hold\(fraction=...\) must be a number above 0 and at most 1, got 0.0."),
        (lambda: Staggered(overlap=1.5), r"Staggered\(overlap=...\) must be a number from 0 to 1, got 1.5."),
        (lambda: Staggered(order="middle"), "must be 'front', 'back' or a sequence of integers, got 'middle'."),
        (lambda: Staggered(order=(0, 0, 1, 2))(0.1, ROW[0]), r"Staggered\(order=\(0, 0, 1, 2\)\) does not fit 4 sites."),
    ],
)
def test_impossible_settings_are_refused(make, says):
    with pytest.raises(PlanError, match=says):
        make()


@pytest.mark.parametrize(
    "settings",
    [
        lambda wrong: {"schedule": wrong},
        lambda wrong: {"schedule": Hold(fraction=0.5, then=Staggered(then=wrong))},
        lambda wrong: {"schedule": PerSite(schedules={"**": wrong})},
        lambda wrong: {"guidance": segue.losses.FeatureGuidance(schedule=wrong)},
        lambda wrong: {"distill": segue.losses.LogitDistillation(schedule=wrong)},
    ],
    ids=["schedule", "inside", "per site", "guidance", "distill"],
)
def test_a_pattern_that_matches_no_site_is_refused_before_anything_changes(settings):
    model = Net()
    before = repr(model)
    wrong = PerSite(schedules={"blocks.0.attn": Linear(), "blocks.7.attn": Linear()})
    with pytest.raises(PlanError) as error:
        segue.replace_(model, segue.Plan(sites=SITES, **settings(wrong)), total_steps=3)
    assert str(error.value) == (
        "the pattern 'blocks.7.attn' of PerSite matches none of the 3 sites.\n"
        "  Nearest names: blocks.0.attn, blocks.1.attn, blocks.2.attn.\n"
        "  Hint: correct the pattern, or leave it out. Nothing was changed."
    )
    assert repr(model) == before


def test_a_schedule_that_adapts_observes_and_is_saved(tmp_path):
    class Eager:
        """Let alpha follow the worst cosine seen so far."""

        def __init__(self) -> None:
            self.alpha = 1.0

        def __call__(self, progress, site):
            return self.alpha

        def observe(self, progress, similarity):
            self.alpha = 0.25
            self.seen = (progress, sorted(similarity))

        def state_dict(self):
            return {"alpha": self.alpha}

        def load_state_dict(self, state):
            self.alpha = state["alpha"]

    schedule = Eager()
    plan = segue.Plan(sites=SITES, schedule=schedule)
    handover = start(plan)
    train(handover, optimizer_for(handover), 1)
    handover.similarity(batch()[0])
    assert schedule.seen == (0.1, ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"])
    train(handover, optimizer_for(handover), 1)
    assert set(handover.alphas.values()) == {0.25}
    with pytest.warns(segue.SegueWarning, match="schedule"):
        segue.save(handover, tmp_path)
    resumed = start(segue.Plan(sites=SITES, schedule=Eager()))
    segue.load_(resumed, tmp_path)
    assert set(resumed.alphas.values()) == {0.25}


def test_the_slowest_course_of_adaptive_waits_and_then_goes_straight_to_its_deadline():
    assert [Adaptive(until=0.4)(x, SITE) for x in (0.0, 0.2, 0.3, 0.4, 1.0)] == [1.0, 1.0, pytest.approx(0.5), 0.0, 0.0]


def test_an_adaptive_schedule_is_found_inside_others_with_its_own_progress():
    inner = Adaptive()
    assert adaptive_at(inner, 0.3, SITE) == (inner, 0.3)
    assert adaptive_at(Hold(fraction=0.2, then=inner), 0.1, SITE) is None
    assert adaptive_at(Hold(fraction=0.2, then=inner), 0.6, SITE) == (inner, pytest.approx(0.5))
    assert adaptive_at(Staggered(then=inner, overlap=0.0), 0.5, ROW[2]) == (inner, 0.0)
    mixed = PerSite(schedules={"blocks.1.*": inner}, otherwise=Linear())
    assert [adaptive_at(mixed, 0.3, site) for site in ROW[:2]] == [None, (inner, 0.3)]
    assert [
        is_adaptive(one) for one in (inner, mixed, Hold(fraction=0.2, then=mixed), Linear(), lambda progress, site: 0.0)
    ] == [
        *(True, True, True),
        *(False, False),
    ]


def test_the_mean_alpha_of_a_run_is_a_schedule_for_its_control():
    history = [{"step": 0, "alpha": 1.0}, {"step": 5, "alpha": 0.4}, {"step": 20, "alpha": 0.0}]
    control = mean_of(history)
    assert control == Piecewise(points=((0.0, 1.0), (0.25, 0.4), (1.0, 0.0)))
    assert segue.Plan.from_dict(segue.Plan(sites="a", schedule=control).to_dict()).schedule == control
    for wrong in ([], [{"step": 0, "alpha": 1.0}], [{"step": 1}], [{"step": 3, "alpha": None}]):
        with pytest.raises(PlanError, match=r"mean_of\(history\) needs the evaluations of a finished run"):
            mean_of(wrong)

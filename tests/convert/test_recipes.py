"""What the settings of a conversion stand for: plan, rates, length; and what is refused before anything is loaded."""

import dataclasses
import json

import pytest

import segue
from segue.convert import parse_student as parse
from segue.convert import recipes
from segue.convert.options import Conversion
from segue.convert.pretrained import open_base
from segue.errors import ConfigError, PlanError
from segue.losses import CosineGuidance, FeatureGuidance, LogitDistillation
from segue.phases import Rates
from tests.convert.small_models import ATTENTION, STUDENT

NEEDED = {"model": "m", "sites": ATTENTION["llama"], "student": STUDENT, "data": "d"}


@pytest.fixture(scope="module")
def llama(base):
    return open_base(str(base("llama")))


def made(llama, **given):
    """Return plan and recipe of settings."""
    settings = recipes.with_defaults(Conversion(**{**NEEDED, **given}), llama.kind)
    plan = recipes.plan_of(settings, llama)
    return plan, recipes.recipe_of(settings, llama, plan)


def test_every_default_can_be_typed():
    for kind in ("causal", "masked", "labels", "encoder"):
        settings = recipes.with_defaults(Conversion(**NEEDED), kind)
        assert parse.method(settings.method)
        assert settings.steps == recipes.STEPS
    given = Conversion(**NEEDED, method="dcr", steps=7)
    assert recipes.with_defaults(given, "causal") == given


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        ({}, Rates(new=1e-2, copied=1e-4, backbone=1e-4 * 0.1)),
        ({"lr": 3e-4}, 3e-4),
        ({"lr": 3e-4, "train": "all"}, Rates(new=3e-4, copied=3e-4, backbone=3e-4 * 0.1)),
        ({"lr": 3e-4, "lr_new": 2e-2}, Rates(new=2e-2, copied=3e-4, backbone=3e-4 * 0.1)),
        ({"lr_new": 2e-2}, Rates(new=2e-2, copied=1e-4, backbone=1e-4 * 0.1)),
        ({"lr": 0.0, "lr_new": 2e-2}, Rates(new=2e-2, copied=0.0, backbone=0.0)),
        ({"lr": 3e-4, "lr_backbone": 3e-4, "train": "all"}, 3e-4),
        ({"lora": 4}, Rates(new=1e-2, copied=1e-4, backbone=1e-4)),
        ({"student": "Reinit"}, 5e-4),
        ({"student": "Reinit", "train": "all"}, Rates(new=5e-4, copied=5e-4, backbone=5e-4 * 0.1)),
    ],
)
@pytest.mark.parametrize("method", ["dcr_dfg", "transfer"])
def test_rates_follow_what_is_copied_and_what_is_given(given, rates, method, llama):
    plan, recipe = made(llama, method=method, **given)
    assert recipe.lr == rates
    if method == "transfer":
        first, then = plan.phases
        assert first.lr == (rates if isinstance(rates, Rates) else Rates(new=rates))
        assert then.lr.of("copied") == pytest.approx(0.3 * first.lr.of("copied"))
        assert then.lr.of("backbone") == pytest.approx(0.3 * first.lr.of("backbone"))
        assert then.lr.new == pytest.approx(0.3 * max(0.1 * first.lr.new, first.lr.of("copied")))
    else:
        assert plan.phases == ()


def test_updates_of_parts_of_a_batch_are_left_out_where_steps_have_several_batches(llama):
    assert made(llama)[0].phases[0].split == 8
    assert made(llama, accumulate=2)[0].phases[0].split == 1
    assert made(llama, shard=True)[0].phases[0].split == 1
    assert made(llama, accumulate=2, method="transfer(split=2)")[0].phases[0].split == 2  # which `fit` refuses


@pytest.mark.parametrize(
    ("warmup", "of_phases", "of_recipe"), [(None, [0.0, 0.1], 0.05), (0.3, [0.3, 0.3], 0.3), (0.0, [0.0, 0.0], 0.0)]
)
def test_the_rate_rises_in_every_phase_that_has_its_own(warmup, of_phases, of_recipe, llama):
    plan, recipe = made(llama, method="transfer", warmup=warmup)
    assert [phase.warmup for phase in plan.phases] == of_phases
    assert recipe.warmup == of_recipe
    plan, recipe = made(llama, method="lolcats(hold=0.5)", warmup=warmup)
    assert all(phase.lr is None for phase in plan.phases)  # they follow the recipe's curve
    assert recipe.warmup == of_recipe


def test_settings_of_version_0_1_0_have_one_rate_for_all():
    old = Conversion.from_dict({**NEEDED, "steps": 3, "lr": 5e-4, "train": "all"})
    assert recipes._rates(old, copied=4, train="all") == 5e-4
    assert recipes._rates(Conversion.from_dict({**NEEDED, "steps": 3, "lr": 5e-4}), copied=4, train="students") == 5e-4


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({"lr_backbone": 1e-3}, "--lr-backbone is of no use here."),
        ({"method": "transfer(lr=1e-3)", "lr_new": 1e-2}, "--lr-new is of no use here."),
        ({"plan": "transfer", "lr": 1e-3}, "--lr is of no use here."),
        ({"plan": "transfer", "warmup": 0.2}, "--warmup is of no use here."),
        ({"plan": "halo", "lr_backbone": 1e-3}, "--lr-backbone is of no use here."),
        ({"lr_new": 0.0}, "Rates(new=...) must be a positive finite number, got 0.0."),
    ],
)
def test_rates_that_nothing_would_train_with_are_refused(given, first, llama, tmp_path):
    if "plan" in given:
        plan = segue.methods.ALL[given["plan"]](sites=ATTENTION["llama"], student=segue.students.WindowedLinear(window=4))
        (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
        given = {**given, "plan": str(tmp_path / "plan.json"), "sites": None, "student": None}
    with pytest.raises((ConfigError, PlanError)) as caught:
        made(llama, **given)
    lines = str(caught.value).splitlines()
    assert lines[0] == first
    assert len(lines) == 3


def test_phases_of_a_plan_in_a_file_take_a_rate_as_the_error_says(llama, tmp_path):
    plan = segue.methods.transfer(sites=ATTENTION["llama"], student=segue.students.WindowedLinear(window=4)).to_dict()
    place = tmp_path / "plan.json"
    place.write_text(json.dumps(plan))
    given = {"plan": str(place), "sites": None, "student": None, "lr": 3e-4}
    with pytest.raises(ConfigError, match='leave --lr out, or .* set their "lr" to null, so that they take --lr'):
        made(llama, **given)
    plan["phases"] = [{**phase, "lr": None} for phase in plan["phases"]]
    place.write_text(json.dumps(plan))
    assert made(llama, **given)[1].lr == 3e-4


def test_a_plan_that_trains_all_has_its_rate_around_the_sites(llama, tmp_path):
    plan = segue.methods.dcr(sites=ATTENTION["llama"], student=segue.students.WindowedLinear(window=4), train="all")
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
    given = {"plan": str(tmp_path / "plan.json"), "sites": None, "student": None, "lr": 3e-4}
    assert made(llama, **given)[1].lr == Rates(new=3e-4, copied=3e-4, backbone=3e-4 * 0.1)
    assert made(llama, **given, lr_backbone=0.0)[1].lr == Rates(new=3e-4, copied=3e-4, backbone=0.0)


def test_students_without_new_parameters_train_the_copied_ones(llama):
    only_new = "transfer(first='new', hold=0.5)"
    assert made(llama, method=only_new)[0].phases[0].lr.copied == 0
    plan, _ = made(llama, method=only_new, student="SlidingWindow(window=4)")
    assert plan.phases[0].lr.copied == 1e-4
    control, _ = made(llama, method=only_new, control=True)
    assert (control.student, control.phases[0].lr.copied) == (segue.students.Softmax(), 1e-4)


def test_a_control_that_has_nothing_to_learn_from_the_original_learns_the_task(llama):
    plain, (control, _) = made(llama)[0], made(llama, control=True)
    assert {phase.task for phase in plain.phases} == {0.0}
    assert (control.guidance, control.distill) == (None, None)
    for before, after in zip(plain.phases, control.phases, strict=True):
        assert (after.task, after.local, after.split) == (1.0, False, 1)
        assert after.name == f"task, not {before.name}"
        assert (after.length, after.lr, after.warmup) == (before.length, before.lr, before.warmup)
    said = recipes.notes(Conversion(**NEEDED, control=True, method="transfer"), control)
    assert said == [
        "control: exact softmax students, trained by the loss of the task, as those of transfer compare with the original, "
        "which they equal; nothing is converted"
    ]
    for method in ("lolcats", "dcr_dfg", "transfer(task=0.5)"):  # these have the task already
        same, _ = made(llama, control=True, method=method)
        assert (same.guidance, same.phases) == (made(llama, method=method)[0].guidance, made(llama, method=method)[0].phases)
        said = recipes.notes(Conversion(**NEEDED, control=True, method=method), same)
        assert said == ["control: exact softmax students, trained in the same way; nothing is converted"]


def test_an_encoder_has_no_control(base):
    with pytest.raises(ConfigError, match="--control is of no use here") as caught:
        made(open_base(str(base("encoder"))), sites=ATTENTION["encoder"], control=True)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, []),
        ({"accumulate": 2}, ["transfer: one update for each batch, not 8, which --accumulate leaves no room for"]),
        ({"shard": True}, ["transfer: one update for each batch, not 8, which --shard leaves no room for"]),
        ({"accumulate": 2, "method": "dcr_dfg"}, []),
        ({"accumulate": 2, "method": "transfer(split=1)"}, []),
    ],
)
def test_fewer_updates_than_the_method_has_are_announced(given, said, llama):
    settings = recipes.with_defaults(Conversion(**{**NEEDED, **given}), "causal")
    plan = recipes.plan_of(settings, llama)
    assert recipes.notes(settings, plan) == said
    assert {phase.split for phase in plan.phases} <= ({1} if given else {1, 8})


@pytest.mark.parametrize(
    ("given", "guidance", "distill"),
    [
        ({}, FeatureGuidance(), LogitDistillation(temperature=1.0)),
        ({"distill": "0.25"}, FeatureGuidance(), LogitDistillation(temperature=1.0, weight=0.25)),
        ({"distill": "LogitDistillation(temperature=2)"}, FeatureGuidance(), LogitDistillation(temperature=2)),
        ({"distill": "none", "method": "transfer(task=1.0)"}, FeatureGuidance(), None),
        ({"guidance": "CosineGuidance(weight=2)"}, CosineGuidance(weight=2), LogitDistillation(temperature=1.0)),
        ({"guidance": "3"}, FeatureGuidance(weight=3), LogitDistillation(temperature=1.0)),
        ({"method": "dcr", "guidance": "0.5"}, FeatureGuidance(weight=0.5), None),
        ({"method": "dcr_dfg", "guidance": "none", "distill": "1"}, None, LogitDistillation(temperature=1.0)),
    ],
)
def test_losses_are_given_by_name_by_weight_or_as_none(given, guidance, distill, llama):
    plan, _ = made(llama, **{"method": "transfer", **given})
    assert (plan.guidance, plan.distill) == (guidance, distill)


def test_a_method_takes_its_settings_and_those_of_a_plan(llama):
    plan, _ = made(llama, method="lolcats(hold=0.3, release=True)")
    assert (plan.phases[0].length, plan.release) == (0.3, True)
    assert made(llama, method="dcr(schedule=Linear(until=0.5))")[0].schedule == segue.schedules.Linear(until=0.5)
    assert made(llama, method="local_fit", lr=1e-3)[0].phases[0].lr == 1e-3
    assert made(llama, method="local_fit")[0].phases[0].lr == 4e-3


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({"sites": None}, "--sites is missing."),
        ({"student": None}, "--student is missing."),
        ({"plan": "plan.json"}, "--plan and --sites exclude each other."),
        ({"plan": "plan.json", "sites": None, "student": None, "method": "dcr"}, "--plan and --method exclude each other."),
        ({"plan": "plan.json", "sites": None, "student": None, "train": "all"}, "--plan and --train exclude each other."),
        ({"plan": "plan.json", "sites": None, "student": None, "lora": 2}, "--plan and --lora exclude each other."),
        ({"samples": 4}, "--samples needs --data self."),
        ({"sampling_top_p": 0.5}, "--sampling-top-p needs --data self."),
        ({"lora": 2, "train": "all"}, "--lora and --train all exclude each other."),
    ],
)
def test_what_is_missing_or_said_twice_is_refused(given, first):
    with pytest.raises(ConfigError) as caught:
        recipes.require_complete(Conversion(**{**NEEDED, **given}))
    lines = str(caught.value).splitlines()
    assert lines[0] == first
    assert len(lines) == 3
    recipes.require_complete(Conversion(**NEEDED))


def test_a_plan_is_read_from_its_file(llama, tmp_path):
    plan = segue.methods.halo(sites=ATTENTION["llama"], student=segue.students.WindowedLinear(window=4))
    place = tmp_path / "plan.json"
    place.write_text(json.dumps(plan.to_dict()))
    found, recipe = made(llama, plan=str(place), sites=None, student=None, lr=1e-3)
    assert found == plan
    assert recipe.lr == 1e-3
    place.write_text(json.dumps({"format": 99}))
    with pytest.raises(PlanError, match="format 99"):
        made(llama, plan=str(place), sites=None, student=None)
    with pytest.raises(ConfigError, match="there is no plan"):
        made(llama, plan=str(tmp_path / "nowhere.json"), sites=None, student=None)


@pytest.mark.parametrize("student", [STUDENT, "Reinit"])
def test_what_a_plan_replaces_is_trained_as_without_a_plan(student, llama):
    usual, _ = made(llama, student=student)
    staggered = segue.Plan(sites=usual.sites, student=usual.student, schedule=segue.schedules.Constant(alpha=0.5))
    assert recipes.by_default(staggered, llama) == usual
    untrained = dataclasses.replace(staggered, train="all")
    assert recipes.by_default(untrained, llama) is untrained
    classifier = dataclasses.replace(llama, kind="labels")
    assert recipes.by_default(staggered, classifier) is staggered

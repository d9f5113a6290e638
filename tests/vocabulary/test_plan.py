import dataclasses
import json

import pytest
from torch import nn

import segue
from segue import gates, losses, methods, schedules, students
from segue.errors import PlanError
from segue.plan import Plan
from segue.settings import unsaved

WRAPPED = Plan(
    sites=["a.*", "re:b"],
    schedule=schedules.Staggered(
        then=schedules.PerSite(schedules={"a.0": schedules.Hold(fraction=0.2)}), order=(1, 0), overlap=0.25
    ),
    guidance=losses.OnTeacherStream(then=losses.CosineGuidance(weight=0.5, schedule=schedules.Cosine())),
    gate=gates.GumbelSoftmax(temperature=0.7),
    train="all",
    seed=3,
)


@pytest.mark.parametrize("plan", [*(method(sites="x") for method in methods.ALL.values()), WRAPPED])
def test_a_plan_survives_json(plan):
    data = json.loads(json.dumps(plan.to_dict()))
    assert Plan.from_dict(data) == plan
    assert unsaved(data) == []


def test_every_built_in_is_a_frozen_keyword_only_dataclass():
    rooms = (gates, schedules, losses, students)
    built = [x for room in rooms for x in vars(room).values() if isinstance(x, type) and x.__module__.startswith("segue.")]
    public = [x for x in built if callable(x) and "__call__" in vars(x)]
    assert len(public) >= 15
    for kind in public:
        assert kind.__dataclass_params__.frozen, kind
        positional = [field.name for field in dataclasses.fields(kind) if not field.kw_only]
        assert positional == (["name"] if kind is students.FlaLayer else []), kind  # FlaLayer("GatedDeltaNet") names a layer


def test_a_users_function_leaves_only_its_name():
    def my_student(teacher, site):
        return nn.Identity()

    plan = Plan(sites="x", student=my_student)
    data = plan.to_dict()
    assert unsaved(data) == ["student (test_a_users_function_leaves_only_its_name.<locals>.my_student)"]
    with pytest.raises(PlanError) as error:
        Plan.from_dict(data)
    assert str(error.value) == (
        "plan.student cannot be rebuilt from a file.\n"
        "  It is your own 'test_a_users_function_leaves_only_its_name.<locals>.my_student', and only its name is saved.\n"
        "  Hint: pass it again: segue.load_(..., student=...) or Plan.from_dict(data, student=...)."
    )
    assert Plan.from_dict(data, student=my_student) == plan


def test_a_plan_of_another_version_is_refused():
    data = Plan(sites="x").to_dict()
    with pytest.raises(PlanError) as error:
        Plan.from_dict({**data, "sights": "x"})
    assert str(error.value) == (
        "Plan has no setting 'sights'.\n  Nearest names: sites.\n  Hint: another version may have written it."
    )
    with pytest.raises(PlanError) as error:
        Plan.from_dict({**data, "format": 99})
    assert str(error.value) == (
        "the plan has format 99.\n  This version of Segue reads format 1.\n  Hint: read it with the version that wrote it."
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"train": "head"}, "The choices are 'students' and 'all'"),
        ({"backbone": "frozen"}, "The choices are 'eval' and 'train'"),
        ({"unreached": "warn"}, "The choices are 'error' and 'ignore'"),
        ({"gate": segue.gates.Blend}, r"call the class to make one: Blend\(\)"),
        ({"schedule": 0.5}, r"Plan\(schedule=...\) must be a function \(progress, site\) -> alpha, got 0.5."),
        ({"guidance": "dfg"}, r"Plan\(guidance=...\) must be a function \(teacher, student, mask\) -> loss, got 'dfg'."),
        ({"student": "Softmax"}, r"Plan\(student=...\) must be a function \(teacher, site\) -> module, got 'Softmax'."),
        (
            {"student": nn.Bilinear(2, 2, 2)},
            r"Plan\(student=...\) must be a function \(teacher, site\) -> module, got a Bilinear.",
        ),
        ({"gate": None}, r"Plan\(gate=...\) must be a function \(alpha, noise\) -> weight, got None."),
        ({"release": "no"}, r"Plan\(release=...\) must be True or False, got 'no'."),
        ({"teacher_gradient": 1}, r"Plan\(teacher_gradient=...\) must be True or False, got 1."),
        ({"seed": 1.5}, r"Plan\(seed=...\) must be an integer of 64 bits, got 1.5."),
        ({"train": "al"}, "Hint: write 'all'."),
        ({"distill": lambda t, s: 0}, "must be a loss on the outputs of the model"),
    ],
)
def test_impossible_plans_are_refused(settings, says):
    with pytest.raises(PlanError, match=says):
        Plan(sites="x", **settings)


def test_a_plan_prints_its_configuration():
    assert "schedule=Piecewise(points=((0.0, 0.9), (0.1, 0.3), (0.2, 0.0)))" in repr(methods.theseus("x"))

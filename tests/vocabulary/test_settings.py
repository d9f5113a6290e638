"""Settings as plain data: explicit kinds, former names, and nothing of the user's own."""

import copy
import dataclasses
import json
import pkgutil
from dataclasses import dataclass
from importlib import import_module

import pytest

import segue
from segue import data, gates, lab, losses, plan, schedules
from segue.errors import ConfigError, PlanError
from segue.lab import config
from segue.settings import DROPPED_PREFIXES, RENAMED_FIELDS, RENAMED_KINDS, Serializer, first_names, unsaved
from tests.compatibility import RENAMED, V0_1_0
from tests.helpers.tiny import SITES, start

KINDS = {**plan.SERIALIZER.kinds, **config.SERIALIZER.kinds}
NOT_SETTINGS = {"Change", "Tuning", "Layout", "Preset", "Scale"}  # they make configurations, or read files, and are in none


def is_settings(made, room):
    """Tell settings by their form: a public dataclass whose fields are given by keyword, or that is called."""
    if not (isinstance(made, type) and dataclasses.is_dataclass(made) and made.__module__.startswith(room)):
        return False
    by_keyword = all(f.kw_only for f in dataclasses.fields(made))
    return not made.__name__.startswith("_") and (by_keyword or "__call__" in vars(made))


@pytest.mark.parametrize("room", plan.ROOMS.values(), ids=list(plan.ROOMS))
def test_every_public_dataclass_of_a_plan_has_a_kind(room):
    """A class that is missing in `__all__` would be missing in every saved plan, without an error."""
    own = {made for name, made in vars(room).items() if is_settings(made, room.__name__) or name == "Span"}
    assert own
    assert own <= set(plan.SERIALIZER.kinds.values())


@pytest.mark.parametrize("room", [data, lab])
def test_every_public_dataclass_of_a_run_has_a_kind(room):
    modules = [import_module(found.name) for found in pkgutil.iter_modules(room.__path__, f"{room.__name__}.")]
    own = {made for module in modules for made in vars(module).values() if is_settings(made, room.__name__)}
    own = {made for made in own if made.__name__ not in NOT_SETTINGS}
    assert len(own) > 6
    assert own <= set(config.SERIALIZER.kinds.values())


def kinds_in(data):
    if isinstance(data, dict):
        here = {data["kind"]} if isinstance(data.get("kind"), str) else set()
        return here.union(*map(kinds_in, data.values()))
    return set().union(*map(kinds_in, data)) if isinstance(data, list) else set()


def test_every_kind_of_version_0_1_0_has_a_class():
    files = [json.loads((V0_1_0 / name).read_text(encoding="utf-8")) for name in ("plans.json", "run_configs.json")]
    written = {RENAMED_KINDS.get(kind, kind) if kind not in KINDS else kind for file in files for kind in kinds_in(file)}
    assert len(written) > 50
    assert {kind for kind in written if kind not in KINDS and RENAMED.get(kind, kind) is not None} == set()


def test_no_setting_has_the_name_of_a_mark():
    for kind, made in KINDS.items():
        assert {"kind", "unsaved", "mapping", "format"}.isdisjoint(f.name for f in dataclasses.fields(made)), kind


@dataclass(frozen=True, kw_only=True)
class Gentle(gates.Blend):
    """A user's own gate, made from one of Segue's."""

    temperature: float = 1.0


def test_a_users_own_dataclass_leaves_its_name_in_a_plan_and_its_settings_in_a_run():
    written = plan.encode(Gentle(temperature=2.0))
    assert written == {"unsaved": "Gentle"}
    assert config.SERIALIZER.encode(Gentle(temperature=2.0)) == {"unsaved": "Gentle", "temperature": 2.0}
    assert unsaved({"gate": written, "sites": {"mapping": {"a": written}}}) == ["gate (Gentle)", "sites.a (Gentle)"]
    with pytest.raises(PlanError) as error:
        plan.decode({"kind": "schedules.Hold", "fraction": 0.5, "then": written}, "plan.schedule")
    assert str(error.value) == (
        "plan.schedule.then cannot be rebuilt from a file.\n"
        "  It is your own 'Gentle', and only its name is saved.\n"
        "  Hint: pass it again: segue.load_(..., schedule=...) or Plan.from_dict(data, schedule=...)."
    )


@dataclass
class Awkward:
    """A student of a user: a field without a value, one that is itself, and names that mean something in a file."""

    cache: dict = dataclasses.field(init=False)
    mapping: int = 3
    unsaved: int = 7

    def __post_init__(self):
        self.me = self

    def __call__(self, teacher, site):
        return copy.deepcopy(teacher)


def test_an_awkward_dataclass_of_a_user_is_finalized_and_refused_by_name():
    handover = start(segue.Plan(sites=SITES, student=Awkward()), total_steps=1)
    assert handover.finalize_(force=True).segue["plan"]["student"] == {"unsaved": "Awkward"}
    for damaged in ({"unsaved": "Awkward", "mapping": 3}, {"mapping": [1]}, {"kind": "students.Library"}):
        with pytest.raises(segue.SegueError):
            plan.decode(damaged, "plan.student")


@dataclass(frozen=True, kw_only=True)
class NewLayer:
    name: str
    settings: object = None


@dataclass(frozen=True, kw_only=True)
class NewRun:
    evaluations: int
    layer: NewLayer


NEW = Serializer(kinds={"students.FlaLayer": NewLayer, "Run": NewRun}, error=ConfigError, hint="")
WRITTEN = {
    "kind": "Run",
    "looks": 3,
    "layer": {"kind": "students.Library", "name": "fla:X", "settings": {"mapping": {"kind": [1]}}},
}


def test_former_names_are_read_and_a_rename_leaves_the_hashed_data_as_it_was():
    run = NEW.decode(WRITTEN, "config")
    assert run == NewRun(evaluations=3, layer=NewLayer(name="X", settings={"kind": (1,)}))
    assert NEW.encode(run)["evaluations"] == 3
    assert NEW.encode(run)["layer"]["kind"] == "students.FlaLayer"
    assert first_names(NEW.encode(run)) == WRITTEN


def test_what_is_renamed_exists_under_its_new_name_or_still_under_its_old_one():
    for old, new in RENAMED_KINDS.items():
        assert old in KINDS or new in KINDS
    for kind, renamed in RENAMED_FIELDS.items():
        fields = {f.name for f in dataclasses.fields(KINDS[kind])}
        for old, new in renamed.items():
            assert old in fields or new in fields, (kind, old)
    assert set(DROPPED_PREFIXES) <= set(RENAMED_KINDS.values())


def test_a_file_can_name_only_segues_own_kinds():
    written = segue.Plan(sites="x").to_dict()
    for evil in ("os.system", "gates.Noise_", "plan.Plan", "Run", "__builtins__.exec", ["gates.Blend"], None):
        with pytest.raises(PlanError, match="which is not one of Segue's"):
            segue.Plan.from_dict({**written, "gate": {"kind": evil}})
    with pytest.raises(PlanError) as error:
        segue.Plan.from_dict({**written, "gate": {"kind": "gates.Gumbel"}})
    assert str(error.value) == (
        "plan.gate has the kind 'gates.Gumbel', which is not one of Segue's.\n"
        "  Nearest names: gates.GumbelSoftmax.\n"
        "  Hint: another version of Segue may have written it."
    )
    with pytest.raises(PlanError) as error:
        segue.Plan.from_dict({**written, "gate": {"kind": "gates.GumbelSoftmax", "temprature": 1}})
    assert str(error.value) == (
        "gates.GumbelSoftmax has no setting 'temprature'.\n"
        "  Nearest names: temperature.\n"
        "  Hint: another version may have written it."
    )


def test_mappings_lists_and_nested_settings_come_back():
    schedule = schedules.PerSite(schedules={"a.*": schedules.Hold(fraction=0.2), "b": schedules.Cosine()})
    for part in (
        schedule,
        losses.OnTeacherStream(then=losses.CosineGuidance(schedule=schedule)),
        (gates.Blend(), None, "x", 1.5),
    ):
        assert plan.decode(json.loads(json.dumps(plan.encode(part))), "part") == part

"""Configurations: written down, rebuilt, hashed, and never executed."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

import segue
from segue.data import Crop, Digits, Idx
from segue.errors import ConfigError, PlanError
from segue.lab import presets, variants
from segue.lab.config import Choice, Stage, Teacher, changed, config_hash, from_dict, to_dict
from segue.lab.models import SmallViT, Timm
from segue.students import Adapter
from segue.training.recipe import Recipe
from tests.helpers import tiny_runs
from tests.helpers.processes import FreshProcess

PRESETS = {
    "demo": presets.demo(),
    "small": presets.small("data/fashion-mnist"),
    "small, to choose by": presets.small("data/fashion-mnist", hold_out=2000),
    "paper": presets.paper(),
    "paper, from a folder": presets.paper(folder="data/cifar", download=True, precision="float32"),
    "minilm": presets.minilm("models/minilm", "data/train.tsv", "data/dev.tsv"),
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("variant", variants.ALL)
def test_every_preset_and_method_survives_being_saved(preset, variant):
    run = PRESETS[preset].run(variants.ALL[variant], seed=3, group="20 % of the data", data_fraction=0.2)
    again = from_dict(json.loads(json.dumps(to_dict(run))))
    assert again == run
    assert repr(again) == repr(run)
    assert config_hash(again) == config_hash(run)
    assert from_dict(to_dict(run.teacher)) == run.teacher


def hashes():
    runs = [preset.run(variant, seed=1) for preset in PRESETS.values() for variant in variants.ALL.values()]
    return [[config_hash(run), config_hash(run.teacher)] for run in runs]


def write_hashes(path):
    Path(path).write_text(json.dumps([hash("of a string"), hashes()]))


@pytest.mark.processes
def test_hashes_are_the_same_in_every_process_and_differ_between_methods(tmp_path):
    FreshProcess(write_hashes, str(tmp_path / "hashes"), log=tmp_path / "log").check()
    salted, found = json.loads((tmp_path / "hashes").read_text())
    assert found == hashes()
    assert salted != hash("of a string") or "PYTHONHASHSEED" in os.environ  # that process hashes strings in another way
    assert len({run for run, _ in found}) == len(found)
    assert len({teacher for _, teacher in found}) == len({config_hash(preset.teacher) for preset in PRESETS.values()}) == 6


def test_names_for_people_do_not_change_the_hash():
    run = tiny_runs.config()
    names = {"experiment": "other", "method": "mine", "label": "Mine", "group": "5 % of the data", "reference": "dcr"}
    choice = Choice(settings={"recipe.lr": 0.5}, trials=3, seeds=1, hold_out=10, score=0.9)
    for name, value in [*names.items(), ("choice", choice)]:
        assert config_hash(dataclasses.replace(run, **{name: value})) == config_hash(run), name


OTHER = {  # another valid value where half, twice or not would make no sense
    "adapter": Adapter(inside=4),
    "teacher_gradient": True,
    "epochs": None,
    "decay": "constant",
    "precision": "bf16",
    "on_nan": "skip",
    "train": "all",
    "backbone": "train",
    "unreached": "ignore",
    "sites": "blocks.*.mlp",
    "source": Idx(folder="data"),
    "model": Timm(name="vit_tiny_patch16_224"),
    "augment": Crop(pad=1),
    "student": lambda teacher, site: teacher,
    "gate": segue.gates.Bernoulli(),
    "schedule": segue.schedules.Linear(),
    "guidance": None,
    "distill": segue.losses.LogitDistillation(),
    "plan": segue.methods.fitnets(sites="blocks.*.attn"),
    "stages": (Stage(recipe=Recipe(steps=2)),),
    "betas": (0.9, 0.99),
    "size": 16,
    "mean": (0.5,),
    "std": (0.5,),
    "data_fraction": 0.5,
    "evaluations": (1, 2),
    "diagnostics": (),
    "guard": segue.Guard(),
    "ema": segue.Ema(),
    "early_stopping": segue.EarlyStopping(),
    "phases": (segue.phases.Phase(name="all"),),
    "reference": "dcr",
    "weights": "kept.safetensors",
    "choice": Choice(settings={}, trials=3, seeds=1, hold_out=10, score=None),
}


def settings_of(value, path=""):
    """Yield the path of every setting inside a configuration with another value for it."""
    for field in dataclasses.fields(value):
        held, place = getattr(value, field.name), f"{path}{field.name}"
        if field.name in OTHER and OTHER[field.name] != held:
            yield place, OTHER[field.name]
        if field.name in ("recipe", "task", "teacher", "model", "plan"):
            yield from settings_of(held, f"{place}.")
        elif field.name in OTHER:
            continue
        elif isinstance(held, bool):
            yield place, not held
        elif isinstance(held, int | float):
            yield place, held + 1 if isinstance(held, int) else held / 2 + 0.01
        else:
            assert isinstance(held, str), place
            yield place, held + "x"


def test_anything_else_changes_the_hash():
    run = tiny_runs.config()
    names = {"experiment", "method", "label", "group", "reference", "choice", "alone"}
    seen = {config_hash(run): "nothing"}
    paths = []
    for path, other in settings_of(run):
        if path in names:
            continue
        found = config_hash(changed(run, path, other))
        assert found not in seen, f"{path} has the hash of {seen.get(found)}"
        seen[found] = path
        paths.append(path)
    wanted = {"recipe.lr", "recipe.seed", "recipe.shard", "plan.seed", "plan.gate", "task.label_smoothing", "task.model.depth"}
    assert wanted | {
        "teacher.stages",
        "teacher.seed",
        "teacher.task.hold_out",
        "batch",
        "data_fraction",
        "evaluations",
        "seed",
    } <= set(paths)
    assert len(paths) > 40


def test_a_setting_that_was_added_later_counts_once_it_is_used():
    per_head, width = (
        changed(tiny_runs.config(), "plan.student", segue.students.Fourier(across=across)) for across in ("head", "width")
    )
    assert from_dict(to_dict(width)) == width
    assert config_hash(width) != config_hash(per_head)


def test_the_stages_of_a_teacher_count():
    teacher = tiny_runs.TEACHER
    other = dataclasses.replace(teacher, stages=(*teacher.stages[:1], Stage(recipe=Recipe(steps=5, lr=0.011))))
    swapped = dataclasses.replace(teacher, stages=teacher.stages[::-1])
    assert len({config_hash(each) for each in (teacher, other, swapped)}) == 3


# Nothing foreign


@pytest.mark.parametrize("kind", ["os.system", "subprocess.Popen", "eval", "Path", "type", "ImageTask.load", "", None, 7])
def test_only_our_own_kinds_are_rebuilt(kind, tmp_path):
    mark = tmp_path / "executed"
    data = to_dict(tiny_runs.config())
    for place in ("task", "teacher", "recipe"):
        with pytest.raises(ConfigError, match="which is not one of Segue's"):
            from_dict({**data, place: {"kind": kind, "args": [f"touch {mark}"], "shell": True}})
    broken = {**data, "plan": {**data["plan"], "gate": {"kind": kind, "command": f"touch {mark}"}}}
    with pytest.raises(PlanError, match="which is not one of Segue's"):
        from_dict(broken)
    assert not mark.exists()


def test_a_wrong_kind_or_setting_gets_the_nearest_names():
    with pytest.raises(ConfigError, match="Nearest names: Recipe"):
        from_dict({"kind": "Recipee", "steps": 3})
    with pytest.raises(ConfigError, match="Recipe has no setting 'step'") as caught:
        from_dict({"kind": "Recipe", "step": 3})
    assert "Nearest names: steps" in str(caught.value)
    assert "another version" in str(caught.value)


def test_parts_of_ones_own_are_named_and_not_rebuilt():
    run = tiny_runs.config(plan={"student": lambda teacher, site: teacher})
    data = to_dict(run)
    assert data["plan"]["student"]["unsaved"].endswith("<lambda>")
    with pytest.raises(PlanError, match="plan.student cannot be rebuilt from a file"):
        from_dict(data)
    mine = tiny_runs.config(task=dataclasses.replace(tiny_runs.TASK, source=lambda: Digits()()))
    with pytest.raises(ConfigError, match="segue grid"):
        from_dict(to_dict(mine))


def test_a_class_of_ones_own_is_not_taken_for_ours_of_the_same_name():
    own = dataclasses.make_dataclass("Digits", [], frozen=True)
    own.__call__ = lambda self: Digits()()
    mine = tiny_runs.config(task=dataclasses.replace(tiny_runs.TASK, source=own()))
    assert config_hash(mine) != config_hash(tiny_runs.config())
    with pytest.raises(ConfigError):
        from_dict(to_dict(mine))


# Changes and names


def test_one_setting_is_changed_by_its_path_and_nothing_else():
    run = tiny_runs.config()
    other = changed(run, "task.model.depth", 5)
    assert other.task.model == SmallViT(depth=5, width=16, heads=2)
    assert dataclasses.replace(other, task=run.task) == run
    assert changed(run, "evaluations", [1, 2]).evaluations == (1, 2)
    assert changed(run, "recipe.betas", [0.8, 0.9]).recipe.betas == (0.8, 0.9)


@pytest.mark.parametrize(("path", "nearest"), [("recipe.lrr", "lr"), ("receipt.lr", "recipe"), ("recipe.lr.x", "There are no")])
def test_a_setting_that_does_not_exist_is_refused(path, nearest):
    with pytest.raises(ConfigError, match="has no setting") as caught:
        changed(tiny_runs.config(), path, 1)
    assert nearest in str(caught.value)


def test_a_value_that_makes_no_sense_is_refused_as_in_a_recipe():
    with pytest.raises(ConfigError, match="must be a positive finite number or a Rates, got -1"):
        changed(tiny_runs.config(), "recipe.lr", -1.0)
    with pytest.raises(ConfigError):
        changed(tiny_runs.config(), "recipe.lr", "fast")


def test_the_name_of_a_run_is_the_name_of_a_folder():
    names = [
        tiny_runs.config().name,
        tiny_runs.config("dcr", seed=2, group="20 % of the data").name,
        tiny_runs.config(group="../../etc/passwd").name,
        tiny_runs.config(group="lr 0.001, weight decay 0").name,
    ]
    assert names[:2] == ["dcr_dfg-seed0", "dcr-20_%_of_the_data-seed2"]
    assert all("/" not in name and Path(name).name == name for name in names)
    assert len(set(names)) == len(names)


def test_a_teacher_is_shared_by_the_methods_and_seeds_of_a_preset():
    runs = [PRESETS["demo"].run(variant, seed=seed) for variant in variants.PAPER for seed in (0, 1)]
    assert len({config_hash(run.teacher) for run in runs}) == 1
    assert isinstance(runs[0].teacher, Teacher)

"""The Python surface: what dir(), an editor and a mistyped keyword show."""

import inspect
import typing
from importlib import import_module

import pytest

import segue
from segue.errors import ArgumentError
from segue.plan import Plan, PlanKeywords
from tests.helpers.processes import run_python

ROOMS = [name for name in segue.__all__ if inspect.ismodule(getattr(segue, name))]
MODULES = ["segue", *(f"segue.{name}" for name in (*ROOMS, "sites", "plan", "data", "checkpoint", "convert", "integrations"))]
MODULES += [f"segue.integrations.{name}" for name in ("transformers", "lightning", "peft")]


@pytest.mark.parametrize("name", MODULES)
def test_dir_shows_public_names_and_nothing_else(name):
    module = import_module(name)
    shown = {one for one in dir(module) if not (one.startswith("__") and one.endswith("__"))}
    assert shown == {*module.__all__}
    assert all(hasattr(module, one) for one in shown)


@pytest.mark.processes
def test_dir_stays_clean_when_everything_is_imported():
    """Submodules become attributes of their package; dir() does not show them."""
    code = f"""
import importlib, pkgutil, segue
for found in pkgutil.walk_packages(segue.__path__, "segue."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
for name in {MODULES}:
    module = importlib.import_module(name)
    assert set(dir(module)) <= set(module.__all__), (name, dir(module))
"""
    run_python("-c", code)


def test_a_method_shows_every_setting_of_a_plan():
    hints = typing.get_type_hints(Plan, include_extras=True)
    assert typing.get_type_hints(PlanKeywords, include_extras=True) == {k: v for k, v in hints.items() if k != "sites"}
    for made in segue.methods.ALL.values():
        first, *_, last = inspect.signature(made).parameters.values()
        assert (first.name, first.kind) == ("sites", first.POSITIONAL_OR_KEYWORD)
        assert typing.get_args(typing.get_type_hints(made)[last.name]) == (PlanKeywords,)


@pytest.mark.parametrize("name", segue.methods.names())
def test_a_method_takes_its_sites_by_position(name):
    made = getattr(segue.methods, name)
    assert made("blocks.*.attn", seed=3) == made(sites="blocks.*.attn", seed=3)


MISTYPED = [
    (lambda: Plan(sites="x", shedule=None), "Plan() has no argument 'shedule'.\n  Nearest names: schedule.", "write schedule="),
    (lambda: segue.methods.dcr("x", gat=None), "dcr() has no argument 'gat'.\n  Nearest names: gate.", "write gate= instead"),
    (lambda: segue.methods.lolcats("x", holds=1), "lolcats() has no argument 'holds'.\n  Nearest names: hold.", "write hold="),
    (lambda: segue.Recipe(step=3), "Recipe() has no argument 'step'.\n  Nearest names: steps", "write steps= instead"),
    (lambda: segue.replace_(None, None, total_step=1), "replace_() has no argument 'total_step'.", "write total_steps="),
    (lambda: segue.gates.Blend(temperature=1), "Blend() has no argument 'temperature'.\n  It takes none", "help(Blend)"),
    (lambda: segue.students.WindowedLinear(windows=1), "WindowedLinear() has no argument 'windows'.", "write window="),
]


@pytest.mark.parametrize(("call", "begins", "hint"), MISTYPED, ids=[begins.partition(")")[0] for _, begins, _ in MISTYPED])
def test_a_mistyped_keyword_gets_the_nearest_one(call, begins, hint):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert isinstance(caught.value, TypeError)
    text = str(caught.value)
    assert text.startswith(begins)
    assert text.count("\n") == 2
    assert f"\n  Hint: {hint}" in text
    assert text.endswith("Nothing was changed.")


def test_names_lists_methods_and_students():
    assert segue.methods.names() == list(segue.methods.ALL)
    students = segue.students.names()
    assert {"Reinit", "LinearAttention", "FlaLayer", "Drop"} <= {*students}
    assert not {"LeastSquares", "AttentionSpec", "names"} & {*students}
    assert {*students} <= {*segue.students.__all__}


def test_every_function_that_compares_a_teacher_with_a_student_is_public():
    """The list is checked against the code: what is not in it is neither in dir() nor on the API page."""
    rooms = [segue.similarity, segue.losses]
    functions = {
        f"{room.__name__}.{name}": made for room in rooms for name, made in vars(room).items() if inspect.isfunction(made)
    }
    comparing = [
        name
        for name, made in functions.items()
        if [*inspect.signature(made).parameters][:2] == ["teacher", "student"]
        and made.__module__ == name.rpartition(".")[0]
        and not made.__name__.startswith("_")
    ]
    assert "segue.similarity.cosine" in comparing
    assert [name for name in comparing if name.rpartition(".")[2] not in import_module(name.rpartition(".")[0]).__all__] == []


def public_functions() -> dict[str, object]:
    modules = [import_module(name) for name in MODULES]
    named = [(f"{module.__name__}.{name}", getattr(module, name)) for module in modules for name in module.__all__]
    found = {name: made for name, made in named if inspect.isfunction(made)}
    found |= {name: made for name, made in named if name.startswith("segue.losses.") and inspect.isclass(made)}
    found |= {f"segue.{made.__qualname__}": made for made in WRITTEN}
    return found | {f"segue.Handover.{name}": made for name, made in vars(segue.Handover).items() if name in DRIVEN}


WRITTEN = [  # what people write by hand for a run
    *(segue.Plan, segue.Recipe, segue.Guard, segue.Ema, segue.EarlyStopping, segue.phases.Phase, segue.gates.GumbelSoftmax),
    *(getattr(segue.schedules, name) for name in segue.schedules.__all__ if isinstance(getattr(segue.schedules, name), type)),
    *(segue.losses.FeatureGuidance, segue.losses.LogitDistillation),
    *(segue.students.LinearAttention, segue.students.WindowedLinear, segue.students.SlidingWindow),
]
DRIVEN = [
    *("raise_alpha", "reschedule", "weighted", "aux_loss", "losses", "parameter_groups", "schedule_rates", "similarity"),
    *("comparing", "features", "calibrate", "verify", "finalize_"),
]


@pytest.mark.parametrize("made", public_functions().values(), ids=public_functions())
def test_a_docstring_says_what_each_argument_means(made):
    """What an editor shows on hover: every argument, once, in the order of the signature, without its type."""
    parameters = [name for name in inspect.signature(made).parameters if name != "self"]
    _, _, section = inspect.getdoc(made).partition("Args:\n")
    described = [line.strip().partition(":")[0] for line in section.splitlines() if line.startswith("    ") and line[4] != " "]
    assert described == parameters


def test_the_main_functions_show_an_example_that_runs():
    names = ["replace_", "select", "fit", "fit_locally", "cache_teacher", "cost", "save", "load_"]
    made = [getattr(segue, name) for name in names] + [getattr(segue.methods, name) for name in segue.methods.names()] + WRITTEN
    assert [one.__name__ for one in made if "\n>>> " not in inspect.getdoc(one)] == []

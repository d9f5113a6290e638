"""Settings of `segue convert` and `segue eval`: one place for defaults, limits and help; old files are read."""

import inspect
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from segue.cli import commands
from segue.convert.options import RENAMED, Conversion, EvalSettings, options, share_or_place, sizes
from segue.errors import ConfigError

NEEDED = {"model": "m", "sites": "s", "student": "Reinit", "data": "d", "steps": 1}


@pytest.mark.parametrize(("name", "kind"), [("convert", Conversion), ("eval", EvalSettings)])
def test_every_field_is_an_option_with_its_default_and_its_help(name, kind):
    described = options(kind)
    assert list(described) == [field.name for field in fields(kind)]
    (command,) = (each.callback for each in commands.app.registered_commands if (each.name or each.callback.__name__) == name)
    parameters = inspect.signature(command).parameters
    assert set(parameters) == {*described, "out"} | ({"dry_run", "config", "opens"} if name == "convert" else {"json"})
    shown = CliRunner().invoke(commands.app, [name, "--help"]).output
    for field in fields(kind):
        _, option = described[field.name]
        assert option.argument or f"--{field.name.replace('_', '-')}" in shown
        assert " ".join(option.help.split()) in " ".join(shown.split())
        assert parameters[field.name].default in (field.default, inspect.Parameter.empty)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0."),
        ({"tokens": 1}, "tokens must be at least 2, got 1."),
        ({"warmup": 1.5}, "warmup must be from 0 to 1, got 1.5."),
        ({"train": "teachers"}, "Conversion(train=...) must be 'students' or 'all', got 'teachers'."),
        ({"dtype": "int8"}, "Conversion(dtype=...) must be 'float32', 'bfloat16' or 'float16', got 'int8'."),
        ({"validation": 1.0}, "validation must be between 0 and 1, got 1.0."),
        ({"validation": float("nan")}, "Conversion(validation=...) must be a finite number or a string, got nan."),
    ],
)
def test_a_value_outside_its_limits_is_refused_in_python_too(given, fault):
    with pytest.raises(ConfigError) as caught:
        Conversion(**NEEDED | given)
    assert str(caught.value).splitlines()[0] == fault
    assert len(str(caught.value).splitlines()) == 3


def test_settings_of_version_0_1_0_are_read():
    assert RENAMED == {"looks": "evaluations", "keep": "exclude"}
    old = Conversion.from_dict({**NEEDED, "looks": 3, "keep": "layers.0.*"})
    assert old == Conversion(**NEEDED, evaluations=3, exclude="layers.0.*")


def test_a_saved_list_is_the_tuple_that_it_was():
    made = Conversion(**NEEDED, evaluate_on=("a.txt", "b.txt"), validation="c.txt")
    assert Conversion.from_dict({**NEEDED, "evaluate_on": ["a.txt", "b.txt"], "validation": "c.txt"}) == made


def test_validation_is_a_share_or_a_place():
    assert [share_or_place(text) for text in ("0.1", "texts.txt", 0.05, None)] == [0.1, "texts.txt", 0.05, None]


def test_contexts_are_numbers():
    assert sizes(None) is None
    assert sizes("64, 16,64") == (16, 64)
    for text in ("", "a", "1,-2", "0"):
        with pytest.raises(ConfigError, match="contexts must be numbers of tokens"):
            sizes(text)

"""Help: options in groups, no word cut, examples that a shell takes as they are."""

from __future__ import annotations

import re
import shlex

import pytest
import typer

from segue.cli import commands
from segue.cli import help as help_pages
from segue.cli.help import example_lines
from segue.convert.options import GROUPS, Conversion, EvalSettings, PlanSettings, options
from tests.helpers.command import call

NAMES = sorted(each.name or each.callback.__name__ for each in commands.app.registered_commands)


def test_every_setting_has_one_group():
    named = [name for names in GROUPS.values() for name in names]
    assert len(named) == len(set(named))
    assert set(named) == {name for kind in (Conversion, EvalSettings, PlanSettings) for name in options(kind)}


def test_the_options_of_convert_are_in_groups():
    lines = call("convert", "--help").splitlines()
    groups = [line for line in lines if line in {*GROUPS, "Arguments", "Options"}]
    assert groups == ["Arguments", "Model", "Data", "Training", "Devices", "Options"]
    assert lines.index("Training") < lines.index("  --lr <float>") < lines.index("Devices")


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("name", NAMES)
def test_no_word_is_cut(name, width, monkeypatch):
    monkeypatch.setattr(help_pages, "UNKNOWN", width)
    said = " ".join(call(name, "--help").replace("\\\n", " ").split())
    command = typer.main.get_command(commands.app).commands[name]
    for text in [command.help, *(parameter.help for parameter in command.params)]:
        assert " ".join(text.split()).replace("`", "") in said.replace("`", "")


@pytest.mark.parametrize("width", [40, 80])
def test_the_command_of_commands_looks_like_each_of_them(width, monkeypatch):
    """A flag takes no value, so none is named after it; no text of a command is cut."""
    monkeypatch.setattr(help_pages, "UNKNOWN", width)
    lines = call("--help").splitlines()
    assert [line for line in lines if line in ("Commands", "Options")] == ["Commands", "Options"]
    assert {"  --version", "  --install-completion", "  --show-completion", "  --help"} <= set(lines)
    assert not [line for line in lines if "bool" in line]
    said = " ".join(" ".join(lines).split())
    for name, command in typer.main.get_command(commands.app).commands.items():
        assert f"  {name}" in lines
        assert " ".join(command.help.split("\n\n")[0].split()) in said


def test_an_example_is_one_command_for_a_shell():
    command = "segue convert MODEL --sites 'model.layers.*.self_attn' --student 'WindowedLinear(window=64)' --out DIR"
    for width in (30, 50, 200):
        shown = example_lines(command, width)
        assert shlex.split(shown.replace("\\\n", " ")) == shlex.split(command)
        assert all(len(line) <= max(width, 45) for line in shown.splitlines())
    assert shown.strip() == command


def test_the_examples_of_every_command_name_options_that_it_has():
    for name, command in typer.main.get_command(commands.app).commands.items():
        known = {option for parameter in command.params for option in parameter.opts}
        for example in re.findall(rf"`(segue {name} [^`]+)`", command.help):
            assert {word for word in shlex.split(example) if word.startswith("--")} <= known

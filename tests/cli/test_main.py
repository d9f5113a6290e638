"""The entry point: exit codes, and answers without torch."""

from __future__ import annotations

import json
import sys

import pytest

import segue.cli
from segue.cli import commands, main
from tests.helpers.processes import run_python

WITHOUT_TORCH = """
import io, json, os, sys
from contextlib import redirect_stdout
from segue.cli import commands, main

def answer(*arguments):
    sys.argv, out = ["segue", *arguments], io.StringIO()
    with redirect_stdout(out):
        try:
            main()
        except SystemExit as end:
            assert not end.code, end.code
    return [out.getvalue(), "torch" in sys.modules]

names = [command.name or command.callback.__name__ for command in commands.app.registered_commands]
answers = {"--version": answer("--version"), "--help": answer("--help")}
answers |= {name: answer(name, "--help") for name in names}
os.environ |= {"_SEGUE_COMPLETE": "complete_bash", "COMP_WORDS": "segue me", "COMP_CWORD": "1"}
answers["completion"] = answer()
os.environ |= {"COMP_WORDS": "segue convert --ex", "COMP_CWORD": "2"}
answers["completion of options"] = answer()
print(json.dumps(answers))
"""


def leave(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """Call the installed program's function and return what it leaves with."""
    monkeypatch.setattr(sys, "argv", ["segue", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


def test_exit_codes_and_the_three_lines_in_a_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert leave(monkeypatch, "run", "--method", "dcr_dgf") == 1
    said = capsys.readouterr().err
    assert said.splitlines()[0] == "ConfigError: there is no method 'dcr_dgf'."
    assert "Traceback" not in said
    assert leave(monkeypatch, "no_such_command") == 2


def test_without_typer_there_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "segue.cli.commands")
    monkeypatch.delattr(segue.cli, "commands")
    said = leave(monkeypatch)  # Python prints it and leaves with 1
    assert said == "The segue command needs typer, which is not installed: pip install 'segue[lab]'"


def test_without_another_package_of_the_extra_there_is_one_sentence_too(monkeypatch, tmp_path):
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'filelock'", name="filelock")

    monkeypatch.setattr(commands, "app", lambda prog_name: missing())
    assert leave(monkeypatch) == "The segue command needs filelock, which is not installed: pip install 'segue[lab]'"


@pytest.mark.processes
def test_version_help_and_completion_answer_without_torch():
    answers = json.loads(run_python("-c", WITHOUT_TORCH).stdout)
    names = {command.name or command.callback.__name__ for command in commands.app.registered_commands}
    assert set(answers) == {"--version", "--help", *names, "completion", "completion of options"}
    assert {name for name, (_, torch) in answers.items() if torch} == set()
    assert answers["--version"][0].strip() == segue.__version__
    assert answers["completion"][0].split() == ["methods"]
    assert answers["completion of options"][0].split() == ["--exclude"]
    for name in names:
        assert "Usage" in answers[name][0]
        assert f"\n  {name}\n" in answers["--help"][0]

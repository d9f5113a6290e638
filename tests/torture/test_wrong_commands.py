"""Wrong commands are refused in three lines, or by typer, and leave nothing; a fixed part of what the campaign generates."""

from __future__ import annotations

import pytest

from tests.torture import wrong_commands
from tests.torture.wrong_calls import ACCEPTED, REFUSED
from tests.torture.wrong_commands import VALID, WrongCommand, _line, parameters

GRID = _line("grid", {})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return wrong_commands.prepare(tmp_path_factory.mktemp("prepared") / "here", trained=False)


def test_every_command_is_attacked():
    names = {c.name or c.callback.__name__ for c in wrong_commands.commands.app.registered_commands}
    assert set(VALID) == names
    tried = {(case.arguments[0], option.split("=")[0]) for case in wrong_commands.cases() for option in case.arguments[1:]}
    assert {(name, p.option) for name in names for p in parameters(name) if p.option} <= tried


@pytest.mark.parametrize("name", sorted(VALID.keys() - {"eval", "pack", "resume", "report"}))  # these need a training
def test_the_valid_command_is_accepted(name, prepared, tmp_path):
    verdict = wrong_commands.run(WrongCommand(_line(name, {})), prepared, tmp_path / "work")
    assert verdict.kind == ACCEPTED, verdict


CASES = [
    *(
        WrongCommand(_line("run", {"settings": [pair]}))
        for pair in ("seed=x", "batch=0", "recipe.lr=-1", "recipe=3", "data_fraction=2")
    ),
    *(WrongCommand(_line("run", {"seed": [seed]})) for seed in ("x", "nan", "", "9" * 30)),
    *(WrongCommand(_line("run", {"options": [option]})) for option in ("steps=x", "steps=0", "depth=-1", "=", "steps")),
    WrongCommand(_line("run", {"out": ["a file.txt"]})),
    WrongCommand(_line("run", {"out": ["a" * 300]})),
    WrongCommand(_line("run", {"preset": ["minilm"], "options": ["model=x", "train=y", "test=z"]})),
    *(WrongCommand(("eval", "empty folder", f"--validation={value}")) for value in ("0", "1", "nan", "-1", "x")),
    *(WrongCommand(("eval", "empty folder", f"--contexts={value}")) for value in ("0", "x", "", "1,,2")),
    *(WrongCommand(_line("convert", {"student": [student]})) for student in wrong_commands.STUDENTS[:4]),
    WrongCommand(_line("convert", {"seed": ["9" * 30]})),
    *(WrongCommand(GRID, "experiments/mine/runs.py", content) for content in wrong_commands.BROKEN_CODE),
    *(WrongCommand(("resume", "grid"), "grid/grid.json", content) for content in wrong_commands.DAMAGED),
    *(
        WrongCommand(("resume", "grid"), "grid/grid.json", content)
        for content in (b'{"place": 3, "options": 3, "workers": 1, "engine": "x"}',)
    ),
    *(WrongCommand(("resume", "search"), "search/tune.json", content) for content in wrong_commands.DAMAGED),
    *(WrongCommand((*GRID, "--tuned=tuned.json"), "tuned.json", content) for content in wrong_commands.DAMAGED),
    *(WrongCommand(("report", "empty folder"), "empty folder/results.jsonl", content) for content in wrong_commands.DAMAGED),
    *(WrongCommand(("resume", "empty folder"), "empty folder/config.json", content) for content in wrong_commands.DAMAGED),
    *(WrongCommand(("report", "empty folder"), "empty folder/result.json", content) for content in wrong_commands.DAMAGED),
    *(WrongCommand(("cost", "demo", "plan.json"), "plan.json", content) for content in wrong_commands.DAMAGED),
    *(WrongCommand(("sites", "llama"), "llama/config.json", content) for content in wrong_commands.DAMAGED),
    *(WrongCommand(_line("convert", {}), "llama/generation_config.json", content) for content in (b"{", b"[]", b"\xff")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_wrong_command_is_refused_and_leaves_nothing(case, prepared, tmp_path):
    verdict = wrong_commands.run(case, prepared, tmp_path / "work")
    assert verdict.kind == REFUSED, verdict

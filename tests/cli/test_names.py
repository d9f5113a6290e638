"""Completion: the names are those of the code, though no module of torch is imported."""

from __future__ import annotations

import pytest

from segue.cli import commands, names
from segue.convert.parse_student import FACTORIES
from segue.lab import variants
from segue.methods import ALL
from tests.helpers.command import runner


def test_the_names_in_the_source_are_those_of_the_package():
    assert names.methods() == list(ALL)
    assert set(names.variants()) == set(variants.ALL)
    assert set(names.students()) == set(FACTORIES)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("segue run --method dcr_dfg_c", ["dcr_dfg_constant"]),
        ("segue cost demo theseus_con", ["theseus_constant_0.5", "theseus_constant_0.7"]),
        ("segue convert --method lolc", ["lolcats"]),
        ("segue convert --student Windowed", ["WindowedLinear"]),
        ("segue cost demo dcr --student Windowed", ["WindowedLinear"]),
        ("segue run --preset mi", ["minilm"]),
    ],
)
def test_a_shell_completes(line, found):
    asked = {"_SEGUE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    assert runner.invoke(commands.app, [], prog_name="segue", env=asked).output.split() == found


def test_the_last_of_several_names_is_completed():
    assert names.completion(names.students)("LinearAttention; Slid") == ["LinearAttention; SlidingWindow"]

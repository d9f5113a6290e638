"""What a user types, as values, files and calls."""

from __future__ import annotations

import pytest

from segue.cli.arguments import call_with, experiment_file, name_values, neighbours
from segue.errors import ConfigError


def test_values_are_json_where_they_can_be_and_text_otherwise():
    found = name_values(["seeds=5", "lr=1e-3", "steps=[1,2]", "folder=a=b", "part=minilm"])
    assert found == {"seeds": 5, "lr": 1e-3, "steps": [1, 2], "folder": "a=b", "part": "minilm"}
    assert name_values(None) == {}


@pytest.mark.parametrize("pair", ["seeds", "=5", ""])
def test_what_is_no_pair_is_refused(pair):
    with pytest.raises(ConfigError, match="is not an option"):
        name_values([pair])


def test_an_experiment_is_a_file_a_folder_or_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "experiments" / "mine" / "runs.py"
    file.parent.mkdir(parents=True)
    file.touch()
    for name in (str(file), str(file.parent), "mine"):
        assert experiment_file(name).resolve() == file
    with pytest.raises(ConfigError, match="there is no experiment 'min'") as caught:
        experiment_file("min")
    assert "mine" in str(caught.value)


def test_a_call_needs_the_options_that_the_function_has():
    def preset(folder, steps=3):
        return folder, steps

    assert call_with(preset, "the preset", {"folder": "a", "steps": 1}) == ("a", 1)
    with pytest.raises(ConfigError, match="has no option 'step'"):
        call_with(preset, "the preset", {"folder": "a", "step": 1})
    with pytest.raises(ConfigError, match="the preset is incomplete"):
        call_with(preset, "the preset", {})


def test_folders_near_a_missing_one_are_named(tmp_path):
    (tmp_path / "small").mkdir()
    assert "small" in neighbours(tmp_path / "smal")
    assert neighbours(tmp_path / "no" / "such") == "There is no such folder."

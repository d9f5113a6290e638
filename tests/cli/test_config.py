"""`--config` of run, grid and convert, and `run --save-config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from segue.cli import commands
from segue.cli.run import configured
from segue.errors import ConfigError
from segue.lab import config_files, presets, variants
from tests.convert import small_models
from tests.helpers.command import call, runner

NOTHING = {"method": None, "preset": None, "seed": None, "data_fraction": None, "options": None}


def test_a_saved_configuration_is_the_run_that_the_options_describe(tmp_path):
    path = tmp_path / "a.toml"
    said = call("run", "--method", "theseus", "--seed", "2", "-o", "steps=7", "--set", "batch=9", "--save-config", path)
    assert f"Next: segue run --config {path}" in said
    wanted = presets.demo(steps=7).run(variants.ALL["theseus"], seed=2)
    found = configured(path, NOTHING, {})
    assert found == config_files.merged(wanted, {"batch": 9})
    assert configured(path, NOTHING, {"seed": 5}).seed == 5
    with pytest.raises(ConfigError, match="--method would describe it a second time"):
        configured(path, {**NOTHING, "method": "dcr"}, {})
    assert {each.name for each in tmp_path.iterdir()} == {"a.toml"}, "nothing is trained"


def test_a_run_without_a_method_takes_the_recipe_that_the_evidence_chose():
    assert configured(None, NOTHING, {}) == presets.demo().run(variants.ALL["local_fit"], seed=0)


def test_a_short_file_stands_on_the_preset_and_the_command_line_wins(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("method: dcr\nseed: 4\nrecipe:\n  lr: 0.5\n")
    found = configured(path, NOTHING, {})
    assert (found.method, found.seed, found.recipe.seed, found.recipe.lr) == ("dcr", 4, 4, 0.5)
    assert found.plan == presets.demo().run(variants.ALL["dcr"], seed=4).plan
    assert configured(path, NOTHING, {"recipe.lr": 0.25}).recipe.lr == 0.25


def test_grid_takes_its_options_from_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs.py").write_text("def runs(seeds=1, part='x'):\n    raise ValueError((seeds, part))\n")
    Path("a.toml").write_text('experiment = "runs.py"\nworkers = 3\n[options]\nseeds = 5\npart = "1"\n')
    with pytest.raises(ConfigError, match=r"ValueError in line 2: \(5, '1'\)"):
        call("grid", "--config", "a.toml")
    with pytest.raises(ConfigError, match=r"ValueError in line 2: \(6, 'x'\)"):
        call("grid", "--config", "a.toml", "-o", "seeds=6")


@pytest.mark.parametrize("command", ["grid", "convert"])
def test_an_unknown_name_gets_the_nearest_one(command, tmp_path):
    (tmp_path / "a.toml").write_text('outt = "x"\n')
    with pytest.raises(ConfigError) as caught:
        runner.invoke(commands.app, [command, "--config", str(tmp_path / "a.toml")], catch_exceptions=False)
    assert "has an unknown setting 'outt'.\n  Nearest names: out." in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


def test_convert_takes_its_settings_from_a_file(tmp_path):
    small_models.save("llama", tmp_path / "model")
    (tmp_path / "text.txt").write_text(small_models.text())
    settings = {
        "model": str(tmp_path / "model"),
        "sites": "model.layers.*.self_attn",
        "student": "LinearAttention",
        "data": str(tmp_path / "text.txt"),
        "steps": 1,
        "batch": 2,
        "tokens": 16,
        "validation": 0.25,
        "evaluate_on": [str(tmp_path / "text.txt")],
        "evaluations": 1,
        "out": str(tmp_path / "out"),
    }
    config_files.write(settings, tmp_path / "a.toml")
    call("convert", "--config", tmp_path / "a.toml", "--batch", "4")
    used = json.loads((tmp_path / "out" / "training" / "settings.json").read_text())
    wanted = {name: value for name, value in settings.items() if name not in ("out", "batch")}
    assert {name: used[name] for name in wanted} == wanted
    assert used["batch"] == 4, "what is typed wins"

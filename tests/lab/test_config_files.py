"""Configurations in TOML and YAML: what is written is read back, what is left out is the default of today."""

from __future__ import annotations

import pytest

from segue.errors import ConfigError, SegueError
from segue.lab import config_files, presets, variants
from segue.lab.config import changed, config_hash
from segue.students import WindowedLinear
from segue.training.guard import Guard

DEMO = presets.demo(steps=4, teacher_steps=4, depth=2)


def written(text: str, tmp_path, name: str = "a.toml"):
    (tmp_path / name).write_text(text)
    return config_files.read(tmp_path / name)


@pytest.mark.parametrize("ending", ["toml", "yaml"])
def test_every_method_is_read_back(ending, tmp_path):
    path = tmp_path / f"a.{ending}"
    for variant in variants.ALL.values():
        run = DEMO.run(variant, seed=3, sites=("blocks.0.attn", "blocks.1.attn"), student=WindowedLinear(window=2, far=None))
        config_files.save(run, path)
        assert config_files.run_of(config_files.read(path)) == run
    assert config_hash(config_files.run_of(config_files.read(path))) == config_hash(run)


@pytest.mark.parametrize("preset", [presets.small("a folder"), presets.paper(), presets.minilm("m", "train", 'a "test"\x7f é')])
def test_every_preset_is_read_back(preset, tmp_path):
    run = preset.run(variants.ALL["local_fit"])
    config_files.save(run, tmp_path / "a.toml")
    assert config_files.run_of(config_files.read(tmp_path / "a.toml")) == run


@pytest.mark.parametrize("ending", ["toml", "yaml"])
def test_none_is_kept_where_it_is_not_the_default_and_a_default_where_a_file_is_silent(ending, tmp_path):
    """Version 0.1.0 had no guard, so its files without one mean none; a file of today means today's default."""
    run = changed(DEMO.run(variants.ALL["dcr_dfg"]), "recipe.clip", None)
    config_files.save(run, tmp_path / f"a.{ending}")
    data = config_files.read(tmp_path / f"a.{ending}")
    assert config_files.run_of(data).recipe.clip is None
    del data["recipe"]["clip"]
    assert config_files.run_of(data).recipe.clip == type(run.recipe)(steps=1).clip is not None


def test_a_part_of_a_file_changes_what_it_names(tmp_path):
    base = DEMO.run(variants.ALL["dcr_dfg"])
    text = 'batch = 8\n[recipe]\nlr = 1\nguard = { kind = "Guard" }\n[plan.schedule]\nkind = "schedules.Linear"\nuntil = 0.5'
    found = config_files.merged(base, written(text, tmp_path))
    assert (found.batch, found.recipe.lr, found.recipe.steps) == (8, 1, base.recipe.steps)
    assert found.recipe.guard == Guard()
    assert (type(found.plan.schedule).__name__, found.plan.schedule.until) == ("Linear", 0.5)
    assert found.plan.guidance == base.plan.guidance
    same_kind = config_files.merged(base, written("[plan.guidance]\nweight = 0.25", tmp_path))
    assert same_kind.plan.guidance.weight == 0.25


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("batchs = 8", "Run has no setting 'batchs'.", "Nearest names: batch."),
        ("[recipe]\nlrr = 8", "Recipe has no setting 'lrr'.", "Nearest names: lr"),
        ('[plan.gate]\nkind = "gates.Blnd"', "config.plan.gate has the kind 'gates.Blnd'", "Nearest names: gates.Blend"),
        (
            '[plan.schedule]\nkind = "schedules.Linear"\nutil = 1',
            "schedules.Linear has no setting 'util'.",
            "Nearest names: until",
        ),
        ("batch = 0", "Run(batch=...) must be a positive integer, got 0.", ""),
        ("[recipe]\nsteps = 'x'", "Recipe(steps=...)", ""),
    ],
)
def test_a_wrong_setting_gets_three_lines_and_the_nearest_name(text, first, second, tmp_path):
    with pytest.raises(SegueError) as caught:
        config_files.merged(DEMO.run(variants.ALL["dcr"]), written(text, tmp_path))
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(first)
    assert second in lines[1]


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.toml", "batch = ", "Invalid value"),
        ("a.yaml", "batch: [", "expected the node content"),
        ("a.yaml", "- 1", "not settings by name"),
        ("a.json", "{}", "Its name ends with '.json'"),
    ],
)
def test_a_file_that_cannot_be_read(name, text, found, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        written(text, tmp_path, name)
    assert found in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        config_files.read(tmp_path / "nothing.toml")


def test_parts_of_ones_own_are_refused_before_anything_is_written(tmp_path):
    run = DEMO.run(variants.ALL["dcr"], schedule=lambda progress, site: 1 - progress)
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        config_files.save(run, tmp_path / "a.toml")
    assert "plan.schedule" in str(caught.value)
    assert not list(tmp_path.iterdir())

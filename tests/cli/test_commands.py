"""The commands of `segue`: what they print, what they write, and their errors."""

from __future__ import annotations

import json

import pytest

from segue.cli import commands
from segue.diagnostics.costs import Cost
from segue.errors import ConfigError, SiteError
from segue.lab import models, variants
from segue.lab.report import figures
from tests.convert.forged import forgeries
from tests.helpers.command import call, runner
from tests.lab.report.saved_runs import grid, save

TINY = ["--option", "steps=4", "--option", "teacher_steps=4", "--option", "depth=2"]

EXPERIMENT = """
from segue.lab import presets, variants


def runs(seeds=1, lr=3e-3):
    preset = presets.demo(steps=3, teacher_steps=4, depth=2)
    return [preset.run(variant, seed=seed) for seed in range(seeds) for variant in variants.find(["student_only", "dcr"])]
"""


def test_sites_without_a_pattern_shows_what_repeats():
    shown = call("sites", "demo")
    assert "blocks.*.attn" in shown
    assert "56,448" in shown


def test_sites_shows_names_shapes_and_parameter_counts():
    shown = call("sites", "demo", "blocks.*.attn")
    assert "6 sites match" in shown
    assert "blocks.5.attn" in shown
    assert "qkv.weight" in shown
    assert "9,408" in shown
    assert "56,448 of" in shown


@pytest.mark.parametrize(
    ("model", "pattern"),
    [("timm:vit_tiny_patch16_224", "blocks.*.attn"), ("torchvision:vit_b_16", "encoder.layers.*.self_attention")],
)
def test_sites_of_other_libraries_without_their_weights(model, pattern):
    assert "12 sites match" in call("sites", model, pattern)


def test_sites_of_a_hugging_face_folder(tmp_path):
    sizes = {"num_hidden_layers": 3, "hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 8}
    config = {"model_type": "bert", "architectures": ["BertModel"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "3 sites match" in call("sites", str(tmp_path), "encoder.layer.*.attention.self")


@pytest.mark.parametrize("named", [{"architectures": ["LlamaForCausalLM"]}, {}])
def test_sites_have_the_names_that_convert_takes(named, tmp_path):
    sizes = {"num_hidden_layers": 3, "hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
    config = {"model_type": "llama", **named, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "3 sites match" in call("sites", str(tmp_path), "model.layers.*.self_attn")
    assert "3 sites match" in call("sites", f"hf:{tmp_path}", "model.layers.*.self_attn")


@pytest.mark.parametrize("forged", [forgeries()[name] for name in ("renamed", "attn_implementation")])
def test_the_configuration_of_a_folder_chooses_no_kernel(forged, tmp_path):
    sizes = {"num_hidden_layers": 1, "hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **forged}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert models.build(f"hf:{tmp_path}").config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (("sites", "demo", "blocks.*.atn"), SiteError, "Nearest names: blocks.0.attn"),
        (("sites", "timm:vit_tiny_patch16_22"), ConfigError, "Nearest names: vit_tiny_patch16_224"),
        (("sites", "vit_tiny"), ConfigError, "Nearest names: vit_tiny_patch16_224"),
        (("sites", "torchvision:vit_b_17"), ConfigError, "Nearest names: vit_b_16"),
        (("sites", "no/such/folder"), ConfigError, "write timm:NAME, hf:FOLDER_OR_ID"),
        (("sites", "hf:no_such_folder_here"), ConfigError, "give a folder with config.json"),
        (("cost", "demo", "dcr"), ConfigError, "Patterns of repeated modules of demo: 'blocks.*'"),
        (("cost", "demo", "dcr_dgf"), ConfigError, "Nearest names: dcr_dfg"),
        (("cost", "demo", "dcr", "--sites", "blocks.*.atn"), SiteError, "Nearest names: blocks.0.attn"),
        (("cost", "demo", "mine.json"), ConfigError, "There is no such file"),
        (("cost", "demo", "paper", "--sites", "blocks.*.attn", "--picture", "a.png"), ConfigError, "a picture shows one plan"),
        (("run", "--method", "dcr_dgf"), ConfigError, "Nearest names: dcr_dfg"),
        (("run", "--method", "paper"), ConfigError, "one method"),
        (("run", "--set", "recipe.lrr=1"), ConfigError, "Nearest names: lr"),
        (("run", "--set", "recipe"), ConfigError, "not of the form name=value"),
        (("run", "--option", "stepz=3"), ConfigError, "Nearest names: steps"),
        (("run", "--preset", "small"), ConfigError, "It needs the option 'folder'"),
        (("grid", "experiments/smal"), ConfigError, "an experiment is a folder with a runs.py"),
        (("report", "runs/no_such_thing"), ConfigError, "runs/no_such_thing is not a folder."),
        (
            ("resume", "runs/no_such_thing"),
            ConfigError,
            "runs/no_such_thing is not a run, a grid, a search of settings or a conversion.",
        ),
    ],
)
def test_a_mistake_gets_one_clear_message(arguments, kind, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as caught:
        runner.invoke(commands.app, [*arguments], catch_exceptions=False)
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3
    assert list(tmp_path.iterdir()) == [], "nothing was written"


def test_methods_lists_the_methods_and_on_request_the_variants():
    assert [one["name"] for one in json.loads(call("methods", "--json"))] == list(variants.METHODS)
    assert [one["name"] for one in json.loads(call("methods", "--all", "--json"))] == list(variants.ALL)
    shown = call("methods")
    assert all(name in shown for name in variants.METHODS)
    assert "dcr_dfg_hold" not in shown
    assert "dcr_dfg_hold" in call("methods", "--all")


def test_sites_and_cost_as_json():
    patterns = json.loads(call("sites", "demo", "--json"))
    assert {"pattern": "blocks.*.attn", "count": 6, "module": "Attention", "parameters": 56448} in patterns["patterns"]
    found = json.loads(call("sites", "demo", "blocks.*.attn", "--json"))
    assert found["replaced"] == sum(site["parameters"] for site in found["sites"]) == 56448
    assert found["sites"][5]["names"] == ["blocks.5.attn"]
    assert found["sites"][0]["shapes"]["qkv.weight"] == [144, 48]
    costs = json.loads(call("cost", "demo", "dcr", "--sites", "blocks.*.attn", "--steps", "10", "--json"))
    assert Cost.from_dict(costs["DCR"]).steps == 10


@pytest.mark.slow
def test_run_then_resume_then_the_result_is_there(tmp_path):
    printed = call("run", "--method", "dcr", "--out", str(tmp_path), *TINY, "--set", "recipe.lr=1e-3", "--set", "evaluations=2")
    folder = tmp_path / "dcr-seed0"
    assert "students alone: accuracy" in printed
    result = json.loads((folder / "result.json").read_text())
    assert result["run_info"]["config"]["recipe"]["lr"] == 1e-3
    assert [point["step"] for point in result["train_info"]["points"]] == [0, 2, 4]
    assert (folder / "model" / "latest").exists()
    assert not (folder / "checkpoints").exists()
    assert "students alone" in call("resume", str(folder))


def test_a_grid_is_checked_before_its_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "experiments" / "mine"
    place.mkdir(parents=True)
    (place / "runs.py").write_text(EXPERIMENT)
    with pytest.raises(ConfigError, match="must be a positive integer"):
        call("grid", "mine", "--workers", "9" * 30)
    assert [path.name for path in tmp_path.iterdir()] == ["experiments"]


def test_a_report_compares_with_the_named_reference(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "draw", lambda summary, folder: [])
    save(grid(methods=["student_only", "theseus", "dcr"], groups=["all"], seeds=5, evaluations=3, sites=1), tmp_path)
    assert "with Student only, the reference" in " ".join(call("report", str(tmp_path), "--reference", "student_only").split())
    assert "The reference is named beforehand" in (tmp_path / "table.md").read_text()
    found = json.loads(call("report", str(tmp_path), "--reference", "student_only", "--json"))
    assert found["reference"] == "student_only"
    assert [one["method"] for one in found["groups"][0]["methods"]] == ["student_only", "theseus", "dcr"]
    assert found["groups"][0]["methods"][0]["final"]["n"] == 5
    with pytest.raises(ConfigError, match="no run has the method 'dcrr', the reference"):
        call("report", str(tmp_path), "--reference", "dcrr")


@pytest.mark.slow
def test_a_grid_its_failure_its_report_and_its_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "draw", lambda summary, folder: [])  # test_figures.py and test_demo.py draw them
    place = tmp_path / "experiments" / "mine"
    place.mkdir(parents=True)
    (place / "runs.py").write_text(EXPERIMENT)
    assert "All runs are finished" in call("grid", "mine", "--workers", "2", "--option", "seeds=1")
    assert sorted(path.parent.name for path in tmp_path.glob("runs/mine/*/result.json")) == ["dcr-seed0", "student_only-seed0"]

    assert "2 finished before, 0 to do" in call("resume", "runs/mine")

    assert "report.html" in call("report", "runs/mine", "--title", "Mine")
    assert "<title>Mine</title>" in (tmp_path / "runs/mine/report.html").read_text()

    (place / "runs.py").write_text(
        EXPERIMENT.replace("seed=seed)", "seed=seed, sites='blocks.*.atn')").replace('"student_only", ', "")
    )
    failed = runner.invoke(commands.app, ["grid", "mine", "--out", "runs/other"], catch_exceptions=False)
    assert failed.exit_code == 1
    assert "1 runs failed" in failed.stdout
    assert "SiteError: " in failed.stdout
    assert "'blocks.*.atn'" in failed.stdout

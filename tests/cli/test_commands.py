"""The `segue` command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import segue
import segue.lab.small_vit
from segue.cli import commands
from segue.cli import cost as cost_table
from segue.cli import main as cli
from segue.errors import ConfigError, SegueError, SiteError
from segue.lab import variants
from segue.lab.report import figures

runner = CliRunner()
TINY = ["--option", "steps=4", "--option", "teacher_steps=4", "--option", "depth=2"]

EXPERIMENT = """
from segue.lab import variants
from segue.lab import presets as scales


def runs(seeds=1, lr=3e-3):
    scale = scales.demo(steps=3, teacher_steps=4, depth=2)
    return [scale.run(variant, seed=seed) for seed in range(seeds) for variant in variants.find(["student_only", "dcr"])]
"""


def call(*arguments: str) -> str:
    """Call a command in this process and return what it printed."""
    result = runner.invoke(commands.app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Call the command as a shell does."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    process = [sys.executable, "-m", "segue", *arguments]
    return subprocess.run(process, capture_output=True, text=True, env=environment, cwd=cwd)


def test_help_lists_every_command_and_each_has_its_own():
    listed = call("--help")
    for name in ("demo", "sites", "cost", "methods", "run", "grid", "report", "resume"):
        assert f" {name} " in listed
        assert "Usage" in call(name, "--help")


def test_the_version():
    assert call("--version").strip() == segue.__version__


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
    config = {"model_type": "bert", "num_hidden_layers": 3, "hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "3 sites match" in call("sites", str(tmp_path), "encoder.layer.*.attention.self")


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (("sites", "demo", "blocks.*.atn"), SiteError, "Nearest names: blocks.0.attn"),
        (("sites", "timm:vit_tiny_patch16_22"), ConfigError, "Nearest names: vit_tiny_patch16_224"),
        (("sites", "torchvision:vit_b_17"), ConfigError, "Nearest names: vit_b_16"),
        (("sites", "no/such/folder"), ConfigError, "write timm:NAME, hf:FOLDER_OR_ID"),
        (("sites", "hf:no_such_folder_here"), ConfigError, "give a folder with config.json"),
        (("cost", "demo", "dcr"), ConfigError, "give --sites PATTERN; what repeats in this model: 'blocks.*'"),
        (("cost", "demo", "dcr_dgf"), ConfigError, "Nearest names: dcr_dfg"),
        (("cost", "demo", "dcr", "--sites", "blocks.*.atn"), SiteError, "Nearest names: blocks.0.attn"),
        (("cost", "demo", "mine.json"), ConfigError, "There is no such file"),
        (("cost", "demo", "paper", "--sites", "blocks.*.attn", "--picture", "a.png"), ConfigError, "It shows one"),
        (("run", "--method", "dcr_dgf"), ConfigError, "Nearest names: dcr_dfg"),
        (("run", "--method", "paper"), ConfigError, "one method"),
        (("run", "--set", "recipe.lrr=1"), ConfigError, "Nearest names: lr"),
        (("run", "--set", "recipe"), ConfigError, "not of the form name=value"),
        (("run", "--option", "stepz=3"), ConfigError, "Nearest names: steps"),
        (("run", "--scale", "small"), ConfigError, "It needs the option 'folder'"),
        (("grid", "experiments/smal"), ConfigError, "an experiment is a folder with a runs.py"),
        (("report", "runs/no_such_thing"), ConfigError, "a report on runs/no_such_thing"),
        (("resume", "runs/no_such_thing"), ConfigError, "No config.json or grid.json"),
    ],
)
def test_a_mistake_gets_one_clear_message(arguments, kind, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as caught:
        runner.invoke(commands.app, [*arguments], catch_exceptions=False)
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3
    assert list(tmp_path.iterdir()) == [], "nothing was written"


def table_of(shown: str) -> dict[str, list[str]]:
    """Read a table back: its first column names its rows."""
    cells = [[cell.strip() for cell in line.strip("│ \n").split("│")] for line in shown.splitlines() if line.startswith("│")]
    return {name: rest for name, *rest in cells}


def test_cost_of_one_plan_phase_by_phase(tmp_path, monkeypatch):
    monkeypatch.setattr(commands.console, "width", 240)
    shown = call("cost", "demo", "dcr", "--sites", "blocks.*.attn", "--steps", "50", "--picture", str(tmp_path / "cost.png"))
    rows = table_of(shown)
    assert list(rows) == ["blend", "after takeover", "whole run", "student-only", "full-teacher distillation"]
    assert [rows[name][0] for name in rows] == ["10", "40", "50", "50", "50"]
    model = segue.lab.small_vit.VisionTransformer()
    by_hand = segue.cost(model, segue.methods.dcr(sites="blocks.*.attn"), torch.zeros(8, 1, 8, 8), total_steps=50)
    assert rows["whole run"][2:4] == [f"{by_hand.to_student_only:.3f}", f"{by_hand.to_distillation:.3f}"]
    assert all(sentence in shown for sentence in by_hand.notes)
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")


def test_cost_of_the_papers_seven_side_by_side(monkeypatch):
    monkeypatch.setattr(commands.console, "width", 240)
    rows = table_of(call("cost", "demo", "paper", "--sites", "blocks.*.attn", "--steps", "20"))
    assert list(rows) == [variant.label for variant in variants.PAPER]
    against_full = {name: float(cells[2]) for name, cells in rows.items()}
    assert against_full["KL distillation"] == pytest.approx(1.0, abs=0.01)  # the first step compares the two sides
    assert against_full["Theseus"] < against_full["DCR"] < against_full["Theseus-Gumbel"] < 1.0


def test_cost_of_a_saved_plan_on_models_of_other_libraries(tmp_path, monkeypatch):
    monkeypatch.setattr(commands.console, "width", 240)
    plan = segue.methods.lolcats(sites="encoder.layer.*.attention.self", hold=0.5)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
    config = {"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = call("cost", str(tmp_path), str(tmp_path / "plan.json"), "--steps", "10", "--tokens", "5", "--batch", "2")
    assert list(table_of(shown))[:2] == ["hold", "after takeover"]
    assert "blend" in table_of(
        call("cost", "timm:test_vit", "dcr", "--sites", "blocks.*.attn", "--steps", "10", "--batch", "1")
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', '{"format": 1, "sites": 3, "nonsense": 4}'])
def test_a_file_that_is_no_plan(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(SegueError):
        call("cost", "demo", str(tmp_path / "plan.json"))


def test_a_large_model_is_counted_without_its_weights(monkeypatch):
    monkeypatch.setattr(cost_table, "LARGE", 1000)
    monkeypatch.setattr(commands.console, "width", 240)
    arguments = ("cost", "demo", "dcr", "--sites", "blocks.*.attn", "--steps", "20")
    large = call(*arguments)
    assert "Counted without weights in memory" in large
    monkeypatch.setattr(cost_table, "LARGE", 10**9)
    assert [row[1:4] for row in table_of(large).values()] == [row[1:4] for row in table_of(call(*arguments)).values()]


def test_a_model_that_zeros_do_not_suit_is_named(tmp_path):
    config = {"model_type": "t5", "num_layers": 1, "d_model": 8, "num_heads": 2, "d_kv": 4, "d_ff": 8, "vocab_size": 20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="give it a batch of your own"):
        call("cost", str(tmp_path), "dcr", "--sites", "encoder.block.*.layer.0.SelfAttention", "--steps", "5")


def test_methods_lists_all_of_them():
    shown = call("methods")
    for name in ("student_only", "distillation", "theseus_constant_0.7", "dcr_dfg_hold", "dcr_all"):
        assert name in shown


def test_run_then_resume_then_the_result_is_there(tmp_path):
    printed = call("run", "--method", "dcr", "--out", str(tmp_path), *TINY, "--set", "recipe.lr=1e-3", "--set", "looks=2")
    folder = tmp_path / "dcr-seed0"
    assert "students alone: accuracy" in printed
    result = json.loads((folder / "result.json").read_text())
    assert result["run_info"]["config"]["recipe"]["lr"] == 1e-3
    assert [point["step"] for point in result["train_info"]["points"]] == [0, 2, 4]
    assert (folder / "model" / "latest").exists()
    assert not (folder / "checkpoints").exists()
    assert "students alone" in call("resume", str(folder))


def test_a_grid_its_failure_its_report_and_its_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "draw", lambda summary, folder: [])  # test_figures.py and test_demo.py draw them
    place = tmp_path / "experiments" / "mine"
    place.mkdir(parents=True)
    (place / "runs.py").write_text(EXPERIMENT)
    assert "All runs are finished" in call("grid", "mine", "--workers", "2", "--option", "seeds=1")
    assert sorted(path.parent.name for path in tmp_path.glob("runs/mine/*/result.json")) == ["dcr-seed0", "student_only-seed0"]

    again = command("resume", "runs/mine", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "2 finished before, 0 to do" in again.stderr

    assert "report.html" in call("report", "runs/mine", "--title", "Mine")
    assert "<title>Mine</title>" in (tmp_path / "runs/mine/report.html").read_text()

    (place / "runs.py").write_text(EXPERIMENT.replace("depth=2)", "depth=2, share=2.0)").replace('"student_only", ', ""))
    failed = runner.invoke(commands.app, ["grid", "mine", "--out", "runs/other"], catch_exceptions=False)
    assert failed.exit_code == 1
    assert "1 runs failed" in failed.stdout
    assert "ConfigError: " in failed.stdout
    assert "It is not in (0, 1]" in failed.stdout


def leave(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """Call the installed program's function and return what it leaves with."""
    monkeypatch.setattr(sys, "argv", ["segue", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


def test_exit_codes_and_the_three_lines_in_a_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert leave(monkeypatch, "run", "--method", "dcr_dgf") == 1
    said = capsys.readouterr().err
    assert said.splitlines()[0] == "ConfigError: the method 'dcr_dgf' was asked for."
    assert "Traceback" not in said
    assert leave(monkeypatch, "no_such_command") == 2


def test_without_typer_there_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "segue.cli.commands")
    monkeypatch.delattr(segue, "commands")
    said = leave(monkeypatch)  # Python prints it and leaves with 1
    assert said == "The segue command needs typer, which is not installed: pip install 'segue[lab]'"


def test_completion_can_be_shown(monkeypatch, capsys):
    for name, value in {"_SEGUE_COMPLETE": "complete_bash", "COMP_WORDS": "segue me", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    assert leave(monkeypatch) == 0
    assert capsys.readouterr().out.split() == ["methods"]


def test_every_error_of_a_command_is_one_of_ours():
    assert issubclass(ConfigError, SegueError)
    assert issubclass(ConfigError, ValueError)

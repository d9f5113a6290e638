"""Mistakes of `segue convert`: three lines, exit code 1, and nothing misleading left behind."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from segue.cli import main as cli
from segue.errors import SegueError
from tests.convert.small_models import POSITIONS, convert, model, options


def without_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def pickled(folder):
    (folder / "model.safetensors").unlink()
    torch.save(model("llama").state_dict(), folder / "pytorch_model.bin")


def cut_short(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def a_weight_less(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_code(folder):
    (folder / "configuration_evil.py").write_text(f"open({str(folder / 'mark')!r}, 'w').close()\nclass EvilConfig: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"}}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (without_tokenizer, "tokenizer"),
        (pickled, "no file named model.safetensors"),
        (cut_short, "SafetensorError"),
        (a_weight_less, "lack 1 weights (model.layers.1.mlp.up_proj.weight first)"),
        (with_code, "ValueError"),
        (lambda folder: (folder / "config.json").write_text("{}"), "model_type"),
        (shutil.rmtree, "nowhere to be found"),
    ],
)
def test_a_base_that_is_not_whole_is_refused(spoil, found, base, texts, tmp_path, monkeypatch):
    shutil.copytree(base("llama"), tmp_path / "base")
    spoil(tmp_path / "base")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)  # nobody may be asked whether to trust code
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(SegueError) as caught:
        convert("llama", tmp_path / "base", texts, tmp_path / "out")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert str(tmp_path / "base") in lines[0]
    if spoil is not shutil.rmtree:
        assert found in lines[1]
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "base" / "mark").exists()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"student": "WindowLinear"}, "Nearest names: WindowedLinear"),
        ({"method": "dcr_dgf"}, "Nearest names: dcr_dfg"),
        ({"sites": "model.layers.*.self_atn"}, "Nearest names: model.layers.0.self_attn"),
        ({"keep": "model.norm"}, "matches none of the 2 sites"),
        ({"keep": "model.layers.*.self_attn"}, "Nothing is left to replace"),
        ({"data": "nowhere.txt"}, "It cannot be had here"),
        ({"tokens": POSITIONS + 1}, f"made for {POSITIONS} at most"),
        ({"dtype": "int8"}, "none of float32, bfloat16, float16"),
        ({"lr": 0}, "positive"),
        ({"validation": 1.5}, "share of the data"),
        ({"validation": 0}, "share of the data"),
    ],
)
def test_a_wrong_word_is_refused_before_anything_is_written(given, found, base, texts, tmp_path):
    with pytest.raises(SegueError) as caught:
        convert("llama", base("llama"), given.pop("data", texts), tmp_path / "out", **given)
    assert len(str(caught.value).splitlines()) == 3
    assert found in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_file_in_place_of_the_folder_is_left_alone(base, texts, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(SegueError, match="It is a file"):
        convert("llama", base("llama"), texts, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_the_command_says_it_in_three_lines_and_leaves_by_1(base, texts, tmp_path, monkeypatch, capsys):
    words = options("llama", texts, tmp_path / "out", method="dcr_dgf")
    monkeypatch.setattr(sys, "argv", ["segue", "convert", str(base("llama")), *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1
    said = capsys.readouterr()
    assert len(said.err.strip().splitlines()) == 3
    assert said.err.startswith("ConfigError: ")
    assert "Traceback" not in said.err + said.out

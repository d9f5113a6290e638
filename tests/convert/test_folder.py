"""The folder of a converted model: weights, record, card and curve, and no model at all after a crash."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

import segue
from segue.convert import folder, manifest
from segue.convert.pretrained import open_base
from segue.errors import SegueError
from segue.reporting.formatting import significant
from tests.convert.small_models import FILES, STUDENT, assert_same_conversion, points, quality, record, save, tokenizer
from tests.helpers.command import call
from tests.helpers.tiny import same_bits


def test_the_folder_holds_everything_the_record_names(converted):
    names = {path.name for path in converted.iterdir()}
    assert FILES | {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "training"} == names
    found = record(converted)
    assert found["format"] == 2
    assert set(found["versions"]) >= {"segue", "torch", "transformers"}
    assert found["versions"]["torch"] == torch.__version__
    unlisted = {"README.md", "curve.png", "manifest.json", "training"}
    assert set(manifest.listed(converted)) == names - unlisted
    assert re.fullmatch("[0-9a-f]{64}", found["base"]["hash"])
    assert found["base"]["hash"] == open_base(found["base"]["name"]).hash
    plan = segue.Plan.from_dict(found["segue"]["plan"])
    assert plan.sites == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert plan.student == segue.students.WindowedLinear(window=4)
    assert plan.guidance == segue.methods.dcr_dfg(sites="*").guidance
    assert found["budget"]["steps"] == 6
    assert found["budget"]["examples"] == 6 * 4
    assert found["budget"]["tokens"] == 6 * 4 * 16
    original, students = found["speed"]["rows"]
    assert (original["model"], students["model"]) == ("original", "converted")
    assert students["cache_bytes"] < original["cache_bytes"]


def test_the_tokenizer_is_the_originals(converted):
    reader = transformers.AutoTokenizer.from_pretrained(converted)
    assert reader("one two, three")["input_ids"] == tokenizer()("one two, three")["input_ids"]


def test_the_original_is_left_as_it_was(converted, base, tmp_path):
    again = save("llama", tmp_path)
    assert {path.name for path in base("llama").iterdir()} == {path.name for path in again.iterdir()}
    assert (base("llama") / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


def test_only_what_stands_at_the_sites_has_changed(converted, base):
    before, after = load_file(base("llama") / "model.safetensors"), load_file(converted / "model.safetensors")
    around = [name for name in before if ".self_attn." not in name]
    assert len(around) == 13
    assert all(same_bits(before[name], after[name]) for name in around)
    assert {name for name in after if ".self_attn." not in name} == set(around)


def test_the_numbers_of_curve_card_and_terminal_are_those_that_were_measured(converted, place):
    found, seen, said = record(converted), points(converted), (place / "said.txt").read_text()
    curve = json.loads((converted / "curve.json").read_text())
    assert curve == {"original": found["quality"]["original"], "points": seen}
    assert [point["step"] for point in seen] == [0, 3, 6]
    before, after = (math.exp(found["quality"][which]["loss"]) for which in ("original", "converted"))
    assert found["quality"]["name"] == "perplexity"
    assert seen[0]["blend"] == {**found["quality"]["original"], "kl": 0.0, "same_first_choice": 1.0}
    assert seen[-1]["blend"] == seen[-1]["students"] == pytest.approx(found["quality"]["converted"], rel=1e-6)
    assert after == pytest.approx(quality(converted), rel=1e-6)
    for point in seen:
        blend, students = (math.exp(point[side]["loss"]) for side in ("blend", "students"))
        line = f"step {point['step']}, alpha {point['alpha']:.2f}: perplexity of original {before:.4g}, "
        distance = (
            f"KL {significant(point['students']['kl'])}, same first choice {100 * point['students']['same_first_choice']:.1f} %"
        )
        assert line + f"blend {blend:.4g}, students {students:.4g}; students: {distance}" in said
    assert f"original: perplexity {before:.4g}" in said
    assert f"as saved: perplexity {after:.4g}, original {before:.4g}, {distance}" in said
    assert (
        f"| KL divergence from the original, nats | 0 | {significant(found['quality']['converted']['kl'])} |"
        in (converted / "README.md").read_text()
    )
    assert f"| perplexity | {before:.4g} | {after:.4g} |" in (converted / "README.md").read_text()


def test_the_card_says_what_was_done(converted, base, texts):
    card = (converted / "README.md").read_text()
    front = card.split("---")[1]
    assert "library_name: segue" in front
    for part in (
        f"base_model: {base('llama').name}\n",  # not where it lay on the machine of the conversion
        "2 modules of",
        "`model.layers.*.self_attn` (2 sites)",
        "`WindowedLinear(window=4)`",
        "`transfer`",
        f"`{texts.name}`",
        "6 steps of 4, 384 tokens",
        record(converted)["base"]["hash"][:16],
        "tokens/s, cache",
        "![Quality during the conversion](curve.png)",
        'segue.from_pretrained("',
    ):
        assert part in card, part
    assert str(texts.parent) not in card
    held = int(re.search(r"evaluated on the last (\d+) tokens", card).group(1))
    train = int(re.search(r": ([\d,]+) tokens in pieces of 16", card).group(1).replace(",", ""))
    assert held / (held + train) == pytest.approx(0.05, abs=0.01)


def test_the_curve_is_a_picture(converted):
    with Image.open(converted / "curve.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert min(picture.size) > 400
        assert len(picture.convert("RGB").getcolors(100_000)) > 20


@pytest.mark.parametrize("where", ["weights", "loading", "card", "moving"])
def test_a_crash_while_writing_leaves_no_model_behind_and_can_be_repeated(where, converted, tmp_path, monkeypatch):
    """The trained state is copied from the finished conversion, so that only the writing happens."""
    out = tmp_path / "out"
    shutil.copytree(converted / "training", out / "training")
    settings = json.loads((out / "training" / "settings.json").read_text())
    assert settings["student"] == STUDENT
    moves = []

    def crash(*_args, **_kwargs):
        raise OSError("the disk is full")

    def move(source, target):
        if Path(target).parent == out:  # JSON files are moved into their places too
            moves.append(target)
        if len(moves) == 3:
            crash()
        os.rename(source, target)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="the disk is full"):
        if where == "moving":
            patched.setattr(folder.os, "replace", move)
        else:
            broken = {
                "weights": (folder, "_write_model"),
                "loading": (folder.pretrained, "from_pretrained"),
                "card": (folder, "card"),
            }
            patched.setattr(*broken[where], crash)
        call("resume", out)
    assert len(moves) == (3 if where == "moving" else 0)
    assert not (out / "segue.json").exists()
    with pytest.raises(SegueError):
        segue.from_pretrained(out)
    call("resume", out)
    assert_same_conversion(out, converted)
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]

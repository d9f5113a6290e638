"""Folders of `segue convert`: a finished one loads and is evaluated, an interrupted one is finished."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import segue

from . import V0_1_0
from .cases import filled
from .command import segue_command

PLACES = {"base": V0_1_0 / "conversions" / "base", "data": V0_1_0 / "conversions" / "text.txt"}


@pytest.fixture
def conversions(tmp_path) -> Path:
    return filled(V0_1_0 / "conversions", tmp_path / "conversions", **PLACES)


def assert_same_logits(folder: Path) -> None:
    wanted = load_file(V0_1_0 / "conversions" / "logits.safetensors")
    with torch.no_grad():
        logits = segue.from_pretrained(folder)(input_ids=wanted["input_ids"]).logits
    torch.testing.assert_close(logits, wanted["logits"], rtol=1e-4, atol=1e-5)


def test_a_converted_folder_gives_the_logits_it_gave():
    assert_same_logits(V0_1_0 / "conversions" / "converted")


def test_an_interrupted_conversion_is_finished(conversions):
    segue_command("resume", conversions / "interrupted")
    assert_same_logits(conversions / "interrupted")
    found, wanted = (json.loads((conversions / name / "segue.json").read_text()) for name in ("interrupted", "converted"))
    assert found["segue"]["teachers"] == wanted["segue"]["teachers"]
    for which in ("original", "converted"):
        scores = {name: found["quality"][which][name] for name in wanted["quality"][which]}  # there are more today
        assert scores == pytest.approx(wanted["quality"][which], rel=1e-4)


def test_a_converted_folder_is_evaluated_on_what_it_held_out(conversions):
    segue_command("eval", conversions / "converted", "--contexts", "4", "--texts", "2")
    assert (conversions / "converted" / "eval" / "index.html").exists()
    written = json.loads((conversions / "converted" / "eval" / "results.json").read_text())
    assert written["replaced"]["student"] == "WindowedLinear(window=4)"

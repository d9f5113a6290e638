"""Conversions that are stopped go on bit for bit; what failed or is finished is not taken for something else."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import segue
from segue.convert import card, folder
from segue.convert.convert import Conversion
from segue.convert.convert import convert as in_python
from segue.convert.tasks import NextToken
from segue.core.tensor_files import read
from segue.errors import ConfigError, SegueError
from tests.convert.small_models import STUDENT, call, convert
from tests.helpers.processes import Ranks


def stop(monkeypatch, how, step):
    """Send a signal from within the loss of a step."""
    plain, left = NextToken.__call__, iter(range(step, -1, -1))

    def deadly(self, model, batch):
        if next(left, 1) == 0:
            os.kill(os.getpid(), how)
        return plain(self, model, batch)

    monkeypatch.setattr(NextToken, "__call__", deadly)


def again(base, texts, out, **given):
    return convert("llama", base("llama"), texts, out, **{"student": STUDENT, "steps": 6, **given})


def assert_as_undisturbed(out, converted):
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (converted / name).read_bytes(), name
    found, wanted = (json.loads((place / "segue.json").read_text()) for place in (out, converted))
    assert found["quality"] == wanted["quality"]
    assert found["files"] == wanted["files"]
    curves = [json.loads((place / "curve.json").read_text()) for place in (out, converted)]
    for point in (point for curve in curves for point in curve["points"]):
        del point["seconds"]
    assert curves[0] == curves[1]


@pytest.mark.parametrize(("how", "left"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_stopped_conversion_goes_on_bit_for_bit(how, left, base, texts, converted, tmp_path, monkeypatch):
    out = tmp_path / "out"
    settings = json.loads((converted / "training" / "settings.json").read_text())
    with monkeypatch.context() as patched, pytest.raises(left):
        stop(patched, how, 3)
        in_python(Conversion(**settings), out, lambda text: None)
    assert {path.name for path in out.iterdir()} == {"training"}
    with pytest.raises(ConfigError) as caught:
        again(base, texts, out, lr=1e-3)
    assert "had lr 0.0005" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3
    said = again(base, texts, out) if how == signal.SIGTERM else call("resume", out)
    assert "step 0" not in said
    assert_as_undisturbed(out, converted)


def test_a_finished_folder_is_left_alone(base, texts, converted):
    before = {path.name: path.stat().st_mtime_ns for path in converted.iterdir()}
    for go_on in (lambda: again(base, texts, converted), lambda: call("resume", converted)):
        with pytest.raises(ConfigError, match="A finished one lies there"):
            go_on()
    assert {path.name: path.stat().st_mtime_ns for path in converted.iterdir()} == before


@pytest.mark.parametrize("where", ["weights", "loading", "card", "moving"])
def test_a_crash_while_writing_leaves_no_model_behind_and_can_be_mended(where, base, texts, converted, tmp_path, monkeypatch):
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
                "card": (card, "text"),
            }
            patched.setattr(*broken[where], crash)
        again(base, texts, out)
    assert len(moves) == (3 if where == "moving" else 0)
    assert not (out / "segue.json").exists()
    with pytest.raises(SegueError):
        segue.from_pretrained(out)
    again(base, texts, out)
    assert_as_undisturbed(out, converted)
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


def test_what_failed_at_its_start_can_be_mended(base, texts, tmp_path):
    out = tmp_path / "out"
    for wrong in ({"student": "Fourier"}, {"sites": "model.layers.*.mlp"}, {"student": "WindowedLinear(window=-3)"}):
        with pytest.raises(SegueError):
            again(base, texts, out, **wrong)
        assert not (out / "segue.json").exists()
    again(base, texts, out, student="LinearAttention", steps=1, looks=1)
    assert segue.from_pretrained(out)


def convert_as_rank(engine: str, base: str, texts: str, place: Path) -> dict[str, Any]:
    """Convert as one of two processes that `accelerate launch` or torchrun has started."""
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_VERSION": "2"}
    os.environ |= fsdp if engine == "fsdp2" else {}  # transformers then loads weights in one process only
    seen = []
    plain = NextToken.__call__

    def watched(self, model, batch):
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())  # not the root's, if just evaluated
        seen.append([type(model).__name__, len(batch["input_ids"]), sharded])
        return plain(self, model, batch)

    NextToken.__call__ = watched
    try:
        said = convert("llama", base, texts, place / engine, student=STUDENT, steps=6)
    finally:
        NextToken.__call__ = plain
    return {"said": said, "seen": seen, "world": torch.distributed.get_world_size()}


@pytest.fixture(scope="module")
def ranks(base, texts, tmp_path_factory):
    place = tmp_path_factory.mktemp("ranks")
    arguments = (str(base("llama")), str(texts), place)
    return place, Ranks({engine: partial(convert_as_rank, engine, *arguments) for engine in ("ddp", "fsdp2")}, place)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_processes_convert_as_one_does(engine, ranks, converted):
    place, results = ranks
    first, second = results[engine]
    out = place / engine
    assert {path.name for path in out.iterdir()} == {path.name for path in converted.iterdir()}
    found, wanted = read(out / "model.safetensors"), read(converted / "model.safetensors")
    assert set(found) == set(wanted)
    for name, weight in wanted.items():
        assert found[name].shape == weight.shape
        assert (found[name] - weight).abs().max() <= 1e-4 * weight.abs().max() + 1e-6, name
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert segue.from_pretrained(out)
    network = "DistributedDataParallel" if engine == "ddp" else "FSDPLlamaForCausalLM"
    for found in (first, second):
        assert found["world"] == 2
        assert found["seen"] == [[network, 2, engine == "fsdp2"]] * 6  # half of each batch of four
    assert len(re.findall(r"^step \d", first["said"], re.M)) == 3
    assert "as saved" in first["said"]
    assert second["said"] == ""

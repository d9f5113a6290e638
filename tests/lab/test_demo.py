"""The demo and the data under it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from segue.lab.data import Split, digits

from segue.errors import MissingExtraError
from segue.lab import demo


def test_the_demo_runs_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "demo"
    assert demo.main(["--out", str(out), "--steps", "10", "--teacher-steps", "20", "--seed", "1"]) == 0

    metrics = json.loads((out / "metrics.json").read_text())
    points = metrics["points"]
    assert [point["step"] for point in points] == list(range(11))
    assert points[0]["alpha"] == 1.0
    assert points[0]["blend"] == metrics["teacher_accuracy"]
    assert points[0]["students"] == metrics["swap_accuracy"]
    assert points[-1]["alpha"] == 0.0
    assert points[-1]["blend"] == points[-1]["students"]
    assert all(-1 <= cosine <= 1 for point in points for cosine in point["cosine"].values())
    assert set(points[0]["cosine"]) == {f"blocks.{i}.attn" for i in range(6)}
    assert (out / "handover.png").read_bytes().startswith(b"\x89PNG")

    printed = capsys.readouterr().out
    for text in ("| teacher |", "| plain swap, no training |", "| students alone at 100% |", "| interface cosine |", "ok  "):
        assert text in printed
    assert str(out / "handover.png") in printed
    assert str(out / "metrics.json") in printed
    assert "\r" not in printed  # not a terminal: whole lines only


def test_two_runs_with_one_seed_are_equal(tmp_path: Path):
    runs = []
    for name in ("a", "b"):
        demo.main(["--out", str(tmp_path / name), "--steps", "2", "--teacher-steps", "2"])
        runs.append(json.loads((tmp_path / name / "metrics.json").read_text())["points"])
    assert runs[0] == runs[1]


def test_a_terminal_gets_one_line_that_renews_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    say = demo.Progress("teacher", 20)
    for step in range(1, 21):
        say(step, "loss 1.0")
    printed = capsys.readouterr().out
    assert printed.count("\r") == 20
    assert printed.endswith("\rteacher [##########] 100%  loss 1.0\n")
    assert printed.count("\n") == 1


def test_it_looks_often_while_the_teacher_leaves():
    looks = sorted(demo._when_to_look(800))
    assert looks[:3] == [0, 10, 20]
    assert looks[-3:] == [743, 771, 800]
    assert {200, 400, 600} < set(looks)
    assert demo._when_to_look(1) == {0, 1}


def test_digits_are_standardised_and_split_without_overlap():
    data = digits()
    assert (len(data.train), len(data.validation)) == (1297, 500)
    assert data.train.images.dtype == torch.float32
    torch.testing.assert_close(data.train.images.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(data.train.images.std(), torch.tensor(1.0))
    assert torch.equal(data.train.images, digits().train.images)
    assert not torch.equal(data.train.images, digits(seed=1).train.images)
    assert data.train.labels.bincount().min() > 100


def test_batches_cover_an_epoch_and_go_on():
    split = Split(torch.arange(10.0).view(10, 1), torch.arange(10))
    batches = split.batches(3)
    seen = torch.cat([next(batches)[1] for _ in range(3)])
    assert len(seen.unique()) == 9
    assert len(next(batches)[1]) == 3
    assert len(next(split.batches(64))[1]) == 10


def test_missing_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError) as caught:
        digits()
    assert str(caught.value) == (
        "the digits were to be loaded.\n  They lie inside scikit-learn, which is not installed.\n  Hint: pip install segue[lab]"
    )


def test_missing_matplotlib_is_named_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(demo, "train_teacher", lambda *_: pytest.fail("the teacher was trained first"))
    with pytest.raises(MissingExtraError) as caught:
        demo.main(["--out", str(tmp_path)])
    assert str(caught.value) == (
        "the demo was to draw a picture.\n  matplotlib is not installed.\n  Hint: pip install segue[lab]"
    )

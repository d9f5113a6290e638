"""The demo, from its command to its report."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from segue.cli import demo
from segue.lab import variants
from segue.lab.experiment import Experiment
from segue.lab.grid import run_named
from segue.lab.report import figures
from segue.reporting import records as results

pytestmark = pytest.mark.slow

OPTIONS = {"steps": 3, "teacher_steps": 4, "depth": 2}
WORKERS = 2


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """Run the demo once, with few steps; seven of its eight runs are done beforehand, as no process must begin for them."""
    out = tmp_path_factory.mktemp("runs") / "demo"
    experiment = Experiment(demo.__name__, OPTIONS)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // WORKERS))  # as in a worker: more threads round in another way
    for run in experiment.runs()[:-1]:
        run_named(experiment, run.name, out)
    torch.set_num_threads(threads)
    console = Console(record=True, width=100, file=io.StringIO())
    code = demo.show(out, console, options=OPTIONS, workers=WORKERS)
    return out, console.export_text(), code


def test_it_compares_the_methods_of_the_paper_and_local_fit_with_one_seed(shown):
    out, _, code = shown
    found = results.read_all(out)
    assert code == 0
    assert {run.run_info.method for run in found} == {variant.name for variant in variants.PAPER} | {"local_fit"}
    assert {run.run_info.seed for run in found} == {0}
    assert len({json.dumps(run.train_info.teacher) for run in found}) == 1, "one teacher for all"


def test_it_ends_with_a_table_and_the_path_of_the_report(shown):
    out, printed, _ = shown
    for variant in variants.PAPER:
        assert variant.label in printed
    assert str(out / "report.html") in printed
    assert "With one seed per method nothing is significant" in printed
    assert "Replaced without training" in printed
    assert re.search(r"With .+, the students alone hold \d+\.\d% of the teacher's accuracy\.", printed)
    assert (out / "report.html").stat().st_size > 50_000
    for name in ("cosine", "accuracy", "schedules", "gradient_norm", "drift"):
        assert (out / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (out / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_a_second_call_finds_everything_done(shown, capsys, monkeypatch):
    monkeypatch.setattr(figures, "draw", lambda summary, folder: [])  # they were drawn
    out, _, _ = shown
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/result.json")}
    assert demo.show(out, Console(quiet=True), options=OPTIONS, workers=WORKERS) == 0
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/result.json")} == before
    assert "8 finished before, 0 to do" in capsys.readouterr().err


def test_all_methods_begin_with_the_same_students_and_the_same_swap(shown):
    out, _, _ = shown
    swaps = {json.dumps(run.train_info.points[0].students) for run in results.read_all(out)}
    assert len(swaps) == 1

"""The demo, from its command to its report."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from segue.lab import demo, results, variants


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """Run the demo once, with few steps, two runs at a time."""
    out = tmp_path_factory.mktemp("runs") / "demo"
    console = Console(record=True, width=100, file=io.StringIO())
    code = demo.show(out, console, options={"steps": 3, "teacher_steps": 4, "depth": 2}, workers=2)
    return out, console.export_text(), code


def test_it_compares_the_seven_methods_of_the_paper_with_one_seed(shown):
    out, _, code = shown
    found = results.read_all(out)
    assert code == 0
    assert {run.run_info.method for run in found} == {variant.name for variant in variants.PAPER}
    assert {run.run_info.seed for run in found} == {0}
    assert len({json.dumps(run.train_info.teacher) for run in found}) == 1, "one teacher for all"


def test_it_ends_with_a_table_and_the_path_of_the_report(shown):
    out, printed, _ = shown
    for variant in variants.PAPER:
        assert variant.label in printed
    assert str(out / "report.html") in printed
    assert "nothing can be said about significance" in printed
    assert "Swapped without training" in printed
    assert (out / "report.html").stat().st_size > 50_000
    for name in ("cosine", "accuracy", "schedules", "gradient_norm", "drift"):
        assert (out / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (out / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_a_second_call_finds_everything_done(shown, capsys):
    out, _, _ = shown
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/result.json")}
    assert demo.show(out, Console(quiet=True), options={"steps": 3, "teacher_steps": 4, "depth": 2}, workers=2) == 0
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/result.json")} == before
    assert "7 finished before, 0 to do" in capsys.readouterr().err


def test_all_methods_begin_with_the_same_students_and_the_same_swap(shown):
    out, _, _ = shown
    swaps = {json.dumps(run.train_info.points[0].students) for run in results.read_all(out)}
    assert len(swaps) == 1

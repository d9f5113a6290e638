"""Runs of the lab: finished ones are read and skipped, an interrupted one resumes, with the teacher that was trained before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import V0_1_0, from_dict, results
from .agreement import assert_agrees
from .cases import filled
from .command import segue_command

FINISHED = ["dcr_dfg-seed0", "dcr_dfg-seed1", "theseus-seed0", "theseus-seed1"]
INTERRUPTED = "distillation-seed0"
EXPERIMENT = f"""
import json
from pathlib import Path

from {from_dict.__module__} import from_dict


def runs(seeds: int):
    folders = sorted(Path(__file__).parent.glob("grid/*/config.json"))
    return [from_dict(json.loads(path.read_text())["config"]) for path in folders]
"""


@pytest.fixture
def lab(tmp_path) -> Path:
    folder = filled(V0_1_0 / "lab", tmp_path / "lab", experiment=tmp_path / "lab" / "runs.py")
    (folder / "runs.py").write_text(EXPERIMENT)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def numbers(data: object) -> list[float]:
    """List the numbers of a result in their order, without times and what was not recorded then."""
    if isinstance(data, dict):
        left_out = ("seconds", "peak_memory", "alphas", "losses", "lr", "weights", "rises")
        return [number for name in sorted(data) if name not in left_out for number in numbers(data[name])]
    if isinstance(data, list):
        return [number for part in data for number in numbers(part)]
    return [float(data)] if isinstance(data, int | float) else []


def test_results_are_read_with_every_number(lab):
    found = results.read_all(lab / "grid")
    assert [result.run_info.name for result in found] == FINISHED
    for result in found:
        written = json.loads((lab / "grid" / result.run_info.name / "result.json").read_text())
        points = written["train_info"].pop("points")
        assert_agrees(written["run_info"].pop("config"), from_dict(result.run_info.config))
        assert_agrees(written["run_info"], result.run_info, "RunInfo")
        assert_agrees(written["train_info"], result.train_info, "TrainInfo")
        assert result.final == written["train_info"]["final"]["accuracy"]
        assert result.meta_info == written["meta_info"]
        assert len(points) == 4
        for point, read in zip(points, result.train_info.points, strict=True):
            assert_agrees(point, read, "Point")


@pytest.mark.slow
def test_a_report_is_made_of_them(lab, capsys):
    segue_command("report", lab / "grid")
    said = capsys.readouterr().out
    assert "DCR + DFG" in said
    assert "Theseus" in said
    assert (lab / "grid" / "report.html").stat().st_size > 10_000


def test_an_interrupted_run_goes_on_and_a_grid_skips_what_is_finished(lab, capsys):
    teachers, finished = files(lab / "teachers"), {name: files(lab / "grid" / name) for name in FINISHED}
    segue_command("resume", lab / "grid" / INTERRUPTED)
    found, wanted = (json.loads((lab / part / INTERRUPTED / "result.json").read_text()) for part in ("grid", "undisturbed"))
    assert numbers(found["train_info"]["points"]) == pytest.approx(numbers(wanted["train_info"]["points"]), rel=1e-3, abs=1e-5)
    assert found["train_info"]["final"] == pytest.approx(wanted["train_info"]["final"], rel=1e-3)
    left = {name: content for name, content in files(lab / "teachers").items() if not name.endswith("lock")}
    assert left == teachers  # no other teacher was trained
    capsys.readouterr()
    segue_command("resume", lab / "grid", "--run-file")
    segue_command("grid", lab / "runs.py", "--out", lab / "grid", "--option", "seeds=2")
    said = capsys.readouterr()
    assert said.err.count("5 runs, 5 finished before, 0 to do") == 2
    assert {name: files(lab / "grid" / name) for name in FINISHED} == finished

"""Which runs a report is made from: one grid, and strangers only if they are asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from segue.errors import ResultError
from segue.lab.report.source import left_out, read_grid
from segue.reporting import records
from segue.reporting.records import Result
from tests.lab.report.saved_runs import grid, run, save

SMALL: dict[str, Any] = {"evaluations": 2, "sites": 1}


def small_grid(**settings: Any) -> list[Result]:
    return grid(methods=["theseus", "dcr"], groups=["100 %"], seeds=3, **SMALL, **settings)


def names(results: list[Result]) -> list[str]:
    return sorted(f"{one.run_info.experiment} {one.run_info.method} {one.run_info.seed}" for one in results)


def test_a_grid_alone_has_no_strangers(tmp_path: Path):
    save(small_grid(), tmp_path)
    source = read_grid(tmp_path)
    assert (len(source.results), source.strangers, left_out(source.strangers)) == (6, [], [])


def test_a_packed_grid_and_a_single_run_are_grids(tmp_path: Path):
    records.pack(small_grid(), tmp_path / "packed")
    assert len(read_grid(tmp_path / "packed").results) == 6
    records.write(run(**SMALL), tmp_path / "one")
    assert len(read_grid(tmp_path / "one").results) == 1


def test_other_folders_experiments_settings_and_doubles_are_left_out_and_named(tmp_path: Path):
    mine = save(small_grid(), tmp_path / "mine")
    records.write(run(experiment="other", **SMALL), mine / "other")
    unlike = run(seed=7, config={"method": "dcr", "seed": 7, "epochs": 999}, **SMALL)
    records.write(unlike, mine / "unlike")
    records.write(run(seed=1, **SMALL), mine / "x-again")
    save(small_grid(experiment="below"), mine / "deeper" / "grid")
    records.pack(small_grid(experiment="packed"), mine / "kept")
    source = read_grid(mine)
    assert names(source.results) == names(small_grid())
    why = {one.place: one.why for one in source.strangers}
    assert why.pop("other") == "of another experiment than 'small'"
    assert why.pop("unlike") == "of other settings than its method's"
    assert why.pop("x-again") == "a double of dcr, seed 1"
    assert set(why.values()) == {"in another folder"}
    assert len(why) == 7
    lines = left_out(source.strangers, most=4)
    assert lines[0] == "10 runs left out; --all takes them too:"
    assert lines[-1] == "  and 6 more"
    assert len(read_grid(mine, everything=True).results) == 6 + 3 + 6 + 6


def test_seeds_alone_are_no_other_settings(tmp_path: Path):
    plan = {"kind": "Plan", "seed": 0, "gate": {"kind": "gates.Blend", "seed": 0}}
    for seed in range(3):
        own = {**plan, "seed": seed, "gate": {**plan["gate"], "seed": seed}}
        records.write(run(seed=seed, config={"plan": own, "seed": seed}, **SMALL), tmp_path / str(seed))
    assert read_grid(tmp_path).strangers == []


def test_a_folder_above_grids_is_refused_and_nothing_is_written(tmp_path: Path):
    save(small_grid(), tmp_path / "runs" / "mine")
    with pytest.raises(
        ResultError, match=r"has no finished run of its own.\n  Below it are runs/mine/000-.*\n  Hint: give the folder"
    ):
        read_grid(tmp_path)
    deep = tmp_path / "a" / "b" / "c" / "d"
    records.write(run(**SMALL), deep / "e")
    with pytest.raises(ResultError, match=r"Far below it are 1 run\."):
        read_grid(tmp_path / "a")


def test_a_folder_without_runs_says_what_a_run_is(tmp_path: Path):
    with pytest.raises(ResultError, match="A finished run is a folder with a result.json"):
        read_grid(tmp_path)
    with pytest.raises(ResultError, match="There is no such folder"):
        read_grid(tmp_path / "missing")


def test_runs_keep_their_order(tmp_path: Path):
    made = small_grid()
    save(made, tmp_path)
    assert [replace(one, meta_info={}) for one in read_grid(tmp_path).results] == [replace(one, meta_info={}) for one in made]

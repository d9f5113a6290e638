"""Result files: written atomically, read completely or refused with a reason, those of version 0.1.0 too."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from segue.errors import ResultError
from segue.reporting import records
from tests.lab.report.saved_runs import run


def test_a_result_reads_back_with_null_for_what_is_not_finite(tmp_path: Path):
    made = run(evaluations=3, sites=2)
    made = replace(made, train_info=replace(made.train_info, final={"accuracy": math.inf}))
    read = records.read(records.write(made, tmp_path / "run"))
    assert read.run_info == made.run_info
    assert read.train_info.points == made.train_info.points
    assert math.isnan(read.final)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["result.json"]


def test_the_keys_of_version_0_1_0_are_read(tmp_path: Path):
    made = run(evaluations=2, sites=1)
    path = records.write(made, tmp_path)
    data = json.loads(path.read_text(encoding="utf-8"))
    data["train_info"]["teacher_look"] = data["train_info"].pop("teacher_eval")
    data["train_info"]["a_key_of_a_later_version"] = 1
    records.write_json(data, path)
    assert records.read(path) == made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data | {"format": 7}, "has a format that this version does not read.\n  Its format is 7, this version"),
        (
            lambda data: data | {"train_info": {}},
            "is not the complete result of a run.\n  Reading it ends with KeyError: 'points'",
        ),
        (lambda data: [data], "is not the complete result of a run.\n  Reading it ends with TypeError"),
    ],
)
def test_what_is_not_a_result_is_refused(tmp_path: Path, change, message: str):
    path = records.write(run(evaluations=2, sites=1), tmp_path)
    records.write_json(change(json.loads(path.read_text(encoding="utf-8"))), path)
    with pytest.raises(ResultError) as caught:
        records.read(path)
    assert message in str(caught.value)


def test_folders_without_runs_are_refused(tmp_path: Path):
    with pytest.raises(ResultError, match=r"is not a folder of runs.\n  There is no such folder.\n  Hint: name the folder"):
        records.read_all(tmp_path / "missing")
    with pytest.raises(ResultError, match=r"has no finished run.\n  A finished run is a folder with a result.json"):
        records.read_all(tmp_path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path):
    path = records.write_file("old", tmp_path / "folder" / "page.html")
    with pytest.raises(TypeError, match="not JSON serializable"):
        records.write_json({"a": object()}, path)
    assert path.read_text() == "old"

"""Packed results: small text, and the same tables as from the runs themselves."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from segue.errors import ResultError
from segue.lab.report import tables
from segue.lab.report.summary import summarize
from segue.reporting import packed, records
from tests.lab.report.measured_runs import cost_of, with_cost
from tests.lab.report.saved_runs import grid, run, save


def results():
    """Make up runs of several methods, groups and seeds, with costs and configurations."""
    return [
        with_cost(
            replace(one, run_info=replace(one.run_info, config={"plan": {"seed": one.run_info.seed}, "big": [1] * 300})),
            cost_of(one.run_info.method, sites=2),
        )
        for one in grid(seeds=3, evaluations=5, sites=2)
    ]


def test_tables_from_packed_results_are_those_from_the_runs(tmp_path):
    save(results(), tmp_path / "runs")
    own = records.read_all(tmp_path / "runs")
    path = records.pack(own, tmp_path / "packed")
    again = records.read_all(tmp_path / "packed")
    assert [one.run_info for one in again] == [one.run_info for one in own]
    assert [one.meta_info for one in again] == [one.meta_info for one in own]
    first, second = summarize(own), summarize(again)
    assert tables.markdown(second) == tables.markdown(first)
    written, read = (list(map(str, tables.csv(one).split("\n"))) for one in (first, second))
    for a, b in zip(written, read, strict=True):
        for mine, theirs in zip(a.split(","), b.split(","), strict=True):
            assert mine == theirs or float(mine) == pytest.approx(float(theirs), rel=1e-5)
    sizes = sum(file.stat().st_size for file in (tmp_path / "runs").glob("**/result.json"))
    assert path.stat().st_size < sizes / 4
    assert len(path.read_text().splitlines()) == len(own) + 1


def test_scores_keep_all_digits_and_other_measurements_six(tmp_path):
    one = run(evaluations=3, sites=1)
    third = {"accuracy": 1 / 3}
    points = [
        replace(point, students=third, blend=third, epoch=2 / 3, cosine={"a": 1 / 3}, loss=1 / 3)
        for point in one.train_info.points
    ]
    one = replace(one, train_info=replace(one.train_info, points=points, final=third, seconds=1 / 3))
    records.pack([one], tmp_path)
    (again,) = records.read_all(tmp_path)
    assert again.train_info.final == third
    assert again.train_info.seconds == 0.333333
    for point in again.train_info.points:
        assert (point.students, point.blend, point.epoch) == (third, third, 2 / 3)
        assert (point.cosine, point.loss) == ({"a": 0.333333}, 0.333333)


def test_what_evaluations_leave_out_stays_left_out(tmp_path):
    one = run(evaluations=4, sites=2)
    first, second, third, last = one.train_info.points
    points = [
        replace(first, cosine={}, loss=None),
        replace(second, cosine={"a": 0.5}),
        replace(third, drift_blend={"a": 1.0}),
        replace(last, drift_blend={"b": 2.0}, students={"accuracy": math.nan}),
    ]
    none = replace(one, run_info=replace(one.run_info, seed=9), train_info=replace(one.train_info, points=[]))
    records.pack([replace(one, train_info=replace(one.train_info, points=points)), none], tmp_path)
    again, empty = records.read_all(tmp_path)
    assert empty.train_info.points == []
    found = again.train_info.points
    assert [point.cosine for point in found][:2] == [{}, {"a": 0.5}]
    assert [point.drift_blend for point in found][2:] == [{"a": 1.0}, {"b": 2.0}]
    assert found[3].students == {"accuracy": None}  # as a result file says it
    assert found[0].loss is None


def test_differences_are_exact():
    data = [
        {"run_info": {"method": "a", "config": {"x": 1, "y": {"z": [1, 2]}, "gone": None}}, "train_info": {"points": []}},
        {"run_info": {"method": "a", "config": {"x": None, "y": {"z": [1]}, "new": {}}}, "train_info": {"points": []}},
        {"run_info": {"method": "b", "config": {"x": 1.0, "y": 3, "gone": {"deep": True}}}, "train_info": {"points": []}},
        {"run_info": {"method": "b", "config": {"x": True, "y": {}, "gone": {}}}, "train_info": {"points": []}},
    ]
    again = packed.unpack(packed.pack(data))
    assert json.dumps([one["run_info"] for one in again]) == json.dumps([one["run_info"] for one in data])


@pytest.mark.parametrize("key", ["without", "=without", "==without", "like", "=like", "=", "names", "rows", "packed"])
def test_a_key_may_have_any_name(key):
    infos = [{"x": 1}, {key: ["x"]}, {key: {"without": 2}, "x": 1}, {key: {"without": 3}}, {"x": 1, "y": {key: 1}}]
    infos += [{"x": 1, "y": {key: 2}}, {"y": {"z": None}}]
    data = [{"run_info": {"method": "a", "config": info}, "train_info": {"points": []}} for info in infos]
    again = packed.unpack(packed.pack(data))
    assert [one["run_info"]["config"] for one in again] == infos
    second = packed.unpack(packed.pack([data[2], *data[3:], *data[:3]]))  # against another first line
    assert [one["run_info"]["config"] for one in second] == [infos[2], *infos[3:], *infos[:3]]


@pytest.mark.parametrize(
    "damage", ["", "{}\n", '{"packed": 2}\n', '{"packed": 1}\n{"like": 7}\n', '{"packed": 1}\n{"run_info"', "3\n"]
)
def test_a_damaged_file_is_refused(damage, tmp_path):
    (tmp_path / packed.FILE).write_text(damage)
    with pytest.raises(ResultError):
        records.read_all(tmp_path)

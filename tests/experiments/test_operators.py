"""The report on operators: numbers against independent computations, and no claim where nothing can be tested."""

from __future__ import annotations

import csv
import io
import json
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from experiments.operators import comparison, figures, report, runs, speed, text
from experiments.operators.comparison import Comparison, described, last_cosine, recovered
from scipy import stats

from segue.errors import ResultError
from segue.lab.config import to_dict
from segue.lab.report import tables
from segue.lab.report.figures import settings
from segue.lab.report.summary import summarize
from segue.plan import Plan
from segue.reporting.formatting import NOTHING
from segue.reporting.records import Result, read_all
from segue.students import Fourier, LeastSquares, LinearAttention, Linformer, StudentFactory
from tests.lab.report.measured_runs import cost_of, with_cost
from tests.lab.report.pages import NASTY, data_in
from tests.lab.report.saved_runs import run, save

pytest.importorskip("matplotlib", reason="the report draws with matplotlib (pip install segue[lab])")

TEACHER = 0.8
STUDENTS: dict[str, StudentFactory] = {
    "Linear": LinearAttention(),
    "Linformer": Linformer(rank=4, tokens=16),
    "Fourier": Fourier(),
}
FINALS = {  # by operator and method, one value per seed
    "Linear": {"student_only": [0.50, 0.52, 0.48, 0.61, 0.60], "dcr": [0.60, 0.63, 0.58, 0.72, 0.70]},
    "Linformer": {"student_only": [0.70, 0.72, 0.74, 0.71, 0.70], "dcr": [0.73, 0.70, 0.75, 0.72, 0.69]},
    "Fourier": {"student_only": [0.40, 0.44, 0.39, 0.41, 0.40], "dcr": [0.36, 0.37, 0.41, 0.39, 0.40]},
}


def one(operator: str, method: str, seed: int, final: float, student: Any = None, **settings: Any) -> Result:
    """Make up a run of one operator that ends with a score."""
    plan = Plan(sites="blocks.*.attn", student=student or STUDENTS[operator])
    config = {"plan": to_dict(plan), "seed": seed}
    made = run(method=method, group=operator, seed=seed, evaluations=3, sites=2, config=config, **settings)
    train = replace(made.train_info, final={"accuracy": final}, teacher={"accuracy": TEACHER})
    return with_cost(replace(made, train_info=train), cost_of(method, sites=2))


def runs_of(finals: dict[str, dict[str, list[float]]] = FINALS) -> list[Result]:
    return [
        one(operator, method, seed, final)
        for operator, methods in finals.items()
        for method, values in methods.items()
        for seed, final in enumerate(values)
    ]


def compared(runs: list[Result]) -> Comparison:
    found = comparison.compare(summarize(runs))
    assert found is not None
    return found


def speeds(**changes: Any) -> dict[str, Any]:
    """Make up what speed.py writes: Linear is twice, then eight times as fast; Fourier never is."""

    def module(times: list[float], operations: int) -> dict[str, Any]:
        return {"milliseconds": times, "operations": operations, "parameters": 10}

    def point(tokens: int, teacher: float, linear: float, fourier: float) -> dict[str, Any]:
        noise = [1.0, 1.1, 0.9]
        students = {
            "Linear": module([linear * n for n in noise], 50),
            "Fourier": module([fourier, fourier * 1.5, fourier], 20),
        }
        return {"tokens": tokens, "teacher": module([teacher * n for n in noise], 100), "students": students}

    return {
        "format": 1, "width": 384, "heads": 6, "batch": 1, "clock": "processor's",
        "students": {"Linear": "elu", "Fourier": "no size"},
        "points": [point(256, 8.0, 1.0, 9.0), point(64, 2.0, 1.0, 3.0)],
        "machine": {"cpu": "a made-up CPU", "threads": 1},
    } | changes  # fmt: skip


def test_shares_and_intervals_are_those_of_the_files(tmp_path: Path):
    save(runs_of(), tmp_path)
    found = compared(read_all(tmp_path))
    assert [one.name for one in found.operators] == ["Linformer", "Linear", "Fourier"]  # most recovered first
    for operator in found.operators:
        for method, values in FINALS[operator.name].items():
            shares = [value / TEACHER for value in values]
            cell = operator.found["recovered"][method]
            assert cell is not None
            assert (cell.mean, cell.n) == (pytest.approx(statistics.mean(shares)), 5)
            assert cell.half == pytest.approx(stats.t.ppf(0.975, 4) * statistics.stdev(shares) / 5**0.5)


def test_the_best_is_marked_only_where_holms_p_is_below_five_percent():
    found = compared(runs_of())
    by_name = {operator.name: operator.leads["recovered"] for operator in found.operators}
    p = {name: stats.ttest_rel(*sorted(FINALS[name].values(), key=statistics.mean, reverse=True)).pvalue for name in by_name}
    ordered = sorted(p, key=p.__getitem__)
    adjusted: dict[str, float] = {}
    for rank, name in enumerate(ordered):
        adjusted[name] = max([min(1.0, p[name] * (3 - rank)), *adjusted.values()])
    for name, lead in by_name.items():
        assert lead is not None
        assert lead.difference.p == pytest.approx(p[name])
        assert lead.holm == pytest.approx(adjusted[name])
    assert [name for name, lead in by_name.items() if text.leads(lead)] == ["Linear"]
    matrix = text.page_data(found, None)["matrices"][0]
    assert [[cell["mark"] for cell in row["cells"]] for row in matrix["rows"]] == [["", ""], ["", "best"], ["", ""]]
    assert "for Linear (DCR, +13.0 points); for the other 2 the difference is within the noise." in " ".join(
        text.sentences(found, None)
    )


def test_the_two_best_operators_are_compared_by_seed():
    first, second = (max(FINALS[name].values(), key=statistics.mean) for name in ("Linformer", "Linear"))
    p = stats.ttest_rel(first, second).pvalue
    told = text.sentences(compared(runs_of()), None)[0]
    assert told.startswith("The operator with the highest mean share of the teacher's accuracy is Linformer with DCR (89.8 ± ")
    assert told.endswith(f", p = {p:.2f}, is within the noise.")
    surer = FINALS | {"Linear": {"dcr": [0.60, 0.58, 0.70, 0.62, 0.66]}}
    p = stats.ttest_rel(first, surer["Linear"]["dcr"]).pvalue
    told = text.sentences(compared(runs_of(surer)), None)[0]
    assert told.endswith(f", p = {p:.3f}, is more than the noise explains, taken alone, though the same scores chose the two.")


def test_differences_that_are_equal_in_every_seed_are_not_significant():
    found = compared(runs_of({"Linear": {"student_only": [0.5, 0.6], "dcr": [0.51, 0.61]}, "Fourier": {"dcr": [0.3, 0.3]}}))
    lead = found.operators[0].leads["recovered"]
    assert lead is not None
    assert (lead.difference.p, lead.holm) == (None, None)
    assert "No difference can be tested" in text.sentences(found, None)[1]


def test_the_cosine_is_the_mean_over_sites_at_the_last_evaluation_that_measured_it():
    made = one("Linear", "dcr", 0, 0.5)
    points = [replace(made.train_info.points[0], cosine={"a": value, "b": 0.5}) for value in (0.1, 0.7)]
    points.append(replace(points[0], cosine={}))
    made = replace(made, train_info=replace(made.train_info, points=points))
    assert last_cosine(made) == pytest.approx(0.6)
    points[1] = replace(points[1], cosine={"a": float("nan"), "b": 0.5})
    assert last_cosine(replace(made, train_info=replace(made.train_info, points=points))) is None
    assert last_cosine(replace(made, train_info=replace(made.train_info, points=points[2:]))) is None


@pytest.mark.parametrize(("teacher", "final"), [(0.0, 0.5), (-1.0, 0.5), (None, 0.5), (0.8, None), (0.8, float("nan"))])
def test_nothing_is_recovered_of_no_score(teacher: float | None, final: float | None):
    made = one("Linear", "dcr", 0, 0.5)
    train: Any = replace(made.train_info, teacher={"accuracy": teacher}, final={"accuracy": final})
    assert recovered(replace(made, train_info=train)) is None


def test_one_student_is_no_comparison():
    alone = [one("Linear", "dcr", seed, 0.5) for seed in range(2)]
    same = [*alone, one("another group", "dcr", 0, 0.5, STUDENTS["Linear"])]
    mixed = [*alone, one("Linear", "student_only", 0, 0.5, Fourier())]  # method and operator cannot be distinguished
    for found in (alone, same, mixed, [run(evaluations=2, sites=1)]):
        assert comparison.compare(summarize(found)) is None


def test_one_seed_has_no_interval_no_mark_and_says_so():
    found = compared(runs_of({name: {method: v[:1] for method, v in of.items()} for name, of in FINALS.items()}))
    data = text.page_data(found, None)
    texts = [cell["text"] for matrix in data["matrices"] for row in matrix["rows"] for cell in row["cells"]]
    assert not any("±" in text for text in texts)
    assert not any(cell["mark"] for matrix in data["matrices"] for row in matrix["rows"] for cell in row["cells"])
    assert "One seed (n = 1): no intervals, no tests." in data["matrices"][0]["hint"]
    assert "Whether they differ cannot be tested" in data["findings"][0]
    assert "No difference can be tested" in data["findings"][1]
    with settings():
        assert figures.recovered(found).texts[0].get_text() == "one seed: no interval"


def test_cells_of_fewer_seeds_and_missing_methods_are_marked():
    finals = {"Linear": {"student_only": [0.5, 0.6, 0.55], "dcr": [0.6, 0.7]}, "Fourier": {"dcr": [0.3, 0.4, 0.35]}}
    matrix = text.page_data(compared(runs_of(finals)), None)["matrices"][0]
    assert "n = 3 seeds, fewer where noted" in matrix["hint"]
    cells = matrix["rows"][0]["cells"]
    assert cells[1]["text"].endswith(" (n = 2)")
    assert "n =" not in cells[0]["text"]
    assert matrix["rows"][1]["cells"][0] is None


def test_students_are_described_by_what_tells_them_apart():
    groups = {"a": Linformer(rank=4), "b": Linformer(rank=8), "c": Linformer(rank=8, init=LeastSquares())}
    runs = [one(name, "dcr", 0, 0.5, student) for name, student in groups.items()]
    words = {operator.name: operator.student for operator in compared(runs).operators}
    assert words["a"].startswith("Linformer(init=CopyMatching(), rank=4")
    assert words["c"].startswith("Linformer(init=LeastSquares(")
    assert compared(runs[:2]).operators[0].student == "Linformer(rank=4)"
    assert described({"unsaved": "mine"}) == "mine()"


def test_costs_are_what_the_runs_saved_and_columns_without_numbers_are_omitted():
    headings, rows = text.cost_table(compared(runs_of()), None)
    assert headings == [
        "Operator", "Student", "Parameters of the model, teachers gone", "A training step of the students",
        "A forward of the teachers replaced",
    ]  # fmt: skip
    assert rows[1] == ["Linear", "LinearAttention(feature_map='elu')", "50,000", "900 FLOPs", "20 FLOPs"]
    bare = [with_cost(result, {}) for result in runs_of()]
    assert text.cost_table(compared(bare), None)[0] == ["Operator", "Student"]


def test_speed_is_the_median_of_the_ratios_of_rounds(tmp_path: Path):
    (tmp_path / "speed.json").write_text(json.dumps(speeds()), encoding="utf-8")
    found = speed.read(tmp_path)
    assert found is not None
    assert found.tokens == [64, 256]
    ratios = [[8.0 * n / (9.0 * m) for n, m in zip((1.0, 1.1, 0.9), (1.0, 1.5, 1.0), strict=True)]]
    last = found.timed["Fourier"][-1].faster
    assert (last.median, last.rounds) == (pytest.approx(statistics.median(ratios[0])), 3)
    assert last.low == pytest.approx((sorted(ratios[0])[0] + sorted(ratios[0])[1]) / 2)
    assert [round(one.faster.median, 6) for one in found.timed["Linear"]] == [2.0, 8.0]
    headings, rows = text.cost_table(compared(runs_of()), found)
    assert headings[-1] == "Module's operations / teacher's, 256 tokens"
    assert {row[0]: row[-1] for row in rows} == {"Linear": "0.5", "Fourier": "0.2", "Linformer": NOTHING}
    told = text.sentences(compared(runs_of()), found)[-1]
    assert told.startswith("At 256 tokens the fastest is Linear: 8 (8 to 8) times its teacher's speed.")
    assert told.endswith("Linear from 64 tokens on. At no measured length: Fourier.")


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 7}', json.dumps(speeds(points=[{"tokens": 3}]))])
def test_a_file_of_times_that_cannot_be_understood_is_named(tmp_path: Path, text: str):
    (tmp_path / "speed.json").write_text(text, encoding="utf-8")
    with pytest.raises(ResultError, match="is not a file of measured times"):
        speed.read(tmp_path)


def test_the_report_is_complete_with_and_without_times(tmp_path: Path):
    save(runs_of(), tmp_path)
    data = data_in(report.build(tmp_path).read_text(encoding="utf-8"))
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["operators.pdf", "operators.png"]
    assert data["speed"] is None
    assert "python experiments/operators/speed.py --out" in data["speed_hint"]
    assert "python experiments/operators/speed.py --out" in (tmp_path / "operators.md").read_text(encoding="utf-8")
    (tmp_path / "speed.json").write_text(json.dumps(speeds()), encoding="utf-8")
    data = data_in(report.build(tmp_path).read_text(encoding="utf-8"))
    assert {"speed.png", "speed.pdf"} < {path.name for path in (tmp_path / "figures").iterdir()}
    assert data["speed"]["series"][0]["points"] == [[64, 2.0], [256, 8.0]]
    assert "| Linear | elu | 2 (2 to 2) | 8 (8 to 8) |" in (tmp_path / "operators.md").read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "operators.csv").read_text(encoding="utf-8"))))
    row = next(row for row in rows if (row["operator"], row["method"]) == ("Linear", "dcr"))
    assert float(row["recovered_mean"]) == pytest.approx(statistics.mean(FINALS["Linear"]["dcr"]) / TEACHER)


def test_runs_without_a_comparison_are_refused_before_anything_is_written(tmp_path: Path):
    save([one("Linear", "dcr", 0, 0.5)], tmp_path)
    with pytest.raises(ResultError, match="do not compare operators"):
        report.build(tmp_path)
    assert not (tmp_path / "operators.html").exists()


def test_odd_names_stay_text():
    odd = [one(NASTY, "dcr", seed, 0.5, STUDENTS["Linear"], label=NASTY) for seed in range(2)]
    odd += [one("$a_b$ | `c`", "dcr", seed, 0.6, STUDENTS["Fourier"], label=NASTY) for seed in range(2)]
    times = speed.parse(speeds(students={NASTY: NASTY, "$x$": "y"}))
    found = compared(odd)
    written = report.page(found, times, NASTY)
    assert "<img" not in written
    assert data_in(written)["matrices"][0]["rows"][1]["name"] == NASTY
    markdown = text.markdown(found, times)
    assert "<img" not in markdown
    assert tables.escaped("$a_b$ | `c`") in markdown
    with settings():
        for drawn in (figures.recovered(found), figures.speed_up(times)):
            drawn.draw_without_rendering()


def test_figures_show_every_mean_its_interval_and_the_ring():
    found = compared(runs_of())
    with settings():
        drawn = figures.recovered(found)
        drawn.draw_without_rendering()
        axes = drawn.axes[0]
    dots = [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 1 and line.get_fillstyle() != "none"]
    expected = [100 * cell.mean for operator in found.operators for cell in operator.found["recovered"].values() if cell]
    assert sorted(dots) == pytest.approx(sorted(expected))
    rings = [line.get_xdata()[0] for line in axes.lines if line.get_fillstyle() == "none"]
    assert rings == pytest.approx([100 * statistics.mean(FINALS["Linear"]["dcr"]) / TEACHER])
    assert "ringed" in drawn.texts[0].get_text().replace("\n", " ")
    for label in axes.get_yticklabels():
        assert label.get_window_extent().x0 >= 0


def test_names_at_the_ends_of_lines_keep_their_distance():
    names = [f"operator {i}" for i in range(9)]
    data = speeds(students=dict.fromkeys(names, "s"))
    for point in data["points"]:
        point["students"] = dict.fromkeys(names, point["students"]["Linear"])
    with settings():
        drawn = figures.speed_up(speed.parse(data))
        drawn.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in drawn.axes[0].texts), key=lambda box: box.y0)
    assert len(boxes) == 10  # with the teacher
    assert all(lower.y1 <= upper.y0 + 1 for lower, upper in pairwise(boxes))
    assert all(box.x1 <= drawn.bbox.x1 for box in boxes)


def test_what_the_script_measures_is_what_the_report_reads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speed, "REPEATED_BELOW", 1)
    assert list(speed.operators(48)) == list(runs.operators(48)) == list(speed.SIZES)
    data = json.loads(json.dumps(speed.measure([16], seconds=0.0, least=2)))
    found = speed.parse(data)
    assert found.tokens == [16]
    assert list(found.timed) == list(speed.SIZES)
    assert all(one.faster.median > 0 and one.faster.rounds == 2 for points in found.timed.values() for one in points)
    teacher = data["points"][0]["teacher"]
    assert teacher["operations"] == 2 * 16 * 384 * 4 * 384 + 4 * 16 * 16 * 384  # projections, scores and sums
    assert teacher["parameters"] == 4 * 384 * 385
    assert data["points"][0]["students"]["Linformer"]["parameters"] == 4 * 384 * 385 + 2 * 64 * 16


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, times in (("timed", speed.parse(speeds())), ("not timed", None)):
        (folder / f"{name}.html").write_text(report.page(compared(runs_of()), times, "x"), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in ("timed", "not timed")}


def test_the_page_shows_everything_at_every_width(visit):
    view = visit("timed", scheme="dark")
    view.locator("#figure-speed path.series").first.wait_for()
    assert view.locator("#findings li").count() == 3
    assert view.locator("table").count() == 4
    row = view.locator("table").first.locator("tbody tr").nth(1)
    assert row.inner_text().startswith("Linear")
    assert row.locator(".mark").all_inner_texts() == ["best"]
    assert view.locator("td[data-shade='1.0']").first.evaluate("(cell) => cell.style.getPropertyValue('--shade')") == "1.0"
    assert view.locator("#figure-speed .end-name").all_text_contents() == ["Fourier", "teacher", "Linear"]
    view.locator("#figure-speed .plot").focus()
    view.keyboard.press("End")
    assert view.locator("#spoken").text_content().startswith("256 tokens: Linear 8 \u00d7")
    view.keyboard.press("Escape")
    view.set_viewport_size({"width": 360, "height": 800})
    view.locator("#legend").wait_for()
    view.wait_for_timeout(60)
    assert view.locator("#figure-speed .end-name").count() == 0
    assert view.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_page_says_how_to_measure_speed(visit):
    view = visit("not timed", wait="main")
    assert view.locator("#figure-speed").count() == 0
    assert "experiments/operators/speed.py" in view.locator("#speed").inner_text()

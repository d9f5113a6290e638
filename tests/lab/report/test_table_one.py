"""Table 1 of the paper, measured: against numbers computed by hand, and honest about what was not measured."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from segue.lab.report import figures, table_one, tables
from segue.lab.report.summary import Group, summarize
from segue.lab.report.table_one import TableOne, gate_fraction, matching, rebuilt, to_prediction, variance
from segue.reporting import records as results
from segue.reporting.formatting import NOTHING
from segue.reporting.palette import line_styles
from segue.reporting.records import Result
from segue.reporting.statistics import Estimate
from tests.lab.report import measured_runs
from tests.lab.report.measured_runs import cost_of, with_cost, with_points
from tests.lab.report.saved_runs import run, save

A, B = "blocks.0.attn", "blocks.1.attn"
BARE: dict[str, Any] = {"evaluations": 4, "sites": 2, "epochs": 5}  # 100 steps


def at(
    alpha: float, gates: tuple[float, float], data: tuple[float, float], predicted: tuple[float, float], **more: Any
) -> dict:
    """Return what one evaluation measured at two sites."""
    return {
        "alpha": alpha,
        "gate_variance": dict(zip((A, B), gates, strict=True)),
        "gate_variance_error": {A: 0.1, B: 0.1},
        "data_variance": dict(zip((A, B), data, strict=True)),
        "predicted_variance": dict(zip((A, B), predicted, strict=True)),
        **more,
    }


def row_of(*runs: Result) -> TableOne:
    return summarize(list(runs)).groups[0].methods[0].table_one


def group_of(runs: list[Result]) -> Group:
    return summarize(runs).groups[0]


def mean_of(found: Estimate | None) -> float:
    assert found is not None
    return found.mean


def figure_of(runs: list[Result], name: str) -> Any:
    found = summarize(runs)
    panels = figures.group_figures(found.groups[0], found, line_styles(one for one, _ in found.methods))[name]
    with figures.settings():
        drawn = figures._figure(panels, "note")
        drawn.draw_without_rendering()
    return drawn


def theseus(seed: int = 0, **settings: Any) -> Result:
    return run(method="theseus", seed=seed, **BARE, **settings)


def test_the_gates_fraction_is_summed_over_sites_and_averaged_over_the_handover():
    one = with_points(
        theseus(),
        at(0.9, (1.0, 2.0), (1.0, 0.0), (2.0, 2.0)),  # 3 of 4; 3 where 4 were predicted
        at(0.3, (1.0, 0.0), (1.0, 2.0), (0.5, 0.0)),  # 1 of 4; 1 where 0.5 was predicted
        at(0.0, (9.0, 9.0), (0.0, 0.0), (1.0, 1.0)),  # the teachers have gone: not counted
    )
    other = with_points(theseus(1), at(0.5, (7.0, 0.0), (3.0, 0.0), (7.0, 0.0)))
    row = row_of(one, other)
    assert row.gate_fraction is not None
    assert (row.gate_fraction.mean, row.gate_fraction.n) == (pytest.approx((0.5 + 0.7) / 2), 2)
    assert row.gate_fraction.half == pytest.approx(12.7062 * 0.1, rel=1e-4)
    assert mean_of(row.to_prediction) == pytest.approx(((3 + 1) / (4 + 0.5) + 1) / 2)
    assert mean_of(row.variance) == pytest.approx(((4 + 4) / 2 + 10) / 2)
    assert not row.exactly_zero
    assert row.by_depth["gate_variance"].mean == pytest.approx([(1.0 + 7.0) / 2, (1.0 + 0.0) / 2])


def test_an_evaluation_counts_the_sites_that_have_both_numbers():
    point = replace(run(**BARE).train_info.points[0], gate_variance={A: 1.0, B: 5.0}, data_variance={A: 3.0})
    assert gate_fraction(point) == 0.25
    assert gate_fraction(replace(point, gate_variance={A: 0.0}, data_variance={A: 0.0})) is None  # nothing varies
    assert gate_fraction(replace(point, data_variance={})) is None
    assert gate_fraction(replace(point, data_variance={A: -0.5})) == 1.0  # an estimate below zero
    assert gate_fraction(replace(point, gate_variance={A: -0.5})) == 0.0
    assert [variance(replace(point, data_variance=found)) for found in ({A: 3.0}, {A: -0.5}, {}, {A: math.nan})] == [
        4,
        1,
        None,
        None,
    ]
    one = run(**BARE)
    assert to_prediction(with_points(one, {"gate_variance": {A: 1.0, B: 5.0}, "predicted_variance": {B: 4.0}})) == 1.25
    assert to_prediction(with_points(one, {"gate_variance": {A: 1.0}, "predicted_variance": {A: 0.0}})) is None
    assert to_prediction(with_points(one, {"gate_variance": {A: 1.0}})) is None


def test_zero_is_exact_only_where_it_was_not_estimated():
    still = at(0.5, (0.0, 0.0), (1.0, 1.0), (0.0, 0.0), gate_variance_error={A: 0.0, B: 0.0})
    exact, estimated = with_points(run(**BARE), still), with_points(run(**BARE), still | {"gate_variance_error": {A: 0.0}})
    assert (row_of(exact).exactly_zero, table_one.gates(row_of(exact))) == (True, "0 (exactly)")
    assert (row_of(estimated).exactly_zero, table_one.gates(row_of(estimated))) == (False, "0.0 %")
    once = with_points(run(**BARE), still, at(0.4, (1e-9, 0.0), (1.0, 1.0), (0.0, 0.0)))
    assert not row_of(once).exactly_zero
    assert table_one.gates(row_of(exact, run(seed=1, **BARE))) == "0 (exactly) (1 of 2 seeds)"


def test_a_run_without_teachers_is_measured_over_all_its_evaluations():
    found = row_of(with_points(run(method="distillation", **BARE), at(0.0, (0.0, 0.0), (1.0, 1.0), (0.0, 0.0))))
    assert mean_of(found.gate_fraction) == 0.0
    assert not found.exactly_zero  # the fixture's errors are 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_an_evaluation_that_is_not_finite_is_ignored(bad: Any, tmp_path: Path):
    good = at(0.9, (1.0, 0.0), (3.0, 0.0), (2.0, 0.0))
    broken = at(0.5, (bad, 1.0), (1.0, 1.0), (bad, 1.0))
    found = row_of(*results.read_all(save([with_points(theseus(), good, broken)], tmp_path)))
    assert (mean_of(found.gate_fraction), mean_of(found.to_prediction)) == (0.25, 0.5)
    lost = row_of(with_points(theseus(), broken), with_points(theseus(1), good))
    assert (mean_of(lost.gate_fraction), table_one.gates(lost)) == (0.25, "25.0 % (1 of 2 seeds)")
    assert not row_of(with_points(theseus(), broken)).varies


def test_costs_are_those_of_the_counted_phases():
    row = row_of(with_cost(run(**BARE), cost_of("dcr", sites=2, steps=100)))
    expected = {
        "to_student_only": (20 * 920 + 80 * 900) / (100 * 900),
        "to_distillation": (20 * 920 + 80 * 900) / (100 * 1200),
        "blend_to_student_only": 920 / 900,
        "bytes_to_student_only": 4200 / 4000,
        "extra_parameters": 6000,
        "of_a_full_teacher": (20 * 20) / (100 * 300),
        "break_even": 100 * 300 / (20 * 20 / 2),
        "break_even_blend": 30,
        "replaced": 2,
    }
    assert {name: mean_of(found) for name, found in row.counted.items()} == pytest.approx(expected)
    assert table_one.compute(row) == "1.004 x student-only, 1.3 % of what a full teacher adds"


def test_a_cost_survives_a_file():
    import torch
    from torch import nn

    import segue

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    found = segue.cost(model, segue.methods.theseus(sites="0"), torch.randn(4, 8), total_steps=50)
    again = rebuilt(found.to_dict())
    assert again is not None
    assert again.phases == found.phases
    assert again.steps == found.steps
    for name in ("flops", "to_student_only", "to_distillation", "break_even", "break_even_blend"):
        assert getattr(again, name) == pytest.approx(getattr(found, name))


def test_students_alone_add_nothing_and_break_even_never():
    group = group_of([with_cost(run(method="student_only", **BARE), cost_of("student_only", sites=2, steps=100))])
    row = group.methods[0].table_one
    assert mean_of(row.counted["of_a_full_teacher"]) == 0.0
    assert row.counted["break_even"] is None
    assert row.counted["blend_to_student_only"] is None
    cells = {column.key: column.cell(group.methods[0]).text for column in tables.cost_columns(group)}
    assert cells == {
        "to_student_only": "1.000",
        "to_distillation": "0.750",
        "bytes_to_student_only": "1.000",
        "extra_parameters": "0",
        "break_even": "none",
    }


@pytest.mark.parametrize("part", ["phases", "student_only", "distillation", "teachers", "teacher_pass"])
def test_half_a_cost_is_no_cost(part: str):
    whole = cost_of("dcr", sites=2, steps=100)
    assert rebuilt(whole) is not None
    assert rebuilt({name: value for name, value in whole.items() if name != part}) is None


def test_counts_of_zero_or_nothing_divide_nothing():
    zero = cost_of("dcr", sites=2, steps=100)
    zero["student_only"] |= {"flops": 0.0, "saved_bytes": 0}
    row = row_of(with_cost(run(**BARE), zero))
    assert row.counted["to_student_only"] is None
    assert row.counted["bytes_to_student_only"] is None
    assert mean_of(row.counted["extra_parameters"]) == 6000
    lost = cost_of("dcr", sites=2, steps=100)
    lost["phases"][0]["flops"] = None  # was not finite when it was saved
    assert not row_of(with_cost(run(**BARE), lost)).costs
    group = group_of([with_cost(run(**BARE), cost_of("dcr", sites=2, steps=100) | {"teacher_pass": None})])
    assert group.methods[0].table_one.costs
    assert "break_even" not in {column.key for column in tables.cost_columns(group)}  # unknown is not "none"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, None),
        ({"plan": "?"}, None),
        ({"plan": {"guidance": None, "distill": None}}, "no"),
        ({"plan": {"guidance": {"kind": "losses.FeatureGuidance"}, "distill": None}}, "at the sites (guidance)"),
        ({"plan": {"distill": {"kind": "losses.LogitDistillation"}}}, "of the model's output (distillation)"),
        (
            {"plan": {"guidance": {"unsaved": "mine"}, "distill": {}}},
            "at the sites (guidance) and of the model's output (distillation)",
        ),
    ],
)
def test_what_is_matched_is_read_from_the_plan(config: dict[str, Any], text: str | None):
    assert matching(config) == text
    assert row_of(run(config={"seed": 0, **config}, **BARE)).matching == text


@pytest.mark.parametrize(
    ("word", "mean", "half", "verdict"),
    [
        ("Low (deterministic)", 0.0, 0.0, "holds"),
        ("Low", 0.09, None, "holds"),
        ("Low", 0.09, 0.02, "open"),
        ("Low", 0.1, None, "does not hold"),
        ("Low", 0.3, 0.1, "does not hold"),
        ("Low", 0.3, 0.25, "open"),
        ("High (gate-induced)", 0.6, 0.05, "holds"),
        ("High", 0.6, 0.2, "open"),
        ("High", 0.5, None, "does not hold"),
        ("High", 0.3, 0.1, "does not hold"),
        ("High", 0.0, 0.0, "does not hold"),
    ],
)
def test_a_claim_is_tested_with_the_complete_interval(word: str, mean: float, half: float | None, verdict: str):
    assert table_one.level(Estimate(mean, half, 2, 2), word) == verdict
    assert table_one.level(None, word) == "not measured"


def test_the_claims_are_those_of_the_paper():
    claims = {method: [aspect.claims[method] for aspect in table_one.ASPECTS] for method in ("distillation", "theseus", "dcr")}
    assert claims == {
        "distillation": ["Low", "High (full teacher model forward)", "Yes (rigid)"],
        "theseus": ["High (gate-induced)", "Low (gate overhead only)", "No"],
        "dcr": ["Low (deterministic)", "Low (branch-local teacher only at replaced layers)", "No (optional via DFG)"],
    }


def test_sentences_say_what_holds_and_what_does_not():
    quiet = with_points(theseus(config={"plan": {}}), at(0.5, (1.0, 0.0), (9.0, 10.0), (2.0, 0.0)))
    dear = cost_of("distillation", sites=2, steps=100)
    found = table_one.findings(group_of([with_cost(quiet, dear)]))
    assert found == [
        "Gradient variance caused by the gates, the paper's claim does not hold: Theseus (“High (gate-induced)”, here 5.0 %).",
        "Extra compute of the run, the paper's claim does not hold: Theseus (“Low (gate overhead only)”, here 1.333 x "
        "student-only, 100.0 % of what a full teacher adds).",
        "Needs feature matching, the paper's claim holds: Theseus (“No”, here no).",
        "The gates' variance relative to the paper's formula: 0.5 x with Theseus.",
        "The total variance, by gates and minibatches: 20 with Theseus.",
        "A blend step costs as much as one with a full teacher at 30 modules like these; 2 modules replaced here.",
    ]


def test_a_plan_that_matches_features_is_not_what_the_paper_calls_no_matching():
    guided = run(method="dcr", config={"plan": {"guidance": {}}}, **BARE)
    aspect = table_one.ASPECTS[2]
    method = group_of([guided]).methods[0]
    assert table_one.against_paper(method, aspect) == ("at the sites (guidance)", "No (optional via DFG)", "does not hold")


def test_markdown_has_the_claims_and_the_numbers():
    text = tables.markdown(summarize(measured_runs.grid(["theseus", "dcr"], evaluations=21, sites=2)))
    part = text[text.index("### Cost and gradient variance") :]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    assert next(line for line in lines if line.startswith("| DCR")).startswith(
        "| DCR | 0 (exactly) | Low (deterministic) | holds |"
    )
    assert lines[0].count("|") == lines[2].count("|") == 11
    assert "| Theseus | " in part
    assert "1.004 | 0.753 | 1.022 | 1.050 | 6,000 | 150 |" in next(line for line in lines[5:] if line.startswith("| DCR"))
    assert "“Low” means below 10 %" in part


def test_csv_holds_the_same_numbers():
    runs = measured_runs.grid(["student_only", "theseus", "dcr"], evaluations=21, sites=2)
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(tables.csv(summarize(runs))))}
    theseus_row = row_of(*(one for one in runs if one.run_info.method == "theseus"))
    assert float(rows["theseus"]["gate_fraction_mean"]) == mean_of(theseus_row.gate_fraction)
    assert float(rows["theseus"]["gate_variance_to_prediction_mean"]) == mean_of(theseus_row.to_prediction)
    assert rows["theseus"]["gate_variance_exactly_zero"] == "0"
    assert (rows["dcr"]["gate_variance_exactly_zero"], rows["dcr"]["gate_fraction_mean"]) == ("1", "0.0")
    assert float(rows["dcr"]["to_student_only_mean"]) == pytest.approx((200 * 920 + 800 * 900) / 900_000)
    assert rows["student_only"]["break_even_mean"] == ""
    assert rows["dcr"]["feature_matching"] == "no"


def test_runs_that_measured_nothing_leave_no_trace_in_the_tables():
    plan_only = run(config={"plan": {"guidance": {}}}, **BARE)
    for runs in ([run(**BARE)], [plan_only]):
        group = group_of(runs)
        assert tables.shown_aspects(group) == []
        assert tables.cost_columns(group) == []
        assert "Cost and gradient variance" not in tables.markdown(summarize(runs))
    row = next(csv.DictReader(io.StringIO(tables.csv(summarize([run(**BARE)])))))
    assert (row["gate_fraction_mean"], row["to_student_only_mean"], row["feature_matching"]) == ("", "", "")


def test_a_mixed_group_says_what_is_missing():
    old = [run(method="theseus", seed=0, **BARE), run(method="distillation", seed=0, **BARE)]
    new = with_points(
        with_cost(theseus(1), cost_of("theseus", sites=2, steps=100)), at(0.5, (3.0, 0.0), (1.0, 0.0), (3.0, 0.0))
    )
    group = group_of([*old, new])
    cells = {method.method: [table_one.against_paper(method, one)[0] for one in table_one.ASPECTS] for method in group.methods}
    assert cells["theseus"] == [
        "75.0 % (1 of 2 seeds)",
        "1.004 x student-only, 1.3 % of what a full teacher adds (1 of 2 seeds)",
        NOTHING,
    ]
    assert cells["distillation"] == [NOTHING, NOTHING, NOTHING]
    assert [aspect.heading for aspect in tables.shown_aspects(group)] == [one.heading for one in table_one.ASPECTS[:2]]
    assert not any("KL distillation" in sentence for sentence in table_one.findings(group))


def test_costs_without_variances_show_costs_alone():
    group = group_of([with_cost(run(**BARE), cost_of("dcr", sites=2, steps=100))])
    assert [aspect.heading for aspect in tables.shown_aspects(group)] == ["Extra compute of the run"]
    assert "to_prediction" not in {column.key for column in tables.cost_columns(group)}


def test_the_figure_shows_sums_with_intervals_and_the_minibatches_thinly():
    runs = measured_runs.grid(["theseus"], seeds=2, evaluations=21, sites=2)
    axes = figure_of(runs, "gate_variance").axes[0]
    gates, data = axes.lines
    early = [[point for point in one.train_info.points if point.alpha > 0] for one in runs]
    expected = [sum(sum(point.gate_variance.values()) for point in points) / 2 for points in zip(*early, strict=True)]
    assert list(gates.get_ydata()) == pytest.approx(expected)
    assert list(gates.get_xdata()) == pytest.approx([point.step / 1000 for point in early[0]])
    assert len(axes.collections) == 1  # one band: the companion has none
    assert data.get_linewidth() < gates.get_linewidth()
    assert [text.get_text() for text in figure_of(runs, "gate_variance").legends[0].get_texts()] == ["Theseus"]


def test_the_figure_ends_with_the_handover():
    runs = measured_runs.grid(["student_only", "theseus"], seeds=1, evaluations=21, sites=1)
    group = group_of(runs)
    assert group.anneal_end == pytest.approx(0.15)
    assert max(line.get_xdata()[-1] for line in figure_of(runs, "gate_variance").axes[0].lines) == pytest.approx(0.15)
    assert group_of(measured_runs.grid(["student_only"], seeds=1, evaluations=5, sites=1)).anneal_end == 1.0


def test_what_a_logarithmic_figure_cannot_show_is_named():
    figure = figure_of(measured_runs.grid(["theseus", "dcr"], seeds=2, evaluations=21, sites=12), "variance_depth")
    assert figure.axes[0].get_yscale() == "log"
    assert "0 throughout: DCR" in figure.texts[0].get_text().replace("\n", " ")
    assert "Theseus" not in figure.texts[0].get_text()


def test_bounds_are_sizes_over_bounds_with_the_bound_in_sight():
    given = {"curvature_bias": {A: -1.0, B: 0.5}, "curvature_bound": {A: 4.0, B: 0.0}, "path_rise": {A: -3.0, B: 5.0}}
    one = with_points(theseus(), {"alpha": 0.5, **given, "path_bound": {A: 6.0, B: 4.0}})
    row = row_of(one)
    assert row.by_depth["curvature"].mean == [0.25, None]  # no bound, no ratio
    assert row.by_depth["path"].mean == [0.5, 1.25]
    figure = figure_of([one], "bounds")
    assert [axes.texts[0].get_text() for axes in figure.axes] == ["bound", "bound"]
    assert all(axes.get_ylim()[1] > 1 for axes in figure.axes)


@pytest.mark.parametrize("name", ["gate_variance", "variance_depth", "bounds"])
def test_text_is_legible_and_nothing_covers_the_data(name: str):
    figure = figure_of(measured_runs.grid(seeds=2, evaluations=21, sites=12), name)
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    legend = figure.legends[0].get_window_extent()
    note = figure.texts[0].get_window_extent()
    assert note.x1 <= figure.bbox.x1
    assert note.y0 >= 0
    assert legend.x1 <= figure.bbox.x1
    for box in boxes:
        assert not legend.overlaps(box)
        assert not note.overlaps(box)
        assert box.x0 >= -1
        assert box.x1 <= figure.bbox.x1 + 1


def test_names_are_in_order_and_inside_the_axes():
    steep = {"alpha": 0.5, "path_rise": {A: 1e-6, B: 0.1}, "path_bound": {A: 1.0, B: 1.0}}
    bent = with_points(theseus(), steep | {"curvature_bias": {A: 1.0}, "curvature_bound": {A: 2.0}})
    both = [bent, with_points(run(method="distillation", **BARE), steep)]  # no gate, no curvature bias
    names = [text.get_text() for text in figure_of(both, "bounds").legends[0].get_texts()]
    assert names == ["KL distillation", "Theseus"]
    only = figure_of([with_points(theseus(), steep)], "bounds").axes[0]
    assert only.get_yscale() == "log"
    assert only.texts[0].get_window_extent().y1 <= only.bbox.y1


def test_only_what_was_measured_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(figures, "write", lambda folder, name, draw: [folder / name])
    new = {"gate_variance", "variance_depth", "bounds"}

    def drawn(one: Result) -> set[str]:
        return {path.name for path in figures.draw(summarize([one]), tmp_path)} & new

    assert drawn(run(**BARE)) == set()
    assert drawn(with_cost(run(**BARE), cost_of("dcr", sites=2))) == set()
    assert drawn(with_points(theseus(), at(0.5, (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)))) == new - {"bounds"}
    assert drawn(with_points(theseus(), {"data_variance": {A: 1.0}})) == set()
    assert drawn(with_points(theseus(), {"path_rise": {A: 1.0}, "path_bound": {A: 2.0}})) == {"bounds"}

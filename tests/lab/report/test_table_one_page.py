"""The section "Cost and gradient variance" in a real browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from segue.lab.report.summary import summarize
from segue.reporting.records import Point, Result
from tests.lab.report import measured_runs
from tests.lab.report.measured_runs import cost_of, measured, with_cost
from tests.lab.report.pages import NASTY, data_in, has_lines, page_of
from tests.lab.report.saved_runs import run

pytest.importorskip("matplotlib", reason="the report draws with matplotlib (pip install segue[lab])")

SETTINGS: dict[str, Any] = {"evaluations": 21, "sites": 3}
CARDS = ("costs-card", "figure-gate_variance", "figure-variance_depth", "figure-bounds")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    bare = run(evaluations=3, sites=2)
    sites = [NASTY, "b"]
    nasty = measured(run(method="dcr", label=NASTY, evaluations=11, sites=2))
    points = [_renamed(point, sites) for point in nasty.train_info.points]
    kinds = {
        "whole": measured_runs.grid(seeds=2, **SETTINGS),
        "bare": [bare],
        "costs": [with_cost(bare, cost_of("dcr", sites=2))],
        "groups": [*measured_runs.grid(["theseus", "dcr"], seeds=2, **SETTINGS), run(group="5 %", evaluations=3, sites=2)],
        "nasty": [_with(nasty, points=points, sites=sites)],
    }
    for name, runs in kinds.items():
        (folder / f"{name}.html").write_text(page_of(runs), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in kinds}


def _renamed(point: Point, sites: list[str]) -> Point:
    by_site = {
        name: dict(zip(sites, value.values(), strict=True))
        for name, value in vars(point).items()
        if isinstance(value, dict) and name not in ("blend", "students") and value
    }
    return replace(point, **by_site)


def _with(result: Result, **train: Any) -> Result:
    return replace(result, train_info=replace(result.train_info, **train))


def shown(page: Any) -> list[str]:
    return [name for name in CARDS if page.locator(f"#{name}").is_visible()]


def test_the_section_shows_claims_numbers_and_figures(visit):
    page = visit("whole")
    assert shown(page) == list(CARDS)
    row = page.locator("table.claims tbody tr", has_text="KL distillation")
    assert row.locator("td").all_inner_texts() == [
        "0 (exactly)\nThe paper says “Low”: holds",
        "1.333 x student-only, 100.0\u00a0% of what a full teacher adds\n"
        "The paper says “High (full teacher model forward)”: holds",
        "of the model's output (distillation)\nThe paper says “Yes (rigid)”: holds",
    ]
    numbers = page.locator("#costs table").nth(1)
    assert numbers.locator("thead th").count() == 9
    assert numbers.locator("tbody tr").last.locator("td").all_inner_texts()[2:] == [
        "1.007", "0.755", "1.033", "1.050", "6,000", "150",
    ]  # fmt: skip
    assert page.locator("#costs-findings li").count() == 6
    assert "“Low” means below" in page.locator("#costs-reading").inner_text()


def test_lines_follow_the_methods_that_are_shown(visit):
    page = visit("whole")
    has_lines(page, "gate_variance", 14)  # with a companion each
    has_lines(page, "bounds", 8)
    page.get_by_role("button", name="Theseus", exact=True).click()
    has_lines(page, "gate_variance", 12)
    page.get_by_role("button", name="Show all").click()
    page.get_by_role("button", name="Hide all").click()
    assert shown(page) == list(CARDS)  # hidden is not unmeasured
    assert "every method is hidden" in page.locator("#figure-variance_depth .nothing").inner_text()


def test_values_are_read_by_keyboard_and_end_with_the_handover(visit):
    page = visit("whole")
    line = summarize(measured_runs.grid(["theseus"], seeds=2, **SETTINGS)).groups[0].methods[0].line
    page.locator("#figure-gate_variance .plot").focus()
    page.keyboard.press("End")
    spoken = page.locator("#spoken").text_content()
    assert spoken.startswith("15 % of the training: ")
    assert "DCR 0 ± 0;" in spoken
    mean = line.overall["gate_variance"].mean[3]
    assert f"Theseus {mean:.3g} ±" in spoken
    assert "Theseus, minibatches " in spoken


def test_zeros_and_bounds_are_named(visit):
    page = visit("whole")
    assert (
        page.locator("#figure-gate_variance .zeros").inner_text()
        == "0 throughout: Student only, KL distillation, DCR, DCR + DFG."
    )
    assert page.locator("#figure-bounds .teacher-name").all_text_contents() == ["bound", "bound"]
    assert page.locator("#figure-accuracy .teacher-name").all_text_contents() == ["teacher", "teacher"]


def test_nothing_measured_shows_nothing_and_costs_alone_show_costs(visit):
    assert shown(visit("bare")) == []
    page = visit("costs")
    assert shown(page) == ["costs-card"]
    assert page.locator("table.claims thead th").all_text_contents() == ["Method", "Extra compute of the run"]


def test_a_group_without_measurements_hides_the_section_again(visit):
    page = visit("groups")
    assert shown(page) == list(CARDS)
    page.select_option("#group", label="5 %")
    assert shown(page) == []
    page.select_option("#group", label="100 %")
    assert shown(page) == list(CARDS)
    has_lines(page, "variance_depth", 2)


def test_a_phone_shows_rows_as_blocks_within_its_width(visit):
    page = visit("whole", width=380, scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    box = page.locator("table.claims").bounding_box()
    assert box["x"] + box["width"] <= 380
    heading = page.locator("table.claims td").first.evaluate("(cell) => getComputedStyle(cell, '::before').content")
    assert heading == '"Gradient variance caused by the gates"'
    assert page.locator("table.claims").get_by_role("rowheader").count() == 7


def test_nothing_of_a_run_becomes_markup(visit):
    page = visit("nasty")
    page.locator("#figure-variance_depth .plot").focus()
    page.keyboard.press("ArrowRight")
    assert "onerror" in page.locator("#figure-variance_depth .tip").inner_text()
    assert "onerror" in page.locator("#costs-findings").inner_text()
    assert page.locator("img, b").count() == 0
    assert page.title() == "small"


def test_the_data_is_plain_and_finite():
    broken = measured_runs.grid(["theseus"], seeds=1, **SETTINGS)[0]
    points = [replace(point, gate_variance={"blocks.0.attn": float("nan")}) for point in broken.train_info.points]
    group = data_in(page_of([_with(broken, points=points)]))["groups"][0]
    assert group["lines"]["theseus"]["overall"]["gate_variance"] is None
    assert group["depth"]["gate_variance"]["theseus"] is None
    assert group["table_one"]["aspects"] == ["Extra compute of the run", "Needs feature matching"]

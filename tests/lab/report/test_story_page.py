"""The order of the page, its maps, marks and downloads, in a real browser."""

from __future__ import annotations

import csv
import io
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.lab.report.pages import has_lines, page_of, unfolded
from tests.lab.report.saved_runs import grid, run, with_points

pytest.importorskip("matplotlib", reason="the report draws with matplotlib (pip install segue[lab])")


def recorded(result: Any) -> Any:
    """Add what runs record since gates, parts of the loss and rates are kept."""

    def at(i: int, point: Any) -> Any:
        drawn = {site: min(1.0, 0.1 * i + 0.05 * k) for k, site in enumerate(point.cosine)}
        parts = {"task": 1.0 / (1 + i), "guidance": 130.0 / 10**i} if i else {}
        return replace(
            point,
            weights=drawn if i else {},
            losses=parts,
            lr=1e-3 * (1 - i / 12),
            rises={"blocks.1.attn": 2} if i == 3 else {},
        )

    return with_points(result, at)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    settings: dict[str, Any] = {"groups": ["100 %"], "evaluations": 6, "sites": 4}
    kinds = {
        "story": [recorded(one) for one in grid(methods=["student_only", "theseus", "dcr_dfg"], seeds=3, **settings)],
        "one_seed": grid(seeds=1, **settings),
        "formula": [run(label="=1+1", evaluations=3, sites=2), run(method="theseus", label='a "b", c', evaluations=3, sites=2)],
    }
    for name, runs in kinds.items():
        (folder / f"{name}.html").write_text(page_of(runs), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in kinds}


def test_the_story_is_told_in_order_and_the_rest_is_folded(visit):
    page = visit("story")
    order = [
        "answer",
        "contents",
        "scores",
        "results",
        "quality",
        "alignment",
        "cost",
        "course",
        "gradients",
        "differences",
        "settings",
    ]
    tops = page.evaluate("(names) => names.map((name) => document.getElementById(name).getBoundingClientRect().top)", order)
    shown = [top for name, top in zip(order, tops, strict=True) if name != "cost"]  # these runs have none
    assert shown == sorted(shown)
    assert page.locator("#answer li").count() == 3
    assert page.locator("#provenance").inner_text().startswith("Commit\n0000000000000")
    folds = page.locator("details.fold")
    assert folds.count() == 6
    assert folds.evaluate_all("(all) => all.filter((one) => one.open).length") == 0
    assert page.locator("#axis button[aria-pressed=true]").inner_text() == "FLOPs"


def test_the_contents_lead_to_every_part_and_open_it(visit):
    page = visit("story")
    links = page.locator("#contents a:visible")
    assert "Cost and variance" not in links.all_inner_texts()  # which these runs do not have
    page.get_by_role("link", name="Gradients and drift").click()
    page.locator("#gradients[open]").wait_for()
    has_lines(page, "gradient_norm", 9)
    for name, part in (("Gradients and drift", "#gradients"), ("Files", "#files-section")):
        page.get_by_role("link", name=name, exact=True).click()
        page.locator(f"{part}[open]").wait_for()
        page.wait_for_timeout(100)
        box = page.locator(part).bounding_box()
        assert 0 <= box["y"] < 400 or box["y"] + box["height"] <= page.viewport_size["height"]


def test_marks_of_quality_and_work_have_names_bars_and_a_front(visit):
    page = visit("story")
    plot = page.locator("#figure-pareto .plot")
    plot.locator(".mark-name").first.wait_for(state="attached")
    assert sorted(plot.locator(".mark-name").all_text_contents()) == ["DCR + DFG", "Student only", "Theseus"]
    assert plot.locator(".front").count() == 1
    plot.focus()
    page.keyboard.press("End")
    assert page.locator("#figure-pareto .tip").inner_text().count("\n") >= 2


def test_maps_show_every_site_at_every_evaluation(visit):
    page = visit("story")
    card = page.locator("#figure-heat")
    card.locator("rect.cell").first.wait_for(state="attached")
    assert card.locator("rect.cell").count() == 3 * 4 * 6
    names = card.locator("#quantity option").all_text_contents()
    assert names == [
        "Interface cosine", "Relative error of the student", "Gradient norm", "Drift of the residual stream, blend",
        "Drift of the residual stream, students alone", "Drawn gate weights, the student\u2019s share",
    ]  # fmt: skip
    page.select_option("#quantity", "gradient_norm")
    card.locator("rect.cell").first.wait_for(state="attached")
    assert card.locator("rect.cell").count() == 3 * 4 * 5  # not before the first step
    assert "log scale" in card.locator(".bar").text_content()
    card.locator("svg.plot[tabindex]").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert card.locator(".tip").first.inner_text().startswith("step 200, blocks.1.attn\n")
    assert page.locator("#spoken").text_content().startswith("step 200, blocks.1.attn: ")


def test_losses_are_apart_on_log_axes_with_gates_rates_and_events(visit):
    page = unfolded(visit("story"))
    has_lines(page, "losses", 9)  # task, guidance, and all parts together
    assert page.locator("#figure-losses .panel h3").all_inner_texts() == [
        "Of the task",
        "Guidance, at the sites",
        "All parts together",
    ]
    assert page.locator("#figure-losses .y-name").all_text_contents() == ["loss (log scale)"] * 3
    page.locator("#figure-depth .y-name").first.wait_for(state="attached")
    named = page.locator("#figure-depth .y-name").all_text_contents()  # where an axis says that it is a log scale
    assert len(named) == page.locator("#figure-depth svg.plot").count() > 0
    assert set(named) <= {"mean", "mean (log scale)"}
    has_lines(page, "lr", 3)
    has_lines(page, "alphas", 9)
    assert page.locator("#events tbody tr").count() == 9
    assert "alpha rose in up to 2 steps" in page.locator("#events").inner_text()


def test_one_seed_has_no_badge_and_one_sentence(visit):
    page = unfolded(visit("one_seed"))
    assert page.locator(".mark").count() == 0
    assert page.locator("#compared table").count() == 0
    assert (
        page.locator("#compared").inner_text()
        == "One seed per method: any difference may be chance, so none is listed or called the best."
    )
    assert "one seed any difference may be chance" in page.locator("#answer").inner_text()


def downloaded(page: Any, figure: str, kind: str) -> bytes:
    with page.expect_download() as waiting:
        page.locator(f"#figure-{figure} .downloads").get_by_role("button", name=kind).click()
    assert waiting.value.suggested_filename == f"segue-{figure}.{kind.lower()}"
    return Path(waiting.value.path()).read_bytes()


@pytest.mark.parametrize("figure", ["accuracy", "heat"])
def test_figures_are_saved_as_pictures_without_a_network(visit, figure: str):
    page = visit("story")
    page.locator(f"#figure-{figure} .plot").first.scroll_into_view_if_needed()
    picture = ElementTree.fromstring(downloaded(page, figure, "SVG"))
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [node.text for node in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "DCR + DFG" in texts
    strokes = {node.get("stroke") for node in picture.iter("{http://www.w3.org/2000/svg}line")}
    assert not any(stroke and "var(" in stroke for stroke in strokes)  # it looks the same elsewhere
    image = downloaded(page, figure, "PNG")
    width, height = struct.unpack(">II", image[16:24])
    assert image.startswith(b"\x89PNG")
    assert (width, height) == (2 * int(picture.get("width")), 2 * int(picture.get("height")))


def test_figures_are_saved_as_numbers_that_no_spreadsheet_computes(visit):
    page = visit("story")
    rows = list(csv.reader(io.StringIO(downloaded(page, "accuracy", "CSV").decode())))
    assert rows[0] == ["panel", "line", "flops", "mean", "half_width_95"]
    ends = [row for row in rows if row[:2] == ["Students alone", "DCR + DFG"]]
    assert len(ends) == 6
    assert 0.8 < float(ends[-1][3]) < 0.95
    cells = list(csv.reader(io.StringIO(downloaded(page, "heat", "CSV").decode())))
    assert cells[0] == ["map", "site", "step", "value"]
    assert len(cells) == 1 + 3 * 4 * 6
    nasty = list(csv.reader(io.StringIO(downloaded(visit("formula"), "accuracy", "CSV").decode())))
    assert {row[1] for row in nasty[1:]} == {"'=1+1", 'a "b", c'}


def test_a_phone_keeps_the_names_in_reach_and_says_that_tables_scroll(visit):
    page = visit("story", width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator("#figure-heat").scroll_into_view_if_needed()
    chip = page.get_by_role("button", name="Theseus", exact=True)
    assert not chip.is_visible()
    page.locator("#methods-shown").click()
    chip.click()
    assert page.locator("#methods-shown").inner_text() == "Methods (2 of 3)"
    page.locator("#methods-shown").click()
    table = page.locator(".scroll", has=page.locator("#table"))
    table.scroll_into_view_if_needed()
    assert "more" in table.get_attribute("class").split()
    assert (
        page.evaluate("(box) => getComputedStyle(box, '::before').content", table.element_handle())
        == '"scroll sideways for more →"'
    )
    table.evaluate("(box) => { box.scrollLeft = box.scrollWidth; }")
    page.wait_for_function("() => !document.querySelector('#table').parentNode.classList.contains('more')")

"""The report: safe text, one file, and a page that works in a real browser."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from segue.errors import MissingExtraError, ResultError
from segue.lab.report import figures
from segue.lab.report import page as report
from segue.lab.report.summary import summarize
from tests.lab.report.pages import LONG, NASTY, data_in, has_lines, page_of, unfolded
from tests.lab.report.saved_runs import LABELS, grid, run, save, with_own_alphas, with_points

pytest.importorskip("matplotlib", reason="the report draws with matplotlib (pip install segue[lab])")


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures out where the page is what counts: test_figures.py draws them."""
    monkeypatch.setattr(figures, "draw", lambda summary, folder: [])


def test_everything_is_written_next_to_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    every = figures.group_figures
    monkeypatch.setattr(figures, "group_figures", lambda *given: {"cosine": every(*given)["cosine"]})  # one says enough
    save(grid(methods=["theseus", "dcr"], groups=["100 %"], seeds=2, evaluations=4, sites=2), tmp_path)
    path = report.build(tmp_path, title="A title")
    assert path == tmp_path / "report.html"
    files = sorted(str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*") if one.is_file() and one.name != "result.json")
    heat = [f"heat_{quantity}" for quantity in ("cosine", "drift_blend", "gradient_norm", "relative_error")]
    drawn = [f"figures/{name}.{kind}" for name in ("cosine", "groups", *heat) for kind in ("pdf", "png")]
    assert files == sorted([*drawn, "report.html", "table.csv", "table.md"])
    text = path.read_text(encoding="utf-8")
    assert "<title>A title</title>" in text
    assert set(data_in(text)["files"]) == {*drawn, "table.csv", "table.md"}
    assert (tmp_path / "table.md").read_text(encoding="utf-8").startswith("# Results")


@pytest.mark.usefixtures("no_pictures")
def test_the_same_runs_give_the_same_page(tmp_path: Path):
    save(grid(methods=["dcr"], groups=["100 %"], seeds=2, evaluations=3, sites=1), tmp_path)
    first = report.build(tmp_path).read_bytes()
    assert report.build(tmp_path).read_bytes() == first


@pytest.mark.usefixtures("no_pictures")
def test_the_title_is_the_experiment_unless_given(tmp_path: Path):
    save([run(evaluations=2, sites=1)], tmp_path)
    assert "<title>small</title>" in report.build(tmp_path).read_text(encoding="utf-8")


def test_the_page_asks_for_nothing_from_outside():
    page = page_of(grid(methods=["dcr"], groups=["100 %"], seeds=2, evaluations=3))
    assert re.findall(r"https?://[^\s\"']+", page) == ["http://www.w3.org/2000/svg"]  # a name, never fetched
    assert not re.search(r"@import|url\((?!#)|<link|<iframe|\bsrc=|\bfetch\(|XMLHttpRequest|innerHTML|\beval\(", page)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]


def test_text_of_runs_is_never_markup():
    page = page_of(
        [run(label=NASTY, method=NASTY, group=NASTY, experiment=NASTY, evaluations=2, sites=1, config={NASTY: [NASTY]})], NASTY
    )
    assert "<img" not in page
    assert "<b>" not in page
    data = data_in(page)
    assert data["methods"][0]["label"] == NASTY
    assert data["runs"][0]["config"] == {NASTY: [NASTY]}


def test_numbers_that_json_lacks_are_written_as_text_or_left_out():
    bad = run(evaluations=3, sites=1, config={"weight": float("nan"), "most": [float("inf")]})
    points = [replace(point, students={"accuracy": float("nan")}, loss=float("inf")) for point in bad.train_info.points]
    bad = replace(bad, train_info=replace(bad.train_info, points=points, final={"accuracy": None}))
    data = data_in(page_of([bad]))
    assert data["runs"][0]["config"] == {"weight": "nan", "most": ["inf"]}
    assert data["groups"][0]["lines"]["dcr"]["overall"]["students"] is None


@pytest.mark.usefixtures("no_pictures")
def test_diverged_runs_go_through_files(tmp_path: Path):
    bad = run(evaluations=3, sites=1)
    points = [replace(point, students={"accuracy": None}) for point in bad.train_info.points]
    save([replace(bad, train_info=replace(bad.train_info, points=points, final={"accuracy": None}))], tmp_path)
    assert "ended without a finite score" in report.build(tmp_path).read_text(encoding="utf-8")


def test_a_folder_without_runs_is_refused(tmp_path: Path):
    with pytest.raises(ResultError, match="has no finished run"):
        report.build(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_missing_matplotlib_is_named_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    save([run(evaluations=2, sites=1)], tmp_path)
    with pytest.raises(MissingExtraError, match="matplotlib is not installed"):
        report.build(tmp_path)
    assert not (tmp_path / "table.md").exists()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    kinds = {
        "whole": grid(groups=["100 %", "5 %"], seeds=3, evaluations=11, sites=5),
        "single": [with_points(run(evaluations=4, sites=1), lambda i, p: replace(p, events=[{"step": p.step - 3}] * (i == 2)))],
        "adaptive": [run(evaluations=21, sites=4), with_own_alphas(run(method="dcr_dfg", evaluations=21, sites=4))],
        "nasty": [
            run(label=NASTY, method=NASTY, group=NASTY, evaluations=3, sites=2, config={NASTY: NASTY}),
            run(evaluations=3, group=LONG, label=LONG),
        ],
        "many": [
            run(method=f"method_{i}", label=f"{i} {LONG}", evaluations=4, sites=2, seed=s) for i in range(30) for s in range(2)
        ],
    }
    for name, runs in kinds.items():
        (folder / f"{name}.html").write_text(page_of(runs), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in kinds}


def column(page: Any, index: int) -> list[str]:
    return page.locator(f"#table tbody tr > :nth-child({index})").all_inner_texts()


@pytest.mark.parametrize("name", ["whole", "single", "nasty", "many"])
def test_every_page_opens_without_complaint_at_every_width(visit, name: str):
    page = visit(name)
    assert page.title() == "small"
    for width in (360, 768, 1200):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_timeout(60)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_alpha_by_site_is_shown_where_sites_have_their_own(visit):
    assert visit("single").locator("#figure-alphas").is_hidden()
    page = unfolded(visit("adaptive"))
    has_lines(page, "alphas", 3)  # at the first, a middle and the last site; the other method gives all sites one alpha
    page.locator("#site-alphas").select_option(index=2)
    has_lines(page, "alphas", 1)


def test_nothing_of_a_run_becomes_markup(visit):
    page = visit("nasty")
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.locator("#runs pre").first.wait_for()
    assert page.title() == "small"
    assert page.locator("img, b").count() == 0
    assert page.locator("#runs pre", has_text="onerror").count() > 0


def test_methods_are_switched_off_and_on(visit):
    page = visit("whole")
    has_lines(page, "accuracy", 14)  # of the students, and beside them of the blend
    has_lines(page, "cosine", 21)
    chip = page.get_by_role("button", name="Theseus", exact=True)
    assert chip.get_attribute("aria-pressed") == "true"
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    has_lines(page, "accuracy", 12)
    page.get_by_role("button", name="Show all").click()
    page.get_by_role("button", name="Hide all").click()
    has_lines(page, "accuracy", 0)
    assert "every method is hidden" in page.locator("#figure-accuracy .nothing").first.inner_text()


def test_hovering_shows_the_values_of_that_evaluation(visit):
    page = visit("whole")
    page.get_by_role("button", name="Epochs", exact=True).click()
    plot = page.locator("#figure-accuracy .plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 150)
    tip = page.locator("#figure-accuracy .tip").first
    assert tip.is_visible()
    text = tip.inner_text()
    line = (
        summarize(grid(methods=["dcr"], groups=["100 %"], seeds=3, evaluations=11, sites=5))
        .groups[0]
        .methods[0]
        .line.overall["students"]
    )
    assert text.startswith("epoch 50")
    assert f"{100 * line.mean[-1]:.1f} ± {100 * line.half[-1]:.1f} %" in text
    assert all(label in text for label in LABELS.values())
    page.mouse.move(0, 0)
    assert not tip.is_visible()


def test_axis_site_and_group_are_chosen(visit):
    from playwright.sync_api import expect

    page = visit("whole")
    plot = page.locator("#figure-accuracy .plot").first
    expect(plot).to_contain_text("work (PFLOPs)")  # a plot may be drawn later
    page.get_by_role("button", name="Time", exact=True).click()
    expect(plot).to_contain_text("training time (min)")
    page.get_by_role("button", name="Steps", exact=True).click()
    expect(plot).to_contain_text("optimizer step")
    page.get_by_role("button", name="Epochs", exact=True).click()
    expect(plot).to_contain_text("epoch")
    page.select_option("#site-cosine", label="blocks.1.attn")
    assert page.locator("#figure-cosine .panel h3").all_inner_texts() == ["blocks.1.attn"]
    has_lines(page, "cosine", 7)
    before = column(page, 3)
    page.select_option("#group", label="5 %")
    assert page.locator("#findings-title").text_content() == "Findings: 5 %"
    assert column(page, 3) != before


def test_the_blend_stands_beside_the_students_on_the_same_scale(visit):
    page = visit("whole")
    has_lines(page, "accuracy", 14)
    plots = page.locator("#figure-accuracy .plot")
    assert page.locator("#figure-accuracy .panel h3").all_inner_texts() == ["Students alone", "Blend, teachers included"]
    boxes = [plots.nth(i).bounding_box() for i in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"]  # side by side
    scales = [[text for text in plots.nth(i).locator("text").all_text_contents() if "%" in text] for i in range(2)]
    assert scales[0] == scales[1]
    page.get_by_role("button", name="Zoom to the top").click()
    has_lines(page, "accuracy", 14)
    assert [text for text in plots.first.locator("text").all_text_contents() if "%" in text] != scales[0]


def test_seeds_are_thin_lines(visit):
    page = visit("whole")
    has_lines(page, "accuracy", 14)
    assert page.locator("#figure-accuracy path.seed").count() == 0  # seven methods: the means come first
    page.get_by_role("button", name="Seeds", exact=True).click()
    page.locator("#figure-accuracy path.seed").first.wait_for(state="attached")
    assert page.locator("#figure-accuracy path.seed").count() == 2 * 7 * 3
    has_lines(page, "accuracy", 14)


def test_the_table_sorts_both_ways_with_the_unknown_last(visit):
    page = visit("whole")
    heading = page.locator("#table th", has_text="Final accuracy")
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    values = [float(text.split()[0]) for text in column(page, 3)]
    assert values == sorted(values, reverse=True)
    heading = page.locator("#table th", has_text="Final accuracy")
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert [float(text.split()[0]) for text in column(page, 3)] == sorted(values)
    epochs = page.locator("#table th", has_text="Epochs to 95")
    for expected in ("ascending", "descending"):
        epochs.get_by_role("button").click()
        assert epochs.get_attribute("aria-sort") == expected
        found = column(page, 8)
        assert "not reached" in found[-1]
        known = [float(text.split(";")[0]) for text in found if not text.startswith("not")]  # a median, with or without "; not"
        assert known == sorted(known, reverse=expected == "descending")
        assert not any(text.startswith("not") for text in found[: len(known)])


def test_everything_is_reached_by_keyboard(visit):
    page = visit("whole")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    chip = page.get_by_role("button", name="DCR", exact=True)
    chip.focus()
    page.keyboard.press("Space")
    has_lines(page, "accuracy", 12)
    assert page.evaluate("document.activeElement.textContent") == "DCR"  # the focus stays where it was
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.get_by_role("button", name="Epochs", exact=True).click()
    page.locator("#figure-accuracy .plot").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#figure-accuracy .tip").first.inner_text().startswith("epoch 5\n")
    assert page.locator("#spoken").text_content().startswith("epoch 5: ")
    page.keyboard.press("End")
    assert page.locator("#figure-accuracy .tip").first.inner_text().startswith("epoch 50\n")
    page.keyboard.press("Escape")
    assert not page.locator("#figure-accuracy .tip").first.is_visible()
    page.locator("#table thead button").nth(2).focus()
    page.keyboard.press("Enter")
    assert page.locator("#table th").nth(2).get_attribute("aria-sort") == "descending"
    assert page.evaluate("document.activeElement.closest('th').cellIndex") == 2


def test_every_figure_is_also_a_table(visit):
    page = visit("whole")
    details = page.locator("#figure-accuracy details")
    page.get_by_role("button", name="Epochs", exact=True).click()
    details.locator("summary").click()
    rows = details.locator("table").first.locator("tbody tr")
    rows.first.wait_for()
    assert rows.count() == 11
    assert rows.last.locator("th").inner_text() == "epoch 50"
    assert re.fullmatch(r"\d+\.\d ± \d+\.\d %", rows.last.locator("td").last.inner_text())
    page.get_by_role("button", name="Theseus", exact=True).click()
    assert details.locator("table").first.locator("thead th").count() == 7  # the table follows the figure


def test_methods_share_rows_by_the_step_where_their_work_differs(visit):
    """Rows by work would hold one value and else dashes: no two methods spend the same."""
    page = visit("whole")
    page.get_by_role("button", name="FLOPs", exact=True).click()
    details = page.locator("#figure-accuracy details")
    details.locator("summary").click()
    rows = details.locator("table").first.locator("tbody tr")
    rows.first.wait_for()
    assert rows.count() == 11
    assert re.fullmatch(r"step \d+", rows.last.locator("th").inner_text())
    cells = rows.last.locator("td").all_inner_texts()
    assert all(re.fullmatch(r"\d+\.\d ± \d+\.\d %\s+\d[\d.]* [GTP]FLOPs", cell) for cell in cells), cells
    assert len({cell.split("\n")[-1] for cell in cells}) > 1
    pareto = page.locator("#figure-pareto details")
    pareto.locator("summary").click()
    pareto.locator("tbody tr").first.wait_for()
    assert "\u2013" not in pareto.locator("tbody").inner_text()
    assert pareto.locator("thead th").all_inner_texts() == ["Method", "work", "accuracy"]


def test_runs_show_their_configuration(visit):
    page = unfolded(visit("single"))
    page.locator("#runs > details > summary").click()
    page.locator("#runs .run > summary").click()
    page.wait_for_selector("#runs pre")
    text = page.locator("#runs .run").inner_text()
    assert '"learning_rate": 0.0005' in text
    assert "a made-up CPU" in text


def test_one_seed_is_said_to_have_no_interval(visit):
    page = visit("single")
    assert "One seed per method: there are no intervals." in page.locator("#notes").inner_text()
    assert "±" not in page.locator("#table tbody").inner_text()
    assert page.locator("#wins-card").is_hidden()


def test_what_a_guard_has_restored_is_marked(visit):
    page = visit("single")
    page.locator("#figure-accuracy .restore").first.wait_for(state="attached")
    assert page.locator("#figure-accuracy .panel").first.locator(".restore").count() == 1
    assert visit("whole").locator(".restore").count() == 0


def test_dark_follows_the_system_and_the_button(visit):
    def paper(page: Any) -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    def stroke(page: Any) -> str:
        return page.locator("#figure-accuracy path.series").last.get_attribute("stroke")

    light, dark = visit("whole"), visit("whole", scheme="dark")
    assert (paper(light), paper(dark)) == ("rgb(246, 247, 249)", "rgb(16, 19, 24)")
    assert dark.locator("#theme").get_attribute("aria-pressed") == "true"
    assert stroke(light) != stroke(dark)
    light.locator("#theme").click()
    assert paper(light) == paper(dark)
    assert stroke(light) == stroke(dark)
    dark.locator("#theme").click()
    assert paper(dark) == "rgb(246, 247, 249)"
    light.wait_for_timeout(300)  # the browser stores the choice asynchronously
    light.reload()
    assert paper(light) == "rgb(16, 19, 24)"  # the choice is kept


def test_a_phone_reads_values_by_touch(visit):
    page = visit("whole", width=360)
    plot = page.locator("#figure-accuracy .plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    for share in (0.2, 0.5, 0.95):
        page.mouse.move(box["x"] + share * box["width"], box["y"] + 80)
        tip = page.locator("#figure-accuracy .tip").first.bounding_box()
        assert tip["x"] >= 0
        assert tip["x"] + tip["width"] <= 360
    assert page.evaluate("document.documentElement.scrollWidth") <= 360

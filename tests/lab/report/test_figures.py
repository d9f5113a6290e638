"""The figures for papers: complete, legible at column width, the same every time."""

from __future__ import annotations

import math
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from segue.errors import MissingExtraError
from segue.lab.report import figures
from segue.lab.report.summary import summarize
from segue.reporting.palette import line_styles
from segue.reporting.records import Point, Result
from tests.lab.report.saved_runs import LABELS, grid, run, with_own_alphas, with_points

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib", reason="figures need matplotlib (pip install segue[lab])")

NAMES = ["accuracy", "cosine", "depth", "drift", "gradient_norm", "groups", "schedules"]
MAPS = ["heat_cosine", "heat_drift_blend", "heat_gradient_norm", "heat_relative_error"]


def small(methods: int = 2, **settings) -> list[Result]:
    return grid(methods=list(LABELS)[-methods:], groups=["100 %"], seeds=2, evaluations=5, sites=3, **settings)


def figure_of(results: list[Result], name: str):
    """Lay one figure out without writing it."""
    summary = summarize(results)
    panels = figures.group_figures(summary.groups[0], summary, line_styles(n for n, _ in summary.methods))[name]
    with figures.settings():
        drawn = figures._figure(panels, figures._seeds_note(summary.groups[0]))
        drawn.draw_without_rendering()
    return drawn


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return figures.draw(summarize(small()), tmp_path_factory.mktemp("figures"))


def test_every_figure_is_there_as_png_and_pdf(drawn: list[Path]):
    assert sorted(path.name for path in drawn) == sorted(
        f"{name}.{kind}" for name in [*NAMES, *MAPS] for kind in ("png", "pdf")
    )
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"%PDF")


def test_figures_are_a_column_wide(drawn: list[Path]):
    for path in drawn:
        if path.suffix == ".png":
            width, _ = struct.unpack(">II", path.read_bytes()[16:24])
            assert width == round(3.3 * 300)


def test_the_same_runs_give_the_same_files(drawn: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    every = figures.group_figures
    monkeypatch.setattr(figures, "group_figures", lambda *given: {name: every(*given)[name] for name in ("accuracy", "drift")})
    again = figures.draw(summarize(small()), tmp_path)
    assert len(again) == 6 + 2 * len(MAPS)
    assert {path.name: path.read_bytes() for path in again}.items() <= {path.name: path.read_bytes() for path in drawn}.items()


def test_groups_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(figures, "write", lambda folder, name, draw: [folder / f"{name}.png"])
    runs = [run(group=group, evaluations=3, sites=1) for group in ("100 %", "20 %", "20%", "../x/<y>")]
    names = {path.name for path in figures.draw(summarize(runs), tmp_path)}
    assert {"cosine-100-percent.png", "cosine-20-percent.png", "cosine-20-percent-again.png", "cosine-x-y.png"} < names
    assert not any("/" in name for name in names)


@pytest.mark.parametrize("name", NAMES[:5])
def test_text_is_legible_and_nothing_covers_the_data(name: str):
    figure = figure_of(small(methods=7), name)
    texts = [
        text
        for axes in figure.axes
        for text in (*axes.get_xticklabels(), *axes.get_yticklabels(), axes.title, axes.xaxis.label)
    ]
    texts += [*figure.legends[0].get_texts(), *figure.texts]
    assert min(text.get_fontsize() for text in texts) >= 7
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.x1
    for axes in figure.axes:
        box = axes.get_tightbbox()
        assert not legend.overlaps(box)
        assert box.x0 >= -1
        assert box.x1 <= figure.bbox.x1 + 1
    for upper, lower in zip(figure.axes, figure.axes[1:], strict=False):
        assert not upper.get_tightbbox().overlaps(lower.get_tightbbox())


def test_cosine_shows_first_middle_and_last_site_with_every_method():
    figure = figure_of(grid(groups=["100 %"], seeds=2, evaluations=4), "cosine")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["blocks.0.attn", "blocks.7.attn", "blocks.11.attn"]
    assert [len(axes.lines) for axes in figure.axes] == [7, 7, 7]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(LABELS.values())


def test_lines_are_means_and_bands_are_intervals():
    runs = small(methods=1)
    axes = figure_of(runs, "accuracy").axes[0]
    curve = summarize(runs).groups[0].methods[0].line.overall["students"]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([100 * (value or 0) for value in curve.mean])
    top = axes.collections[0].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(max(100 * ((m or 0) + (h or 0)) for m, h in zip(curve.mean, curve.half, strict=True)))
    assert list(axes.lines[1].get_ydata()) == pytest.approx([91.0, 91.0])  # the teacher


def test_restores_are_ticks_at_the_bottom_in_the_colour_of_their_method():
    runs = small(methods=1)
    marked = [with_points(run, lambda i, p: replace(p, events=[{"step": p.step - 5}] if i == 2 else [])) for run in runs]
    line = summarize(marked).groups[0].methods[0].line
    curve, ticks = figure_of(marked, "accuracy").axes[0].lines[:2]
    assert list(ticks.get_xdata()) == pytest.approx([flops / 1e15 for flops in line.marks(line.flops)]) != []
    assert (ticks.get_marker(), ticks.get_color(), set(ticks.get_ydata())) == ("|", curve.get_color(), {0.0})


@pytest.mark.parametrize("name", ["drift", "depth"])
def test_log_axes_have_plain_numbers_next_to_their_label(name: str):
    figure = figure_of(grid(methods=["student_only", "dcr_dfg"], groups=["100 %"], seeds=2), name)
    assert "log" in {axes.get_yscale() for axes in figure.axes}
    assert all(axes.get_ylabel().endswith(", log") == (axes.get_yscale() == "log") for axes in figure.axes)
    for axes in figure.axes:
        labels = [label for label in axes.get_yticklabels(which="both") if label.get_text() and label.get_visible()]
        inside = [label for label in labels if axes.bbox.y0 <= label.get_window_extent().y0 <= axes.bbox.y1]
        assert len(inside) >= 2
        assert all(float(label.get_text()) >= 0 for label in inside)
        assert not any(label.get_window_extent().overlaps(axes.yaxis.label.get_window_extent()) for label in inside)


def test_accuracy_is_shown_by_work_with_the_blend_below():
    figure = figure_of(small(), "accuracy")
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "work (PFLOPs)"]
    assert figure.axes[1].lines[0].get_xdata()[-1] == pytest.approx(2.4 * 1.25)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["students alone", "blend, teachers included"]


def test_one_seed_is_drawn_without_a_band_and_says_so():
    figure = figure_of([run(evaluations=4, sites=2)], "cosine")
    assert not any(axes.collections for axes in figure.axes)
    assert [text.get_text() for text in figure.texts] == ["one seed: no interval"]


@pytest.mark.parametrize("lag", [0.5, 0.0], ids=["by site", "alike"])
def test_alpha_by_site_is_drawn_where_sites_have_their_own(lag: float):
    summary = summarize([*small(methods=1), with_own_alphas(run(method="theseus", evaluations=21, sites=3), lag)])
    panels = figures.group_figures(summary.groups[0], summary, line_styles(n for n, _ in summary.methods))["alphas"]
    drawn = [[line.mean for line in panel.lines] for panel in panels]
    alpha = next(m for m in summary.groups[0].methods if m.method == "theseus").line.overall["alpha"].mean
    assert drawn == ([[[min(1.0, a * (1 + 0.5 * i)) for a in alpha]] for i in range(3)] if lag else [])


def test_what_was_not_measured_is_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(figures, "write", lambda folder, name, draw: [folder / name] if draw() else [])
    bare = run(evaluations=3)
    points = [
        Point(step=p.step, epoch=p.epoch, seconds=p.seconds, flops=p.flops, alpha=p.alpha) for p in bare.train_info.points
    ]
    bare = replace(bare, train_info=replace(bare.train_info, points=points))
    assert {path.name for path in figures.draw(summarize([bare]), tmp_path)} == {"schedules", "groups"}


@pytest.mark.parametrize("name", ["accuracy", "cosine"])
def test_a_run_that_diverged_or_is_constant_draws(name: str):
    good, bad = run(evaluations=4, sites=1), run(evaluations=4, sites=1, method="theseus")
    points = [
        replace(p, students={"accuracy": math.nan if i > 1 else 0.0}, cosine={"blocks.0.attn": 0.0})
        for i, p in enumerate(bad.train_info.points)
    ]
    bad = replace(bad, train_info=replace(bad.train_info, points=points, final={"accuracy": math.nan}))
    assert all(len(axes.lines) >= 2 for axes in figure_of([good, bad], name).axes)


@pytest.mark.parametrize("label", ["$x^2$ cost", "_hidden", "a very long label " * 20, "名前 🙂", "<b>&amp;</b>", ""])
def test_labels_are_drawn_as_they_are(label: str):
    figure = figure_of([run(evaluations=3, sites=1, label=label, method="other")], "cosine")
    assert len(figure.legends[0].get_texts()) == 1
    with figures.settings():
        assert figure.legends[0].get_window_extent().x1 <= figure.bbox.x1


def test_thirty_methods_stay_apart():
    runs = [run(method=f"method_{i}", evaluations=3, sites=1) for i in range(30)]
    figure = figure_of(runs, "cosine")
    assert not figure.legends[0].get_window_extent().overlaps(figure.axes[0].get_tightbbox())


def test_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError) as caught:
        figures.draw(summarize([run(evaluations=2)]), tmp_path)
    assert str(caught.value) == ("a figure needs matplotlib.\n  matplotlib is not installed.\n  Hint: pip install segue[lab]")

"""Heat maps for papers: one for every quantity by site that was measured, on one scale, legible at column width."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from segue.lab.report import figures, heat
from segue.lab.report.summary import summarize
from segue.reporting.records import Result
from tests.lab.report.saved_runs import LABELS, grid, with_points

pytest.importorskip("matplotlib", reason="figures need matplotlib (pip install segue[lab])")


def runs(methods: int = 3, sites: int = 12) -> list[Result]:
    return grid(methods=list(LABELS)[-methods:], groups=["100 %"], seeds=2, evaluations=5, sites=sites)


def drawn(results: list[Result]) -> dict[str, object]:
    found = heat.heat_figures(summarize(results).groups[0], "one seed")
    with figures.settings():
        made = {name: draw() for name, draw in found.items()}
        for figure in made.values():
            figure.draw_without_rendering()
    return made


def test_every_measured_quantity_has_a_map_for_every_method():
    made = drawn(runs())
    assert list(made) == [f"heat_{quantity}" for quantity in heat.QUANTITIES]
    summary = summarize(runs()).groups[0]
    *maps, bar = made["heat_cosine"].axes
    assert [axes.get_title(loc="left") for axes in maps] == list(LABELS.values())[-3:]
    for axes, method in zip(maps, summary.methods, strict=True):
        shown = axes.images[0].get_array()
        assert shown.shape == (12, 5)
        assert shown[7].tolist() == pytest.approx(method.line.by_site["cosine"]["blocks.7.attn"].mean)
    assert bar.get_xlabel() == "interface cosine"


def test_all_maps_of_a_figure_have_one_scale_and_a_logarithm_is_said():
    made = drawn(runs())
    for name, figure in made.items():
        *maps, bar = figure.axes
        assert len({id(axes.images[0].norm) for axes in maps}) == 1
        log = type(maps[0].images[0].norm).__name__ == "LogNorm"
        assert log == ("log scale" in bar.get_xlabel())
        assert log <= (name != "heat_cosine")
    known = [
        value
        for row in heat.maps(summarize(runs()).groups[0], "gradient_norm")
        for line in row.rows
        for value in line
        if value == value
    ]
    norm = made["heat_gradient_norm"].axes[0].images[0].norm
    assert (norm.vmin, norm.vmax) == (min(known), max(known))


def test_what_was_not_measured_is_left_empty():
    one = runs(methods=1)[:1]
    without = with_points(one[0], lambda i, point: replace(point, cosine={}) if i == 2 else point)
    (shown,) = heat.maps(summarize([without]).groups[0], "cosine")
    assert [math.isnan(value) for value in shown.rows[0]] == [False, False, True, False, False]
    drawn([without])


@pytest.mark.parametrize(("methods", "sites"), [(7, 12), (1, 1), (2, 40)])
def test_text_is_legible_and_maps_do_not_overlap(methods, sites):
    figure = drawn(runs(methods, sites))["heat_cosine"]
    texts = [text for axes in figure.axes for text in (*axes.get_xticklabels(), *axes.get_yticklabels(), axes.title)]
    assert min(text.get_fontsize() for text in (*texts, *figure.texts)) >= 7
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    assert all(box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y0 >= 0 for box in boxes)
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])
    assert not any(text.get_window_extent().overlaps(boxes[-1]) for text in figure.texts)

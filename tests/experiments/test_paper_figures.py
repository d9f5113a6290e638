"""The paper's figures and table: built from committed results by one command."""

from __future__ import annotations

import pytest
from experiments.evidence.judges import FOLDERS
from experiments.paper_figures import __main__ as paper


def test_figures_and_table_are_built_from_committed_results(tmp_path):
    paths = paper.build(FOLDERS["cifar100"], FOLDERS["digits"], tmp_path)
    assert {path.name for path in paths} - {"figure2_time.pdf"} == {"figure1.pdf", "figure2.pdf", "table1.tex"}
    assert all(path.read_bytes().startswith(b"%PDF") for path in paths[:2])
    written = paths[-1].read_text(encoding="utf-8")
    arms = set(paper.place_in(FOLDERS["digits"]).arms) & set(paper.SHOWN)
    assert written.count(r"\\") == 1 + len(arms)  # with the heading
    assert r"(``Low'': holds) & 1.426 x student-only, 100.1 \% of what a full teacher adds (``High'': holds)" in written


def test_figure_one_shows_blocks_0_7_and_11():
    place = paper.place_in(FOLDERS["cifar100"])
    drawn = paper.cosine_figure(place)
    assert [axes.get_title(loc="left") for axes in drawn.axes] == ["blocks.0.attn", "blocks.7.attn", "blocks.11.attn"]
    last = drawn.axes[2].lines[-1]  # of the local fit
    runs = place.arms["local_fit"].values()
    mean = sum(run.train_info.points[-1].cosine["blocks.11.attn"] for run in runs) / len(runs)
    assert abs(last.get_ydata()[-1] - mean) < 1e-9


def test_the_figures_have_the_methods_of_the_paper():
    place = paper.place_in(FOLDERS["cifar100"])
    assert place.group == "100 % of the data"
    assert place.has("student_only", "distillation", "theseus", "dcr", "dcr_dfg")


def test_the_figures_have_the_teacher_on_the_examples_of_the_curves():
    drawn = paper.accuracy_figure(paper.place_in(FOLDERS["cifar100"]))
    heights = [line.get_ydata()[0] for line in drawn.axes[0].lines if len(line.get_ydata()) == 2]
    assert 0.476 in heights


def test_figure_two_has_the_seconds_of_the_runs():
    place = paper.place_in(FOLDERS["digits"])
    _, axes = paper.accuracy_figure(place, ("epoch", "seconds")).axes
    assert axes.get_xlabel() == "seconds"
    runs = place.arms["local_fit"].values()
    seconds = sum(run.train_info.points[-1].seconds for run in runs) / len(runs)
    assert any(line.get_xdata()[-1] == pytest.approx(seconds) for line in axes.lines if len(line.get_xdata()) > 2)

"""The paper's figures and table: built from committed results by one command."""

from __future__ import annotations

from experiments.evidence.judges import FOLDERS, places_of
from experiments.paper_figures import __main__ as paper

from segue.reporting import records


def test_figures_and_table_are_built_from_committed_results(tmp_path):
    paths = paper.build(FOLDERS["digits"], tmp_path)
    assert [path.name for path in paths] == ["figure1.pdf", "figure2.pdf", "table1.tex"]
    assert all(path.read_bytes().startswith(b"%PDF") for path in paths[:2])
    written = paths[2].read_text(encoding="utf-8")
    assert written.count(r"\\") == 8  # the heading, and seven arms of the figures
    assert r"(``Low'': holds) & 1.426 x student-only, 100.1 \% of what a full teacher adds (``High'': holds)" in written


def test_figure_one_shows_blocks_0_7_and_11():
    (place,) = places_of("digits", records.read_all(FOLDERS["digits"]))
    drawn = paper.cosine_figure(place)
    assert [axes.get_title(loc="left") for axes in drawn.axes] == ["blocks.0.attn", "blocks.7.attn", "blocks.11.attn"]
    last = drawn.axes[2].lines[-1]  # of the local fit
    runs = place.arms["local_fit"].values()
    mean = sum(run.train_info.points[-1].cosine["blocks.11.attn"] for run in runs) / len(runs)
    assert abs(last.get_ydata()[-1] - mean) < 1e-9


def test_the_figures_have_the_methods_of_the_paper():
    place = places_of("shown", records.read_all(paper.known()))[0]
    assert place.has("student_only", "distillation", "theseus", "dcr", "dcr_dfg")

"""Curves: seeds on common steps, against numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from segue.lab.report.curves import early_mean, gather
from segue.lab.report.summary import summarize
from tests.lab.report.saved_runs import changed, scored, with_points


def test_curves_average_the_seeds_step_by_step():
    line = gather([scored([0.1, 0.4], seed=0), scored([0.3, 0.8], seed=1)], ["blocks.0.attn"])
    curve = line.overall["students"]
    assert curve.mean == pytest.approx([0.2, 0.6])
    assert curve.half == pytest.approx([12.7062 * 0.1, 12.7062 * 0.2], rel=1e-4)
    assert not line.interpolated


def test_evaluations_at_different_steps_are_interpolated_and_noted():
    coarse = scored([0.0, 0.8], seed=0)  # evaluated at steps 0 and 20
    fine = with_points(scored([0.0, 0.2, 0.8], seed=1), lambda i, p: replace(p, step=i * 10))
    found = summarize([coarse, fine])
    line = found.groups[0].methods[0].line
    assert line.step == [0, 10, 20]
    assert line.overall["students"].mean == pytest.approx([0.0, (0.4 + 0.2) / 2, 0.8])
    assert any("and their curves interpolated: DCR" in note for note in found.groups[0].notes)


def test_restores_of_all_seeds_are_marked_on_every_axis():
    def restored(*steps):
        return lambda i, p: replace(p, epoch=2.0 * p.step, events=[{"step": step} for step in steps] if i == 1 else [])

    runs = [with_points(scored([0.0, 0.8], seed=seed), restored(*steps)) for seed, steps in enumerate([(5,), (), (2, 20)])]
    found = summarize(runs)
    line = found.groups[0].methods[0].line
    assert line.restores == [2, 5, 20]
    assert line.marks(line.epoch) == [4, 10, 40]
    assert any("DCR: the guard has restored a good state 3 times" in note for note in found.groups[0].notes)
    assert gather([scored([0.0, 0.8])], ["blocks.0.attn"]).restores == []


def test_a_shorter_seed_is_not_drawn_beyond_its_end():
    found = summarize([scored([0.0, 0.2], seed=0), scored([0.0, 0.4, 0.8], seed=1)])
    curve = found.groups[0].methods[0].line.overall["students"]
    assert curve.mean == pytest.approx([0.0, 0.3, 0.8])
    assert curve.half[2] is None
    assert any(note.startswith("The numbers of steps differ: 20 and 40.") for note in found.groups[0].notes)


def test_what_an_evaluation_did_not_measure_stays_empty():
    result = with_points(scored([0.1, 0.2, 0.3]), lambda i, p: replace(p, cosine={} if i == 1 else p.cosine))
    assert gather([result], ["blocks.0.attn"]).by_site["cosine"]["blocks.0.attn"].mean[1] is None


def test_the_first_fifth_excludes_the_start_and_the_rest():
    result = changed(
        with_points(scored([0.1] * 11), lambda i, p: replace(p, gradient_norm={"blocks.0.attn": float(i)})), total_steps=200
    )
    assert early_mean(result, "gradient_norm", "blocks.0.attn") == 1.5  # evaluations 1 and 2 of 10

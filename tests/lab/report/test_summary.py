"""What saved runs say about methods, against numbers computed by hand."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from segue.lab.report import findings, tables
from segue.lab.report.comparisons import paired
from segue.lab.report.summary import area, held_from, summarize
from segue.reporting.formatting import NOTHING
from segue.reporting.records import Point
from segue.reporting.statistics import holm
from tests.lab.report.saved_runs import LABELS, changed, grid, run, scored, with_points


@pytest.fixture(scope="module")
def whole():
    return summarize(grid(seeds=5))


def test_held_means_reached_and_never_lost_again():
    values = [0.1, 0.8, 0.71, 0.72, 0.9]  # 90 % of the teacher's 0.8 is 0.72
    assert held_from(scored(values), 0.90) == 3
    assert held_from(scored(values), 0.99) == 4
    assert held_from(scored([0.8, 0.8]), 0.99) == 0
    assert held_from(scored([0.1, 0.8, 0.7]), 0.90) is None
    assert held_from(scored([0.8, None, 0.8]), 0.90) == 2  # an evaluation without a score counts as lost


def test_an_evaluation_that_did_not_measure_loses_nothing():
    unmeasured = with_points(scored([0.1, 0.8, 0.8, 0.8]), lambda i, p: replace(p, students={}) if i == 2 else p)
    assert held_from(unmeasured, 0.90) == 1


def test_times_to_a_fraction_are_those_of_an_evaluation():
    group = summarize([scored([0.0, 0.7, 0.8, 0.8], seed=0), scored([0.0, 0.8, 0.8, 0.8], seed=1)]).groups[0]
    ninety = group.methods[0].held[0]
    assert (ninety.held, ninety.seeds) == (2, 2)
    assert ninety.epochs is not None
    assert ninety.seconds is not None
    assert ninety.flops is not None
    assert (ninety.epochs.median, ninety.seconds.median, ninety.flops.median) == (1.5, 15.0, 1.5e9)


def test_a_seed_that_does_not_hold_a_fraction_is_censored_and_counted():
    values = [[0.0, 0.8, 0.8], [0.0, 0.5, 0.5], [0.0, 0.5, 0.8]]
    found = summarize([scored(each, seed=seed) for seed, each in enumerate(values)])
    held = found.groups[0].methods[0].held[0]
    assert (held.held, held.seeds) == (2, 3)
    assert held.flops is not None
    assert (held.flops.median, held.flops.restricted_mean) == (2e9, pytest.approx((1e9 + 2e9 + 2e9) / 3))
    assert "2 GFLOPs; not reached (1 of 3)" in tables.markdown(found)
    row = next(csv.DictReader(io.StringIO(tables.csv(found))))
    assert (row["held_90"], float(row["flops_to_90_median"])) == ("2", 2e9)
    assert any("Not in every seed: DCR (2 of 3)." in sentence for sentence in found.groups[0].findings)


def test_a_fraction_that_most_seeds_do_not_hold_has_no_median():
    values = [[0.0, 0.8, 0.8], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]]
    found = summarize([scored(each, seed=seed) for seed, each in enumerate(values)])
    held = found.groups[0].methods[0].held[0]
    assert held.flops is not None
    assert held.flops.median is None
    assert "| not reached (2 of 3) |" in tables.markdown(found)
    assert any("in more than half of its seeds" in sentence for sentence in found.groups[0].findings)


def test_what_is_spent_is_compared_up_to_the_shortest_run():
    long, short = scored([0.0, 0.5, 0.5, 0.8], method="dcr"), scored([0.0, 0.5, 0.5], method="theseus")
    held = {method.method: method.held[0].epochs for method in summarize([long, short]).groups[0].methods}
    assert {name: (one.limit, one.restricted_mean) for name, one in held.items() if one} == {
        "dcr": (2.0, 2.0),
        "theseus": (2.0, 2.0),
    }


def test_a_teacher_at_zero_has_no_fraction_to_hold():
    found = summarize([scored([0.0, 0.1], teacher=0.0)])
    held = found.groups[0].methods[0].held[0]
    assert not held.defined
    assert "The teacher's score is not above zero: percentages of it are undefined." in found.groups[0].notes
    assert "not reached" not in tables.markdown(found)
    assert not any("held first" in sentence for sentence in found.groups[0].findings)


def test_area_weighs_every_evaluation_by_its_epochs():
    uneven = with_points(scored([0.0, 0.4, 0.8]), lambda i, p: replace(p, epoch=[0.0, 1.0, 5.0][i]))
    assert area(uneven) == pytest.approx((1 * 0.2 + 4 * 0.6) / 5)
    assert area(scored([0.3])) == 0.3
    assert area(scored([0.3, None, 0.4])) is None


def test_the_best_other_method_is_the_best_that_is_not_dcr():
    runs = [
        *[scored([0.1, value], method="theseus", seed=seed) for seed, value in enumerate((0.50, 0.52, 0.54, 0.51, 0.53))],
        *[scored([0.1, value], method="distillation", seed=seed) for seed, value in enumerate((0.60, 0.61, 0.65, 0.62, 0.62))],
        *[scored([0.1, value], method="dcr", seed=seed) for seed, value in enumerate((0.70, 0.73, 0.74, 0.72, 0.73))],
        *[scored([0.1, value], method="dcr_dfg", seed=seed) for seed, value in enumerate((0.61, 0.60, 0.66, 0.61, 0.63))],
    ]
    found = summarize(runs)
    final = {c.method: c for c in found.groups[0].comparisons if c.measure == "final"}
    assert set(final) == {"theseus", "dcr", "dcr_dfg"}
    assert {c.reference for c in final.values()} == {"distillation"}
    assert final["dcr"].difference.mean == pytest.approx((0.10 + 0.12 + 0.09 + 0.10 + 0.11) / 5)
    assert final["dcr_dfg"].difference.mean == pytest.approx((0.01 - 0.01 + 0.01 - 0.01 + 0.01) / 5)
    assert found.comparisons == 5  # also DCR and DCR + DFG with Theseus, which could have been the best other method
    theseus = found.groups[0].method("theseus")
    assert theseus is not None
    others = [paired(m, theseus, "final") for m in found.groups[0].methods if m.method.startswith("dcr")]
    p_values = [final[name].difference.p for name in ("theseus", "dcr", "dcr_dfg")] + [other.p for other in others if other]
    assert [final[name].holm for name in ("theseus", "dcr", "dcr_dfg")] == pytest.approx(holm(p_values)[:3])
    assert findings.verdict(final["dcr"]) == "significantly better"
    assert findings.verdict(final["dcr_dfg"]) == "not significant"
    sentence = next(s for s in found.groups[0].findings if s.startswith("Final accuracy against the reference"))
    assert "KL distillation (62.0 ± 2.3 %)" in sentence
    assert "Significantly better: DCR (+10.4 points" in sentence
    assert "Not significant: DCR + DFG" in sentence


def test_holm_counts_the_comparisons_of_all_groups_with_every_other_method(whole):
    family = [c for group in whole.groups for c in group.comparisons if c.measure == "final"]
    assert len(family) == 3 * (len(LABELS) - 1)
    assert whole.comparisons == 3 * (10 + 2 * 5)  # pairs of five other methods, and DCR twice with each
    assert all(c.holm >= c.difference.p for c in family)
    assert max(c.holm / c.difference.p for c in family if c.holm < 1) == pytest.approx(60)  # the smallest of all 60
    assert any("18 comparisons" in s and "for the 60 that could" in s for s in findings.overview(whole))


def test_few_seeds_are_said_and_nothing_is_called_significant():
    found = summarize(grid(seeds=3, evaluations=3, sites=1))
    assert all("Fewer than 5 seeds: differences are described" in " ".join(group.notes) for group in found.groups)
    verdicts = {findings.verdict(c) for group in found.groups for c in group.comparisons}
    assert verdicts == {"3 common seeds: too few, 5 are needed"}
    assert {m.standing["final"] for group in found.groups for m in group.methods} == {"best", "unknown"}
    assert any("none can be called significant with fewer than 5 seeds" in s for s in findings.overview(found))


def test_a_difference_can_be_significant_alone_and_not_among_many():
    runs = [scored([0.1, value], method="theseus", seed=seed) for seed, value in enumerate((0.50, 0.51, 0.52, 0.50, 0.51))]
    runs += [scored([0.1, value], method="dcr", seed=seed) for seed, value in enumerate((0.51, 0.53, 0.54, 0.50, 0.54))]
    for number in range(9):
        runs += [scored([0.1, v], method=f"dcr_{number}", seed=seed) for seed, v in enumerate((0.5, 0.52, 0.51, 0.51, 0.5))]
    found = summarize(runs)
    dcr = next(c for c in found.groups[0].comparisons if c.method == "dcr" and c.measure == "final")
    assert dcr.difference.p is not None
    assert dcr.difference.p < 0.05 < (dcr.holm or 0)
    assert findings.verdict(dcr) == "better on its own, not significant after adjustment"


def test_standings_are_best_like_the_best_and_worse():
    runs = [scored([0.1, v], method="dcr", seed=seed) for seed, v in enumerate((0.80, 0.82, 0.84, 0.81, 0.83))]
    runs += [scored([0.1, v], method="dcr_dfg", seed=seed) for seed, v in enumerate((0.81, 0.80, 0.84, 0.80, 0.83))]
    runs += [scored([0.1, v], method="theseus", seed=seed) for seed, v in enumerate((0.50, 0.53, 0.54, 0.52, 0.53))]
    runs += [scored([0.1, 0.5], method="distillation", seed=0)]
    standing = {method.method: method.standing["final"] for method in summarize(runs).groups[0].methods}
    assert standing == {"dcr": "best", "dcr_dfg": "like the best", "theseus": "worse", "distillation": "unknown"}


def test_one_seed_says_that_nothing_is_significant():
    found = summarize(grid(seeds=1, groups=["100 %"]))
    assert found.comparisons == 0
    assert all(c.difference.half is None and c.holm is None for c in found.groups[0].comparisons)
    assert "One seed per method: there are no intervals." in found.groups[0].notes
    assert any("nothing is significant" in sentence for sentence in findings.overview(found))
    assert all("±" not in line for line in tables.markdown(found).splitlines() if line.startswith("|"))


def test_one_method_is_compared_with_nothing():
    found = summarize([run(method="dcr", seed=seed) for seed in range(2)])
    assert found.groups[0].comparisons == []
    assert findings.overview(found)[0].startswith("Nothing is compared: that takes two methods")
    assert found.groups[0].methods[0].standing == {"final": "unknown", "area": "unknown"}
    assert found.groups[0].findings[0].endswith(", by DCR.")
    assert "(best)" not in tables.markdown(found)


def test_a_diverged_seed_is_counted_and_cannot_make_a_method_best():
    runs = [scored([0.1, v], method="theseus", seed=seed) for seed, v in enumerate((0.5, 0.6))]
    runs += [scored([0.1, 0.9], method="dcr", seed=0), scored([0.1, None], method="dcr", seed=1)]
    group = summarize(runs).groups[0]
    dcr = group.method("dcr")
    assert dcr is not None
    assert dcr.final is not None
    assert (dcr.final.mean, dcr.final.n, dcr.final.asked) == (0.9, 1, 2)
    assert {method.method: method.standing["final"] for method in group.methods} == {"theseus": "best", "dcr": "unknown"}
    assert any(note.startswith("DCR: 1 of 2 seeds ended without a finite score") for note in group.notes)
    assert "90.0 % (1 of 2 seeds)" in tables.markdown(summarize(runs))


def test_runs_that_measured_nothing_but_their_end():
    bare = with_points(run(), lambda i, p: Point(step=p.step, epoch=p.epoch, seconds=p.seconds, flops=p.flops, alpha=p.alpha))
    found = summarize([bare])
    method = found.groups[0].methods[0]
    assert method.area is None
    assert method.final is not None
    assert method.held[0].held == 0
    assert not method.line.by_site["cosine"]["blocks.0.attn"].known
    assert tables.markdown(found)


def test_no_points_and_no_scores_at_all():
    empty = changed(run(), points=[], final={}, teacher={}, teacher_eval={}, sites=[], total_steps=0)
    found = summarize([empty])
    assert found.groups[0].shown_sites == []
    assert found.groups[0].methods[0].final is None
    assert "No run of this group ended with a finite accuracy." in found.groups[0].findings
    assert tables.csv(found).count("\n") == 2


@pytest.mark.parametrize(("sites", "shown"), [(12, [0, 7, 11]), (6, [0, 3, 5]), (24, [0, 15, 23]), (2, [0, 1]), (1, [0])])
def test_first_middle_and_last_site(sites: int, shown: list[int]):
    assert summarize([run(sites=sites, evaluations=3)]).groups[0].shown_sites == shown


def test_methods_come_in_the_order_of_the_paper(whole):
    assert [name for name, _ in whole.methods] == list(LABELS)
    mixed = summarize(grid(methods=["zeta", "dcr_dfg", "alpha", "student_only"], seeds=1, groups=["100 %"]))
    assert [name for name, _ in mixed.methods] == ["student_only", "dcr_dfg", "alpha", "zeta"]


def test_percentages_descend_and_other_groups_ascend():
    shares = summarize([run(group=name, evaluations=2) for name in ("5 %", "100 %", "20 %")])
    depths = summarize([run(group=name, evaluations=2) for name in ("12 blocks", "6 blocks", "24 blocks")])
    assert [group.name for group in shares.groups] == ["100 %", "20 %", "5 %"]
    assert [group.name for group in depths.groups] == ["6 blocks", "12 blocks", "24 blocks"]


def test_a_method_may_be_missing_from_a_group():
    runs = [*grid(methods=["theseus", "dcr"], groups=["100 %"], seeds=2), *grid(methods=["dcr"], groups=["5 %"], seeds=2)]
    found = summarize(runs)
    assert [[method.method for method in group.methods] for group in found.groups] == [["theseus", "dcr"], ["dcr"]]
    row = next(line for line in tables.markdown(found).splitlines() if line.startswith("| Theseus"))
    assert row.endswith(f"| {NOTHING} |")


def test_several_experiments_do_not_mix():
    found = summarize([run(experiment="small"), run(experiment="deep")])
    assert [group.name for group in found.groups] == ["deep: 100 %", "small: 100 %"]


def test_duplicates_are_ignored_and_named():
    found = summarize([run(seed=0), run(seed=0), run(seed=1)])
    assert found.groups[0].methods[0].seeds == [0, 1]
    assert found.runs == 2
    assert found.notes == ["1 run ignored, with the method, group and seed of another: dcr-100%-seed0."]

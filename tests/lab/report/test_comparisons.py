"""Comparisons: who is the reference, and that equal methods are called different as rarely as is claimed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from experiments.recipes.runs import ADAPTIVE, JUMP, RAMP, fitted, phased

from segue import methods
from segue.errors import ConfigError
from segue.lab.config import to_dict
from segue.lab.report import answer, comparisons, findings
from segue.lab.report.comparisons import compare, standings
from segue.lab.report.summary import Group, summarize
from segue.reporting.statistics import average_ranks, estimate, holm, paired_difference
from segue.schedules import Piecewise
from tests.lab.report.saved_runs import grid, scored

METHODS = ("student_only", "distillation", "theseus", "theseus_gumbel", "dcr", "dcr_dfg")
SIMULATIONS = 400
CLAIMED = 0.05 + 3 * (0.05 * 0.95 / SIMULATIONS) ** 0.5  # three standard errors of the simulation


@pytest.fixture(scope="module")
def template() -> Group:
    return summarize([scored([0.1, 0.5], method=method) for method in METHODS]).groups[0]


def simulated(
    template: Group, seeds: int, means: dict[str, float] | None = None, spread: float = 1.0, count: int = SIMULATIONS
):
    """Draw groups whose methods have these means, zero unless given; what a seed shares is shared, DCR has its own spread."""
    random = np.random.default_rng(0)
    for _ in range(count):
        shared = random.normal(size=seeds)
        methods = []
        for method in template.methods:
            own = random.normal(size=seeds) * (spread if method.method == "dcr" else 1.0)
            scores = [float(v) for v in shared + own + (means or {}).get(method.method, 0.0)]
            by_seed = dict(enumerate(scores))
            found = estimate(scores)
            methods.append(
                replace(method, seeds=list(by_seed), final=found, area=found, by_seed={"final": by_seed, "area": by_seed})
            )
        yield replace(template, methods=methods)


def final_of(group: Group, reference: str | None):
    return [c for c in compare([group], reference) if c.measure == "final"]


def test_the_best_other_method_is_none_of_our_own():
    """A local fit is Segue's own like DCR: it is no baseline, in the comparisons or in the answer above them."""
    ends = {"student_only": 0.5, "theseus": 0.6, "local_fit": 0.8, "adaptive_dfg_kl": 0.7, "dcr_dfg": 0.9}
    runs = [scored([0.1, end + seed / 100], method=name, seed=seed) for name, end in ends.items() for seed in range(5)]
    summary = summarize(runs)
    assert {found.reference for found in compare(summary.groups, None)} == {"theseus"}
    theseus, local_fit = (next(m.label for m in summary.groups[0].methods if m.method == n) for n in ("theseus", "local_fit"))
    (said,) = [line for line in answer.answer(summary) if "best other method" in line]
    assert f"the best other method, {theseus}," in said
    assert local_fit not in said


@pytest.mark.parametrize(
    ("plan", "ours"),
    [
        (fitted(0.2, JUMP, split=4, reuse=4), True),  # many updates of a batch
        (fitted(0.2, RAMP), True),  # a blend that moves by degrees
        (phased(ADAPTIVE), True),
        (fitted(0.2, JUMP), False),  # a local fit as others publish it, then a jump
        (partial(methods.dcr, schedule=Piecewise(points=((0.0, 1.0), (0.5, 1.0), (0.5, 0.0)))), False),
        (methods.student_only, False),
        (methods.theseus, False),
    ],
)
def test_a_name_that_says_nothing_is_judged_by_its_plan(plan: Any, ours: bool):
    config = {"plan": to_dict(plan(sites="blocks.*.attn"))}
    made = summarize([scored([0.1, 0.5], method="fit_8", config=config), scored([0.1, 0.5], method="student_only")])
    assert {m.method: comparisons.is_ours(m) for m in made.groups[0].methods} == {"fit_8": ours, "student_only": False}


@pytest.mark.parametrize("name", methods.names())
def test_published_names_keep_their_side(name: str):
    """A variant of a published method with a plan of ours is still that method; those of ours are ours."""
    config = {"plan": to_dict(methods.local_fit("blocks.*.attn"))}
    (made,) = summarize([scored([0.1, 0.5], method=name, config=config)]).groups[0].methods
    assert comparisons.is_ours(made) == (name in ("dcr", "dcr_dfg", "local_fit", "transfer"))


@pytest.mark.parametrize("spread", [1.0, 5.0])
def test_equal_methods_are_called_different_as_rarely_as_claimed(template: Group, spread: float):
    groups = list(simulated(template, 5, spread=spread))
    chosen = np.mean([any(map(findings.significant_adjusted, final_of(group, None))) for group in groups])
    named = np.mean([any(map(findings.significant_adjusted, final_of(group, "student_only"))) for group in groups])
    worse = np.mean(["worse" in standings(group.methods, "final").values() for group in groups])
    assert chosen <= CLAIMED
    assert named <= CLAIMED
    assert worse <= CLAIMED


def test_without_the_adjustment_the_chosen_reference_would_be_wrong_too_often(template: Group):
    wrong = 0
    for group in simulated(template, 5):
        leader = comparisons.best(group.methods, "final")
        assert leader is not None
        p_values = [c.p for m in group.methods if m is not leader and (c := comparisons.paired(m, leader, "final")) and c.p]
        wrong += min(holm(p_values)) < 0.05
    assert wrong / SIMULATIONS > CLAIMED


@pytest.mark.parametrize("reference", [None, "student_only"])
def test_a_real_difference_is_found_far_more_often(template: Group, reference: str | None):
    found = [
        any(c.method == "dcr" and findings.significant_adjusted(c) for c in final_of(group, reference))
        for group in simulated(template, 8, {"dcr": 4.0}, count=100)
    ]
    assert np.mean(found) > 0.6


def test_a_single_test_errs_in_five_of_a_hundred():
    draws = np.random.default_rng(1).normal(size=(2000, 2, 5))
    found = [paired_difference([(float(a), float(b)) for a, b in pair.T]) for pair in draws]
    assert np.mean([one is not None and one.p < 0.05 for one in found]) == pytest.approx(0.05, abs=0.015)
    assert np.mean([one is not None and one.exact <= 2 / 32 for one in found]) == pytest.approx(2 / 32, abs=0.016)


@pytest.mark.parametrize(("methods", "settings"), [(3, 3), (3, 20), (5, 6), (7, 10)])
def test_the_critical_difference_errs_as_rarely_as_claimed(methods: int, settings: int):
    random = np.random.default_rng(2)
    found = [
        average_ranks({str(i): list(row) for i, row in enumerate(random.normal(size=(methods, settings)))})
        for _ in range(SIMULATIONS)
    ]
    assert np.mean([one is not None and bool(one.apart()) for one in found]) <= CLAIMED
    better = average_ranks({str(i): list(random.normal(size=20) + 2 * i) for i in range(5)})
    assert better is not None
    assert ("4", "0") in better.apart()


def test_a_named_reference_is_compared_once_with_every_method():
    runs = grid(seeds=5, evaluations=3, sites=1)
    chosen, named = summarize(runs), summarize(runs, reference="student_only")
    assert {c.reference for group in named.groups for c in group.comparisons} == {"student_only"}
    assert named.comparisons == 3 * 6  # groups, and methods but the reference
    assert chosen.comparisons == 3 * (10 + 2 * 5)  # pairs of five other methods, and DCR twice with each
    p_values = [c.difference.p for group in named.groups for c in group.comparisons if c.measure == "final"]
    adjusted = [c.holm for group in named.groups for c in group.comparisons if c.measure == "final"]
    assert adjusted == pytest.approx(holm(p_values))
    assert any("with Student only, the reference" in sentence for sentence in findings.overview(named))


def test_a_reference_that_no_run_has_is_refused():
    with pytest.raises(ConfigError, match="no run has the method 'student_onyl', the reference") as raised:
        summarize(grid(seeds=1, evaluations=2, sites=1), reference="student_onyl")
    assert "student_only" in str(raised.value)


def test_a_difference_without_spread_is_neither_significant_nor_a_standing():
    runs = [scored([0.1, 0.5 + 0.01 * seed], method="theseus", seed=seed) for seed in range(5)]
    runs += [scored([0.1, 0.6 + 0.01 * seed], method="dcr", seed=seed) for seed in range(5)]
    group = summarize(runs).groups[0]
    final = next(c for c in group.comparisons if c.measure == "final")
    assert findings.verdict(final) == "no spread: cannot be tested"
    assert {method.method: method.standing["final"] for method in group.methods} == {"dcr": "best", "theseus": "unknown"}


def test_ranks_are_those_of_methods_that_every_group_has():
    runs = grid(methods=["student_only", "theseus", "dcr"], seeds=2, evaluations=3, sites=1)
    runs += grid(methods=["dcr_dfg"], groups=["5 %"], seeds=2, evaluations=3, sites=1)
    found = summarize(runs)
    assert found.ranks is not None
    assert set(found.ranks.average) == {"student_only", "theseus", "dcr"}
    assert found.ranks.settings == 3
    assert any(s.startswith("Average rank by final accuracy over 3 groups, 1 is best: ") for s in findings.overview(found))
    assert summarize(grid(seeds=2, groups=["5 %"], evaluations=3, sites=1)).ranks is None

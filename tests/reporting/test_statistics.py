"""Means, intervals and p-values, against numbers computed by hand and SciPy's tests."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from segue.reporting.statistics import (
    average_ranks,
    bounded_interval,
    estimate,
    exponential,
    holm,
    holm_selected,
    mean_interval,
    paired_difference,
    positive_interval,
    proportion_interval,
    time_to,
    transform,
)


@pytest.mark.parametrize("n", [2, 3, 5, 64])
def test_intervals_are_those_of_a_t_test(n: int):
    values = [math.sin(i) for i in range(n)]
    found = estimate(values)
    assert found is not None
    assert found.half is not None
    reference = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((reference.low, reference.high), rel=1e-9)


def test_an_interval_by_hand():
    found = estimate([0.8, 0.9, 1.0])  # deviation 0.1, error 0.1 / sqrt(3), t = 4.302653
    assert found is not None
    assert found.mean == pytest.approx(0.9)
    assert found.half == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)


def test_one_seed_has_a_mean_and_no_interval_and_none_have_nothing():
    found = estimate([0.5])
    assert found is not None
    assert (found.mean, found.half, found.n) == (0.5, None, 1)
    assert estimate([None, math.nan]) is None
    partly = estimate([0.5, None, math.inf])
    assert partly is not None
    assert (partly.n, partly.asked, partly.complete) == (1, 3, False)


def test_paired_differences_are_those_of_a_paired_t_test():
    a, b = [0.91, 0.93, 0.90, 0.95], [0.90, 0.90, 0.91, 0.92]
    found = paired_difference(list(zip(a, b, strict=True)))
    reference = stats.ttest_rel(a, b)
    assert found is not None
    assert found.p == pytest.approx(reference.pvalue, rel=1e-9)
    assert found.half is not None
    interval = reference.confidence_interval(0.95)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((interval.low, interval.high), rel=1e-9)
    flipped = stats.permutation_test(
        ([x - y for x, y in zip(a, b, strict=True)],), lambda x: sum(x), permutation_type="samples", vectorized=False
    )
    assert found.exact == pytest.approx(flipped.pvalue)
    assert found.untested == "4 common seeds: too few, 5 are needed"


def test_five_seeds_can_be_tested_and_the_exact_p_is_that_of_flipped_signs():
    differences = [0.02, -0.01, 0.03, 0.015, 0.04, 0.01]
    found = paired_difference([(0.5 + d, 0.5) for d in differences])
    assert found is not None
    assert found.untested == ""
    flipped = stats.permutation_test((differences,), lambda x: x.sum(), permutation_type="samples", vectorized=False)
    assert found.exact == pytest.approx(flipped.pvalue)
    alike = paired_difference([(0.5 + 0.01 * i, 0.5) for i in range(1, 6)])
    assert alike is not None
    assert alike.exact == 2 / 2**5  # all have one sign


def test_many_seeds_sample_the_signs_and_repeat_themselves():
    pairs = [(0.5 + 0.01 * math.sin(3 * i) + 0.004, 0.5) for i in range(20)]
    found, again = paired_difference(pairs), paired_difference(pairs)
    assert found is not None
    assert found == again
    assert found.exact == pytest.approx(found.p, abs=0.03)


def test_pairs_without_a_partner_are_ignored():
    found = paired_difference([(0.5, 0.4), (None, 0.4), (0.7, math.nan), (0.8, 0.5)])
    assert found is not None
    assert found.pairs == 2
    assert found.mean == pytest.approx(0.2)
    assert paired_difference([(0.5, None)]) is None
    single = paired_difference([(0.5, 0.4)])
    assert single is not None
    assert (single.half, single.p, single.untested) == (None, None, "one common seed: cannot be tested")


@pytest.mark.parametrize("shift", [0.0, 0.02, 0.1])
def test_differences_without_spread_are_not_significant_but_untested(shift: float):
    scores = [0.917, 0.902, 0.911, 0.923, 0.908]
    found = paired_difference([(score + shift, score) for score in scores])  # equal up to rounding
    assert found is not None
    assert found.mean == pytest.approx(shift)
    assert (found.half, found.p, found.exact) == (None, None, None)
    assert found.untested == "no spread: cannot be tested"


def test_holm_by_its_definition():
    p_values = [0.01, 0.20, 0.03, 0.005, 0.9, 0.03]
    ranked = sorted(p_values)
    expected = {p: max(min(1.0, (len(ranked) - j) * ranked[j]) for j in range(i + 1)) for i, p in enumerate(ranked)}
    assert holm(p_values) == pytest.approx([expected[p] for p in p_values])
    assert holm([]) == []


def test_a_selection_is_adjusted_for_everything_it_could_have_selected():
    p_values = {"a": 0.01, "b": 0.2, "c": None, "d": 0.04}
    assert holm_selected(p_values, ["d", "c", "a"]) == [pytest.approx(0.08), None, pytest.approx(0.03)]


def test_kaplan_and_meier_by_hand():
    # 6 runs: at risk 6, 5, 4 (one ends at 2.5 without the target), 2: left 5/6, 4/6, 4/6 * 2/3, 4/6 * 2/3 * 1/2
    found = time_to([1.0, 2.0, 2.5, 3.0, 4.0, 5.0], [True, True, False, True, True, False])
    left = [5 / 6, 4 / 6, 4 / 9, 2 / 9]
    assert (found.median, found.reached, found.runs) == (3.0, 4, 6)
    assert found.restricted_mean == pytest.approx(1 + left[0] + left[1] + left[2] + left[3])
    assert time_to([1.0, 2.0, 2.5, 3.0, 4.0, 5.0], [True, True, False, True, True, False], limit=3.5).restricted_mean == (
        pytest.approx(1 + left[0] + left[1] + left[2] / 2)
    )


def test_without_censored_runs_the_median_and_the_mean_are_the_usual_ones():
    for times in ([3.0, 1.0, 2.0], [4.0, 1.0, 2.0, 8.0], [2.0, 2.0]):
        found = time_to(times, [True] * len(times))
        assert (found.median, found.restricted_mean) == (pytest.approx(np.median(times)), pytest.approx(np.mean(times)))


def test_a_target_that_half_of_the_runs_never_reach_has_no_median():
    found = time_to([1.0, 9.0, 2.0, 9.0], [True, False, True, False])
    assert (found.median, found.restricted_mean) == (None, pytest.approx((1 + 2 + 9 + 9) / 4))
    assert time_to([9.0, 9.0], [False, False]).median is None


def test_leaving_out_censored_runs_would_flatter_a_method():
    drawn = np.random.default_rng(0).exponential(1.0, 4000)
    found = time_to(list(np.minimum(drawn, 1.0)), list(drawn < 1.0))
    assert found.median == pytest.approx(math.log(2), abs=0.05)
    assert np.median(drawn[drawn < 1.0]) < 0.45


def test_average_ranks_and_the_critical_difference_of_demsars_paper():
    # Demsar (2006): with 4 methods and 14 data sets q = 2.569, so the critical difference is 1.25
    scores = np.random.default_rng(0).random((4, 14))
    found = average_ranks({str(i): list(row) for i, row in enumerate(scores)})
    assert found is not None
    assert found.critical_difference == pytest.approx(2.569 * math.sqrt(4 * 5 / (6 * 14)), abs=1e-3)
    assert found.friedman == pytest.approx(stats.friedmanchisquare(*scores).pvalue)
    ranks = (scores[None] >= scores[:, None]).sum(1)  # 1 for the highest of a column
    assert found.average == pytest.approx({str(i): row.mean() for i, row in enumerate(ranks)})
    assert list(found.average.values()) == sorted(found.average.values())


def test_ranks_say_which_methods_are_apart_and_ties_share_a_rank():
    settings = range(12)
    found = average_ranks({"low": [0.1 for _ in settings], "middle": [0.5 for _ in settings], "high": [0.9 for _ in settings]})
    assert found is not None
    assert found.average == {"high": 1.0, "middle": 2.0, "low": 3.0}
    assert found.apart() == [("high", "middle"), ("high", "low"), ("middle", "low")]
    tied = average_ranks({name: [0.5, 0.5] for name in "abc"})
    assert tied is not None
    assert (set(tied.average.values()), tied.friedman, tied.apart()) == ({2.0}, 1.0, [])
    assert average_ranks({"a": [1.0, 2.0], "b": [2.0, 1.0]}) is None
    assert average_ranks({"a": [1.0], "b": [2.0], "c": [3.0]}) is None


def test_intervals_of_proportions_stay_between_0_and_1_and_narrow_with_examples():
    assert proportion_interval(torch.zeros(4))["low"] == 0
    assert proportion_interval(torch.ones(4))["low"] < proportion_interval(torch.ones(400))["low"] < 1
    found = proportion_interval(torch.tensor([0.99, 1.0, 0.5]))
    assert 0 < found["low"] < found["mean"] < found["high"] < 1
    assert math.isnan(mean_interval(torch.zeros(0))["mean"])
    assert mean_interval(torch.tensor([1.0, math.inf, 2.0])) == {"mean": math.inf, "low": None, "high": None, "n": 3}
    assert mean_interval(torch.tensor([2.0])) == {"mean": 2.0, "low": None, "high": None, "n": 1}
    assert transform(exponential, mean_interval(torch.tensor([1e4])))["mean"] == math.inf


@pytest.mark.parametrize("many", [3, 40])
def test_intervals_stay_in_the_possible_range_and_are_students_where_that_is_far(many: int):
    skewed = torch.cat([torch.full((many - 1,), 0.001), torch.tensor([0.9])])
    assert (
        mean_interval(skewed)["low"] < 0 < positive_interval(skewed)["low"] < skewed.mean() < positive_interval(skewed)["high"]
    )
    assert 0 < bounded_interval(skewed)["low"] < skewed.mean() < bounded_interval(skewed)["high"] < 1
    assert -1 < bounded_interval(1 - skewed, -1, 1)["low"] < bounded_interval(1 - skewed, -1, 1)["high"] < 1
    narrow = 0.5 + 1e-4 * torch.arange(many, dtype=torch.float64)
    for found in (positive_interval(narrow), bounded_interval(narrow), bounded_interval(narrow, -1, 1)):
        assert (found["low"], found["high"]) == pytest.approx([mean_interval(narrow)[end] for end in ("low", "high")], abs=1e-6)
    assert positive_interval(torch.zeros(many)) == mean_interval(torch.zeros(many))
    assert bounded_interval(torch.ones(many)) == mean_interval(torch.ones(many))


@pytest.mark.parametrize(("hits", "n"), [(0, 5), (3, 10), (99, 100)])
def test_intervals_of_proportions_are_wilsons(hits: int, n: int):
    found = proportion_interval(torch.tensor([1.0] * hits + [0.0] * (n - hits)))
    reference = stats.binomtest(hits, n).proportion_ci(method="wilson")
    assert (found["low"], found["high"]) == pytest.approx((reference.low, reference.high), abs=1e-9)

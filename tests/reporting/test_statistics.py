"""Means, intervals and p-values, against numbers computed by hand and SciPy's tests."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from segue.reporting.statistics import (
    estimate,
    exponential,
    holm,
    mean_interval,
    paired_difference,
    proportion_interval,
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
    assert found.excludes_zero is False


def test_pairs_without_a_partner_are_ignored():
    found = paired_difference([(0.5, 0.4), (None, 0.4), (0.7, math.nan), (0.8, 0.5)])
    assert found is not None
    assert found.pairs == 2
    assert found.mean == pytest.approx(0.2)
    assert paired_difference([(0.5, None)]) is None
    single = paired_difference([(0.5, 0.4)])
    assert single is not None
    assert (single.half, single.p, single.excludes_zero) == (None, None, None)


def test_equal_differences_have_no_spread():
    same = paired_difference([(0.3, 0.3), (0.4, 0.4)])
    apart = paired_difference([(0.75, 0.5), (0.5, 0.25), (1.0, 0.75)])
    assert same is not None
    assert apart is not None
    assert (same.p, apart.p, apart.half) == (1.0, 0.0, 0.0)


def test_holm_by_its_definition():
    p_values = [0.01, 0.20, 0.03, 0.005, 0.9, 0.03]
    ranked = sorted(p_values)
    expected = {p: max(min(1.0, (len(ranked) - j) * ranked[j]) for j in range(i + 1)) for i, p in enumerate(ranked)}
    assert holm(p_values) == pytest.approx([expected[p] for p in p_values])
    assert holm([]) == []


def test_intervals_of_proportions_stay_between_0_and_1_and_narrow_with_examples():
    assert proportion_interval(torch.zeros(4))["low"] == 0
    assert proportion_interval(torch.ones(4))["low"] < proportion_interval(torch.ones(400))["low"] < 1
    found = proportion_interval(torch.tensor([0.99, 1.0, 0.5]))
    assert found["high"] == 1
    assert found["low"] > 0
    assert mean_interval(torch.tensor([2.0])) == {"mean": 2.0, "low": None, "high": None, "n": 1}
    assert transform(exponential, mean_interval(torch.tensor([1e4])))["mean"] == math.inf


@pytest.mark.parametrize(("hits", "n"), [(0, 5), (3, 10), (99, 100)])
def test_intervals_of_proportions_are_wilsons(hits: int, n: int):
    found = proportion_interval(torch.tensor([1.0] * hits + [0.0] * (n - hits)))
    reference = stats.binomtest(hits, n).proportion_ci(method="wilson")
    assert (found["low"], found["high"]) == pytest.approx((reference.low, reference.high), abs=1e-9)

"""Numbers as text."""

from __future__ import annotations

import math

import pytest

from segue.reporting.formatting import (
    NOTHING,
    ScoreFormat,
    duration,
    flops,
    interval,
    listed,
    memory,
    seeds_behind,
    significant,
)
from segue.reporting.statistics import Difference, Estimate
from tests.helpers.processes import run_python


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, NOTHING), (0, "0 s"), (0.9999, "1000 ms"), (59.94, "59.9 s"), (59.96, "1 min"), (3599.6, "1 h"), (86399, "1 d")],
)
def test_durations_round_up_into_the_next_unit(seconds: float | None, text: str):
    assert duration(seconds) == text


def test_what_is_unknown_or_not_finite_is_a_dash():
    assert (flops(None), memory(None), significant(math.nan), significant(math.inf)) == (NOTHING,) * 4
    assert interval({"mean": None, "low": None, "high": None, "n": 0}) == NOTHING
    assert listed([]) == NOTHING


@pytest.mark.parametrize(
    ("score", "values", "percent"),
    [("accuracy", [0.5, 1.0], True), ("top1", [0.2], True), ("accuracy", [55.0], False), ("loss", [0.5], False)],
)
def test_scores_between_0_and_1_that_are_fractions_are_written_in_percent(score: str, values: list[float], percent: bool):
    assert ScoreFormat.of(score, values).percent is percent


def test_scores_and_their_differences():
    percent, plain = ScoreFormat(percent=True), ScoreFormat(percent=False)
    assert percent.estimate(Estimate(0.5, 0.01, 3, 3)) == "50.0 ± 1.0 %"
    assert plain.estimate(Estimate(2.5, None, 1, 1)) == "2.5"
    assert percent.difference(Difference(-0.02, 0.01, 0.1, 3)) == "\u22122.0 points (\u22123.0 to \u22121.0)"
    assert plain.difference(Difference(0.5, None, None, 1)) == "+0.5"


def test_seeds_without_a_value_are_counted():
    assert seeds_behind(Estimate(1.0, None, 1, 2)) == " (1 of 2 seeds)"
    assert seeds_behind(Estimate(1.0, 0.0, 2, 2)) == seeds_behind(None) == ""


@pytest.mark.processes
def test_formatting_and_records_need_no_extra():
    code = "import sys; sys.modules.update(matplotlib=None, numpy=None, scipy=None); "
    code += "import segue.reporting.formatting, segue.reporting.palette, segue.reporting.records"
    run_python("-c", code)

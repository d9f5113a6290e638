"""Spikes: what is one, and what is only a loss that moves."""

import math
import random

import pytest

from segue.training.spikes import Series

USUAL = 8.0  # deviations, as of Guard


def series_of(values, window=64):
    series = Series(window)
    for value in values:
        series.add(value)
    return series


def noise(count, size, seed=0):
    draw = random.Random(seed)
    return [draw.gauss(0.0, size) for _ in range(count)]


def deviations_of(values, warmup=32):
    """Judge every value by those before it."""
    series, found = Series(64), []
    for index, value in enumerate(values):
        found.append(series.deviations(value) if index >= warmup else 0.0)
        series.add(value)
    return found


COURSES = {
    "noise": [2.0 + one for one in noise(2000, 0.1)],
    "falling": [3.0 * 0.99**step + one for step, one in enumerate(noise(400, 0.05))],
    "rising, as a handover does": [0.1 + 0.02 * step + one for step, one in enumerate(noise(200, 0.02))],
    "learned, and now and then one example is wrong": [0.01 * math.exp(one) for one in noise(2000, 1.2)],
    "constant": [1.0] * 100,
    "zero": [0.0] * 100,
    "below zero": [-5.0 + one for one in noise(2000, 0.1)],
    "around zero": noise(2000, 1.0),
}


@pytest.mark.parametrize("course", COURSES)
def test_a_loss_that_moves_has_no_spikes(course):
    assert max(deviations_of(COURSES[course])) < USUAL


@pytest.mark.parametrize("course", COURSES)
def test_a_loss_that_explodes_is_one(course):
    series = series_of(COURSES[course])
    assert series.deviations(1e4) > USUAL


def test_the_deviations_are_those_of_medians_computed_here():
    values = [2.0, 2.2, 1.9, 2.1, 2.0, 2.3, 2.2]
    level = sorted(values[-5:])[2]
    distances = [abs(value - sorted(before)[len(before) // 2]) for value, before in [(2.3, [2.0, 2.2, 1.9, 2.1, 2.0])]]
    series = Series(window=1)
    for value in values[:-1]:
        series.add(value)
    level = sorted(values[1:6])[2]
    plain = (9.0 - level) / (1.4826 * distances[0])
    log = (math.log(9.0) - math.log(level)) / (1.4826 * (math.log(2.3) - math.log(2.0)))
    assert series.deviations(9.0) == pytest.approx(min(plain, log))


def test_a_spike_that_is_counted_in_does_not_hide_the_next_one():
    values = COURSES["noise"][:100]
    series = series_of([*values, 1e6, *values[:3]])
    assert series.deviations(1e6) > USUAL
    assert series.deviations(2.1) < USUAL


def test_nothing_is_known_at_first():
    assert Series(8).deviations(1e9) == 0.0


def test_the_state_continues_as_it_was():
    series, other = series_of(COURSES["falling"]), Series(64)
    other.load_state_dict(series.state_dict())
    for value in (0.1, 5.0, -1.0, 0.2, 3.0):
        assert other.deviations(value) == series.deviations(value)
        series.add(value)
        other.add(value)
    assert other.state_dict() == series.state_dict()


@pytest.mark.parametrize("wrong", [None, [], [[1.0], [-1.0]], [[1.0] * 6, []], [["1"], []], [[math.nan], []], [[1], []]])
def test_a_wrong_state_is_refused(wrong):
    state = series_of([1.0, 2.0]).state_dict()
    with pytest.raises((ValueError, TypeError)):
        Series(8).load_state_dict({**state, "plain": wrong})

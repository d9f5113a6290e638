"""The search of settings: the same choice however it is interrupted, and no best value at an edge while trials are left."""

from __future__ import annotations

import itertools
import random

import pytest

from segue.lab.search import Axis, Point, best, on_line, propose, replay


def hill(*top: float):
    """Return a score with one maximum."""
    return lambda point: -sum((a - b) ** 2 for a, b in zip(point, top, strict=True))


def searched(axes: int, trials: int, score):
    tried, waiting = replay(axes, trials, lambda point: (True, score(point)))
    assert not waiting
    return tried


@pytest.mark.parametrize("top", [-4.0, -1.0, 0.0, 3.0])
@pytest.mark.parametrize("trials", [3, 7, 12])
def test_every_search_has_exactly_its_trials_and_extends_to_the_best(top, trials):
    tried = searched(1, trials, hill(top))
    assert len(tried) == trials
    chosen, line = best(tried), on_line(tried, best(tried), 0)
    enough = trials >= 3 + abs(top)  # the first three, and one for each factor until there is one beyond the best
    assert (line[0] < chosen[0] < line[-1]) == enough
    assert (chosen == (top,)) == enough or trials == 2 + abs(top)


def test_two_settings_are_found_one_after_the_other():
    tried = searched(2, 12, hill(2.0, -1.0))
    assert best(tried) == (2.0, -1.0)
    for axis in (0, 1):
        line = on_line(tried, best(tried), axis)
        assert line[0] < best(tried)[axis] < line[-1]


def test_trials_that_are_left_go_to_values_between_then_outwards():
    tried = list(searched(1, 7, hill(0.0)))
    assert tried == [(0.0,), (1.0,), (-1.0,), (0.5,), (-0.5,), (2.0,), (-2.0,)]


def test_a_search_does_not_depend_on_the_order_in_which_trials_end():
    noise = {
        point: random.Random(str(point)).random() for point in itertools.product([x / 2 for x in range(-40, 41)], repeat=2)
    }

    def score(point: Point):
        return hill(1.0, 2.0)(point) + 3 * noise[point]

    undisturbed = searched(2, 11, score)
    for seed in range(20):  # one trial at a time ends, in any order; what is proposed is asked anew each time
        ended: set[Point] = set()
        generator = random.Random(seed)
        while True:
            tried, waiting = replay(2, 11, lambda point: (point in ended, score(point)))  # noqa: B023
            if not waiting:
                break
            ended.add(generator.choice(waiting))
        assert tried == undisturbed
        assert ended == set(undisturbed)  # no trial in vain


def test_diverged_trials_lead_to_smaller_values():
    assert propose(1, {(0.0,): None, (1.0,): None, (-1.0,): None}, 5) == [(-2.0,)]
    assert best({(0.0,): None, (1.0,): 0.1}) == (1.0,)


def test_equal_scores_choose_the_nearest_to_the_experiments_own():
    assert best({(1.0,): 0.5, (0.0,): 0.5, (-1.0,): 0.5}) == (0.0,)


def test_values_are_as_a_person_would_write_them():
    assert [Axis("recipe.lr", 5e-4, 2.0).value(power) for power in (-2, 0, 0.5, 3)] == [0.000125, 0.0005, 0.0007071, 0.004]

"""Order and pace: least damage in context first, longer ramps for larger errors, all within the window."""

import pytest
import torch

from segue.planning.pacing import LONGEST, SHORTEST, order_of, staggered
from segue.planning.prediction import Prediction
from segue.sites import Site

OPTIONS = tuple((f"layers.{i}", "a") for i in range(3))


def prediction(singles, pairs=None):
    matrix = torch.zeros(3, 3, dtype=torch.float64) if pairs is None else torch.tensor(pairs, dtype=torch.float64)
    return Prediction(OPTIONS, torch.tensor(singles, dtype=torch.float64), matrix, 0.1, 0.0, None, 0)


def test_the_least_damage_comes_first_in_context():
    assert order_of(prediction([3.0, 1.0, 2.0]), OPTIONS) == [OPTIONS[1], OPTIONS[2], OPTIONS[0]]
    with_pair = prediction([3.0, 1.0, 2.0], [[0, 0, 0], [0, 0, 5.0], [0, 0, 0]])  # the third is dear beside the second
    assert order_of(with_pair, OPTIONS) == [OPTIONS[1], OPTIONS[0], OPTIONS[2]]
    assert order_of(with_pair, OPTIONS[:1], before=OPTIONS[1:]) == [OPTIONS[0]]


def test_ramps_are_as_long_as_errors_are_large_and_end_in_time():
    errors = dict(zip(OPTIONS, (0.1, 0.3, 0.2), strict=True))
    found = staggered(OPTIONS, errors, start=0.1, until=0.5)
    ramps = [found.schedules[site].points for site, _ in OPTIONS]
    begins, lengths = [first[0] for first, _ in ramps], [last[0] - first[0] for first, last in ramps]
    assert begins == sorted(begins)
    assert begins[0] == 0.1
    assert max(last[0] for _, last in ramps) == pytest.approx(0.5, abs=1e-5)
    assert lengths[1] / lengths[0] == pytest.approx(3.0, rel=1e-3)
    for site, _ in OPTIONS:
        assert (found(0.0, Site(site)), found(1.0, Site(site))) == (1.0, 0.0)


def test_no_ramp_is_extreme():
    found = staggered(OPTIONS, dict(zip(OPTIONS, (1e-6, 1.0, 1e-6), strict=True)))
    lengths = [last[0] - first[0] for first, last in (found.schedules[site].points for site, _ in OPTIONS)]
    assert max(lengths) / min(lengths) <= LONGEST / SHORTEST + 1e-3
    staggered(OPTIONS, dict.fromkeys(OPTIONS, 0.0))

"""Golden curves: the losses of every method, so that a refactoring that changes the numbers is noticed.

Write them again, on purpose only: python -m tests.golden.test_golden
"""

import json
from pathlib import Path

import pytest

import segue
from tests.helpers.tiny import SITES, optimizer_for, start, train

CURVES = Path(__file__).parent / "curves.json"


def curve(name: str) -> list[float]:
    handover = start(segue.methods.ALL[name](sites=SITES), total_steps=12)
    return train(handover, optimizer_for(handover), 12)


@pytest.mark.parametrize("name", json.loads(CURVES.read_text()))
def test_the_curve_is_the_golden_one(name):
    assert curve(name) == pytest.approx(json.loads(CURVES.read_text())[name], rel=1e-4)


if __name__ == "__main__":
    CURVES.write_text(json.dumps({name: curve(name) for name in segue.methods.ALL}, indent=1) + "\n")

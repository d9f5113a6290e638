"""Wrong arguments are refused at the border, in three lines, and change nothing."""

from __future__ import annotations

import pytest

from tests.torture.valid_calls import AT_THE_BORDER_ONLY, USES, VALID
from tests.torture.wrong_calls import REFUSED, WRONG, WrongCall, allows, hints, parameters, run, targets_once

EACH = 2  # wrong values per parameter here; the campaign tries all of them


def test_every_public_callable_has_a_valid_call():
    assert sorted(VALID) == sorted(targets_once())


@pytest.mark.parametrize("name", sorted(VALID.keys() - AT_THE_BORDER_ONLY))
def test_the_valid_call_works(name, tmp_path):
    arguments = VALID[name](tmp_path)
    positional = [arguments.pop("self")] if "self" in arguments else []
    made = targets_once()[name](*positional, *arguments.pop("args", ()), **arguments)
    if name in USES:
        USES[name](made, tmp_path)


@pytest.mark.parametrize("name", sorted(VALID))
def test_a_wrong_type_is_refused(name, tmp_path):
    """Try a few values of each parameter that its hint does not allow, other ones for the next parameter."""
    target = targets_once()[name]
    hinted = hints(target)
    assert set(parameters(target)) <= set(hinted), "a hint that cannot be read checks nothing"
    verdicts = []
    for index, parameter in enumerate(parameters(target)):
        wrong = [label for label, value in WRONG.items() if not allows(hinted[parameter], value())]
        chosen = {wrong[(7 * index + 11 * one) % len(wrong)] for one in range(EACH)} if wrong else set()
        verdicts += [run(WrongCall(name, parameter, label, WRONG[label]), tmp_path / "folder") for label in sorted(chosen)]
    assert [str(verdict) for verdict in verdicts if verdict.kind != REFUSED] == []

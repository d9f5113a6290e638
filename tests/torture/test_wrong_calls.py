"""Wrong arguments are refused at the border, in three lines, and change nothing."""

from __future__ import annotations

import pytest

from tests.torture.valid_calls import AT_THE_BORDER_ONLY, USES, VALID
from tests.torture.wrong_calls import targets_once


def test_every_public_callable_has_a_valid_call():
    assert sorted(VALID) == sorted(targets_once())


@pytest.mark.parametrize("name", sorted(VALID.keys() - AT_THE_BORDER_ONLY))
def test_the_valid_call_works(name, tmp_path):
    arguments = VALID[name](tmp_path)
    positional = [arguments.pop("self")] if "self" in arguments else []
    made = targets_once()[name](*positional, *arguments.pop("args", ()), **arguments)
    if name in USES:
        USES[name](made, tmp_path)

"""`python -m segue ...`, run in this process: importing torch again for each command would take most of the time."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import pytest


def segue_command(*arguments: Any) -> None:
    """Call the command and expect that it succeeds."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["segue", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("segue", run_name="__main__", alter_sys=True)
    assert ended.value.code in (0, None)

"""Public names: those of the package are exactly the same, in its modules none disappears."""

from __future__ import annotations

import json
from importlib import import_module

import pytest

import segue

from . import RENAMED, V0_1_0

NAMES = json.loads((V0_1_0 / "public_names.json").read_text(encoding="utf-8"))


ADDED = {"EarlyStopping", "Ema", "Guard", "cache_teacher", "fit_locally", "phases", "plan_replacement", "planning"}


def test_the_package_has_the_names_it_had():
    assert sorted({*segue.__all__} - ADDED) == NAMES["segue"]
    assert all(hasattr(segue, name) for name in NAMES["segue"])


@pytest.mark.parametrize("module", [name for name in NAMES if name != "segue"])
def test_no_name_of_a_module_is_lost(module):
    found = import_module(f"segue.{module}")
    names = [RENAMED.get(f"{module}.{name}", name) for name in NAMES[module]]
    assert [name for name in names if name is not None and not hasattr(found, name)] == []

"""A framework that is not installed is named in one sentence."""

import importlib
import sys

import pytest

from segue.errors import MissingExtraError

LIGHTNING = ["lightning", "lightning.pytorch", "pytorch_lightning"]


@pytest.mark.parametrize(
    ("name", "packages", "text"),
    [
        ("transformers", ["transformers"], "needs Transformers.\n  It is not installed.\n  Hint: pip install segue[hf]"),
        ("lightning", LIGHTNING, "needs Lightning.\n  It is not installed.\n  Hint: pip install segue[lightning]"),
    ],
)  # fmt: skip
def test_a_missing_extra_is_named(name, packages, text, monkeypatch):
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"segue.integrations.{name}", raising=False)
    with pytest.raises(MissingExtraError) as error:
        importlib.import_module(f"segue.integrations.{name}")
    assert str(error.value) == f"segue.integrations.{name} {text}"

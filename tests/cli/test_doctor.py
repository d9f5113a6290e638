"""`segue doctor`: what a bug report needs, and nothing that it must not have."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import torch

import segue
from tests.helpers.command import call


def test_it_shows_versions_and_devices_and_no_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    said = call("doctor")
    assert f"segue: {segue.__version__}" in said
    assert torch.__version__ in said
    assert "device: cpu" in said
    found = json.loads(call("doctor", "--json"))
    assert found["system"]["segue"] == segue.__version__
    assert found["packages"]["torch"] == metadata.version("torch")
    for text in (said, json.dumps(found)):
        assert "hf_secret" not in text
        assert str(Path.home()) not in text
        assert str(Path.cwd()) not in text


def test_it_names_what_is_missing_and_what_is_too_old(monkeypatch):
    known = metadata.version

    def version(name: str) -> str:
        if name == "timm":
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == "transformers" else known(name)

    monkeypatch.setattr(metadata, "version", version)
    said = call("doctor")
    assert "extra timm: timm is missing" in said
    assert "transformers 0.1 is not >=" in said
    assert "timm is missing" in json.loads(call("doctor", "--json"))["extras"]["timm"]


def test_what_another_version_of_python_needs_is_not_missing(monkeypatch):
    needs = ["no_such_package>=1; python_version < '3.0' and extra == 'lab'", "nor_this>=1; extra == 'lab'", "torch>=2.6"]
    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    assert json.loads(call("doctor", "--json"))["extras"] == {"lab": ["nor_this is missing"], "segue itself": []}


def test_sources_without_an_installation_have_no_extras(monkeypatch):
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert json.loads(call("doctor", "--json"))["extras"] == {}

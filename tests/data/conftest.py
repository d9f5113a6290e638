"""Fixtures of the data sources."""

from __future__ import annotations

import os
from typing import Any

import pytest


@pytest.fixture
def unchecked(monkeypatch: Any) -> None:
    """Let torchvision accept files that are not the real ones."""
    from torchvision.datasets import cifar, svhn

    for module in (cifar, svhn):
        monkeypatch.setattr(module, "check_integrity", lambda path, md5: os.path.isfile(path))


@pytest.fixture
def no_network(monkeypatch: Any) -> None:
    """Fail at any use of the network."""
    import urllib.request

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)

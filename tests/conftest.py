"""Shared by all tests: quiet threads and no network."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import segue  # noqa: F401  before timm and transformers: makes torchvision import beside a CPU torch


@pytest.fixture(scope="session", autouse=True)
def notes_of_the_user(tmp_path_factory):
    """Keep what `segue grid` remembers about its user out of the home of whoever runs the tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


def pytest_terminal_summary(terminalreporter):
    """Print the figures that tests measured about the project itself, such as the length of the README."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, ())]
    for figure in sorted({value for report in reports for name, value in report.user_properties if name == "figure"}):
        terminalreporter.write_line(figure)


def pytest_collection_modifyitems(items):
    """Mark what needs Chromium by its fixture."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")

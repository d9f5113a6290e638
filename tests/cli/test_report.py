"""`segue report`: one grid, strangers only on demand, and the page in a browser."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from segue.errors import ConfigError, ResultError
from segue.lab.report import figures
from segue.reporting import records
from tests.helpers.command import call
from tests.lab.report.saved_runs import grid, run, save

pytest.importorskip("matplotlib", reason="the report draws with matplotlib (pip install segue[lab])")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(figures, "draw", lambda summary, folder: [])  # test_figures.py draws them
    return save(grid(methods=["theseus", "dcr"], groups=["all"], seeds=2, evaluations=3, sites=1), tmp_path / "mine")


def test_strangers_are_listed_and_taken_only_on_demand(mine: Path):
    records.write(run(experiment="other", evaluations=3, sites=1), mine / "other")
    shown = call("report", mine)
    assert "1 run left out; --all takes them too:\n  other (of another experiment than 'small')\n" in shown
    assert "other" not in (mine / "table.csv").read_text()
    assert "left out" not in call("report", mine, "--all")
    assert "other: 100 %" in (mine / "table.csv").read_text()


def test_a_folder_of_other_folders_is_refused_before_anything_is_written(mine: Path):
    with pytest.raises(ResultError, match=r"has no finished run of its own.\n  Below it are .*\n  Hint: .*--all"):
        call("report", mine.parent)
    assert not list(mine.parent.glob("report.html"))
    with pytest.raises(ConfigError, match="is not a folder"):
        call("report", mine / "missing", "--watch")


def test_the_written_page_is_opened_on_demand(mine: Path, monkeypatch: pytest.MonkeyPatch):
    opened = mine.parent / "opened"
    script = mine.parent / "browser"
    script.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    script.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{script} %s")
    monkeypatch.setattr("webbrowser._tryorder", None)  # which may have been found before
    call("report", mine, "--open")
    deadline = time.monotonic() + 20
    while not (opened.exists() and opened.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert opened.read_text().strip() == (mine / "report.html").as_uri()

"""The report on the diffusion transformer: the committed results are the tables of the page."""

from __future__ import annotations

from experiments.dit import report
from experiments.dit.runs import runs

from tests.helpers.processes import ROOT


def test_the_page_shows_the_committed_results() -> None:
    page = (ROOT / "docs" / "single-experiments.md").read_text(encoding="utf-8")
    rows = [line for line in report.markdown(*report.kept()).splitlines() if line.startswith("| ")]
    assert len(rows) == 10
    assert [row for row in rows if row not in page] == []


def test_the_results_are_complete() -> None:
    errors, teacher = report.kept()
    assert len(errors) == len(runs()) == 36
    assert all(error > teacher for error in errors.values())

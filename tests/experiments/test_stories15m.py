"""The experiment on stories15M: the committed results are complete, and the tables of the page are theirs."""

from __future__ import annotations

from collections import Counter

from experiments.stories15m import report
from experiments.stories15m.runs import runs

from segue.reporting import records
from tests.helpers.processes import ROOT


def test_the_page_shows_the_committed_results() -> None:
    page = (ROOT / "docs" / "single-experiments.md").read_text(encoding="utf-8")
    lines = [line for line in report.markdown(records.read_all(report.KEPT)).splitlines() if line]
    assert [line for line in lines if line not in page] == []


def test_every_arm_has_three_seeds_and_about_the_same_operations() -> None:
    results = records.read_all(report.KEPT)
    expected = runs(model="stories15m", text="text.safetensors")
    assert Counter((one.run_info.method, one.run_info.group, one.run_info.seed) for one in results) == Counter(
        (one.method, one.group, one.seed) for one in expected
    )
    for operator in report.COMPARED:
        spent = [one.train_info.flops for one in results if one.run_info.group == operator]
        assert max(spent) / min(spent) < 1.1

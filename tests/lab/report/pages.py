"""Pages of made-up runs, and what is in them."""

from __future__ import annotations

import json
import re
from typing import Any

from segue.lab.report import page as report
from segue.lab.report.data import page_data
from segue.lab.report.summary import summarize

NASTY = "</script><img src=x onerror=\"document.title='broken'\"> <b>&amp;</b> @@DATA@@ ' \" \u2028"
LONG = "a label that never ends " * 12


def page_of(runs: list[Any], title: str = "small") -> str:
    return report.page(page_data(summarize(runs), runs, title) | {"files": ["table.csv"]})


def data_in(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def unfolded(page: Any) -> Any:
    """Open what the page has folded."""
    page.evaluate("document.querySelectorAll('details.fold').forEach((one) => { one.open = true; })")
    return page


def has_lines(page: Any, figure: str, count: int) -> None:
    """Wait for a figure to show so many lines: it is drawn when the browser knows its size."""
    from playwright.sync_api import expect

    expect(page.locator(f"#figure-{figure} path.series")).to_have_count(count)

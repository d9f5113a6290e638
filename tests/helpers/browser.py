"""A real browser for pages: a conftest.py imports these fixtures, a module of tests has a fixture `pages` (name -> file)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need Playwright (pip install playwright)")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("the browser tests need chromium on the path")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visit(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    """Open a page; whatever it complains about fails the test."""
    complaints: list[str] = []
    contexts = []

    def opened(name: str, *, width: int = 1200, scheme: str = "light", wait: str = ".plot path.series") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: complaints.append(request.url) if not request.url.startswith(("file:", "data:")) else None,
        )
        page.goto(pages[name].as_uri())
        page.wait_for_selector(wait)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []

"""The shell of every page: safe text, and a policy that allows only what the package ships."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from segue.reporting import html

NASTY = "</script><script>alert(1)</script>{{ title }} & \" ' \u2028"
TEMPLATE = """{% extends "shell.html" %}
{% block main %}<p>{{ text }}</p><script type="application/json" id="data">{{ data | tojson }}</script>{% endblock %}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "page.html").write_text(TEMPLATE, encoding="utf-8")
    (tmp_path / "page.css").write_text("p { color: red; }", encoding="utf-8")
    (tmp_path / "page.js").write_text('console.log("<p> & co");', encoding="utf-8")
    return tmp_path


def test_values_are_escaped_and_data_reads_back(folder: Path):
    page = html.page(folder, "page.html", kind=NASTY, title=NASTY, text=NASTY, data={NASTY: [NASTY, 1.5, None]})
    assert "<script>alert" not in page
    assert page.count("{{ title }}") == 6  # twice the title, kind, text and twice in the data: never rendered again
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    assert json.loads(found[1]) == {NASTY: [NASTY, 1.5, None]}


def test_the_policy_allows_the_styles_and_scripts_of_the_page_alone(folder: Path):
    page = html.page(folder, "page.html", styles=["page.css"], scripts=["page.js"], kind="", title="", text="", data=0)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    inside = re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", page, re.DOTALL)
    assert len(inside) == 4  # the style, two scripts of every page, and its own
    assert inside[0].endswith("p { color: red; }")
    assert inside[-1] == 'console.log("<p> & co");'
    digests = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in inside}
    assert set(re.findall(r"'sha256-[^']+'", policy[1])) == digests


def test_a_value_that_is_missing_or_not_json_is_an_error(folder: Path):
    with pytest.raises(UndefinedError, match="text"):
        html.page(folder, "page.html", kind="", title="", data=0)
    with pytest.raises(ValueError, match="not JSON compliant"):
        html.page(folder, "page.html", kind="", title="", text="", data=float("nan"))

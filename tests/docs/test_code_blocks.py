"""Code on the site has at most 88 columns, and is the same code."""

from __future__ import annotations

import ast
import runpy
import shlex
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
TOOL = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "tools" / "code_blocks.py"))
narrowed = TOOL["narrowed"]


def shown_in_prose(html: str) -> str:
    return TOOL["on_page_content"](html, page=None, config=None, files=None)


PYTHON = """handover = segue.replace_(model, segue.Plan(sites="blocks.*.attn"), total_steps=1000, first=1)  # it's # long
short = "# not a comment"  # a comment
"""
SHELL = """segue convert MODEL --sites 'a # b' --student 'WindowedLinear(window=64)' --data text.txt --out DIR  # it's the model
segue resume runs/small    # after a crash
# a comment of its own that is far too long for a line of eighty-eight columns, so that it has to continue below
"""


def block(kind: str, code: str) -> str:
    shown = narrowed(f"Before.\n\n```{kind}\n{code}```\nAfter.\n")
    assert shown.startswith(f"Before.\n\n```{kind}\n")
    assert shown.endswith("```\nAfter.\n")
    found = shown.partition(f"```{kind}\n")[2].rpartition("```")[0]
    assert max(map(len, found.splitlines())) <= 88
    return found


def test_python_is_formatted_and_stays_the_same():
    found = block("python", PYTHON)
    assert ast.dump(ast.parse(found)) == ast.dump(ast.parse(PYTHON))
    assert found.startswith("# it's # long\nhandover = ")


def test_a_command_continues_below_and_its_comment_moves_above():
    found = block("sh", SHELL)
    assert found.startswith("# it's the model\nsegue convert MODEL --sites 'a # b'")
    assert "segue resume runs/small    # after a crash\n" in found, "a short line stays as it is"
    commands = [line for line in found.replace("\\\n", " ").splitlines() if line.startswith("segue convert")]
    assert shlex.split(commands[0]) == shlex.split(SHELL.splitlines()[0].partition("  #")[0])


def test_what_fits_and_what_is_no_python_stay_as_they_are():
    fits = "```python\nimport segue  # as it is\nx = {'a':1}\n```\n"
    assert narrowed(fits) == fits
    broken = f"```python\nmodel = ({'1, ' * 40}\n```\n"
    assert narrowed(broken) == broken


def test_long_text_wraps_and_other_languages_stay_as_they_are():
    long = "a formula " * 10
    assert narrowed(f"```\n{long}\n```\n") == narrowed(f"```text\n{long}\n```\n") == f"```{{ .text .wrapped }}\n{long}\n```\n"
    formula = f"first:   y = T(h){' ' * 6}alpha = 1{' ' * 6}loss = a sum over all of the sites that the plan names"
    assert narrowed(f"```text\n{formula}\nnext\n```\n").splitlines()[1:4] == [
        "first:   y = T(h)      alpha = 1",
        "    loss = a sum over all of the sites that the plan names",
        "next",
    ]
    other = f"```toml\nx = 1\n```\nBetween.\n\n```json\n{long}\n```\n"
    assert narrowed(other) == other


def test_no_line_breaks_inside_an_option_or_before_a_percent_sign_but_in_paths():
    shown = shown_in_prose("<p>95 % <code>segue convert\n--lora RANK</code> tests/core/test_seam_in_a_model.py, a/b</p>")
    assert shown == (
        '<p>95\N{NO-BREAK SPACE}% <code>segue convert\n<span class="option">--lora</span> RANK</code> '
        "tests/<wbr>core/<wbr>test_<wbr>seam_<wbr>in_<wbr>a_<wbr>model.py, a/b</p>"
    )
    for other in ("<pre><code>a --lora 95 %</code></pre>", '<p>a -b <a href="x/tests/core/test_seam_in_a.py">c</a></p>'):
        assert shown_in_prose(other) == other

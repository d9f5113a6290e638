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

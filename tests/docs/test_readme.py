"""The front page: short, in the promised order, and its first code runs as pasted."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers.processes import run_python

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_it_is_one_page(record_property):
    record_property("figure", f"README: {len(README):,} characters (about 7,000 is the aim)")
    assert len(README) <= 7250


def test_it_says_things_in_the_order_that_a_newcomer_asks():
    parts = [
        "![",
        "## Install",
        "## A training loop",
        "segue convert",
        "## When",
        "## What",
        "## Measured",
        "## The paper",
        "## Guarantees",
        "## More",
    ]
    places = [README.index(part) for part in parts]
    assert places == sorted(places)
    assert README.index("make demo") < README.index("make test") < README.index("pip install")


@pytest.mark.processes
def test_its_first_code_runs_as_pasted_in_a_fresh_interpreter(tmp_path):
    """No conftest helps here: `import timm` works because the block imports Segue first."""
    done = run_python("-c", BLOCKS[0], cwd=tmp_path)
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) > 1
    assert all(0 < loss < 100 for loss in losses)


def test_every_command_of_the_makefile_that_it_names_exists():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", README, re.MULTILINE)) <= targets


def test_its_picture_and_its_words_have_the_same_numbers():
    saved = json.loads((ROOT / "docs" / "figures" / "readme-handover.json").read_text(encoding="utf-8"))
    found = re.findall(r"([0-9.]+) ± ([0-9.]+) %", README.partition("## Install")[0])
    written = [(f"{100 * mean:.1f}", f"{100 * half:.1f}") for mean, half in saved["final"].values()]
    assert found == written
    assert f"teacher {100 * saved['teacher']:.1f} %" in README

"""Every gate, schedule, guidance, method, operator and data source has its card; nothing else keeps a list of them."""

import re
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType

import pytest

import segue
from segue import data
from segue.students.attention.module import Operator

CARDS = Path(__file__).parents[2] / "docs" / "cards"
OPERATORS = [
    name
    for name in segue.students.__all__
    if isinstance(made := getattr(segue.students, name), type) and issubclass(made, Operator)
]
PAGES = {"gates.md": segue.gates, "schedules.md": segue.schedules, "guidance.md": segue.losses, "data.md": data}


def built_ins(room: ModuleType) -> list[str]:
    """Return the classes of a room that do something with their settings, such as `Blend`."""
    made = {name: kind for name, kind in vars(room).items() if not name.startswith("_") and is_dataclass(kind)}
    own = {name: kind for name, kind in made.items() if kind.__module__.startswith(room.__name__)}
    return [
        name for name, kind in own.items() if hasattr(kind, "load") or any("__call__" in vars(base) for base in kind.__mro__)
    ]


@pytest.mark.parametrize("method", segue.methods.ALL)
def test_every_method_has_a_card_that_calls_it(method):
    assert f"segue.methods.{method}(" in (CARDS / f"{method}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_has_a_card_that_calls_it(operator):
    assert f"segue.students.{operator}(" in (CARDS / f"{operator}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_every_built_in_has_a_section_on_its_page(page):
    sections = re.findall(r"^## (\w+)$", (CARDS / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert set(sections) == set(built_ins(PAGES[page]))


def test_every_card_is_of_something_that_exists():
    of_one = {path.stem for path in CARDS.glob("*.md")} - {"README", *(page.removesuffix(".md") for page in PAGES)}
    assert of_one == {*segue.methods.ALL, *OPERATORS}

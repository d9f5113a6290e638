"""Palette: one colour, dash and marker per method, the same in every figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from zlib import crc32

from segue.errors import MissingExtraError

PAPER = ("student_only", "distillation", "theseus", "theseus_gumbel", "gumbel_dfg", "dcr", "dcr_dfg")


@dataclass(frozen=True)
class LineStyle:
    """How one method is drawn: colours on light and dark backgrounds, dashes in line widths, a marker of matplotlib."""

    light: str
    dark: str
    dash: tuple[float, ...]  # () is a solid line
    marker: str


# found by search, measured by the tests: any two differ for protanopes and deuteranopes too, all contrast with the background
GREY = ("#404040", "#808080")
ORANGE = ("#d06417", "#ffb12d")
TEAL = ("#129e65", "#18ef97")
CYAN = ("#0390fc", "#3fa8fe")
MAGENTA = ("#db219c", "#f09bc7")
BLUE = ("#0b3bd1", "#4a74f7")
RED = ("#86200b", "#e8352e")
PURPLE = ("#3a1055", "#a04aa8")  # for an eighth method

OWN = {
    "student_only": LineStyle(*GREY, (1, 1.4), "s"),
    "distillation": LineStyle(*ORANGE, (2.4, 1.4), "D"),
    "theseus": LineStyle(*TEAL, (4.5, 1.8), "^"),
    "theseus_gumbel": LineStyle(*CYAN, (5, 1.5, 1, 1.5), "v"),
    "gumbel_dfg": LineStyle(*MAGENTA, (5, 1.3, 1, 1.3, 1, 1.3), "P"),
    "dcr": LineStyle(*BLUE, (8, 2), "o"),
    "dcr_dfg": LineStyle(*RED, (), "X"),
}
COLOURS = (BLUE, ORANGE, TEAL, MAGENTA, GREY, CYAN, RED, PURPLE)
DASHES = ((3, 1, 3, 3), (6, 1, 2, 1), (1, 2.5), (10, 1.5, 1, 1.5), (3.5, 1, 1, 1, 1, 1, 1, 1), (2, 3), (12, 4))
MARKERS = ("<", ">", "h", "p", "*", "d", "8")
# for others where all of theirs are taken
PAPER_COLOURS = tuple(style.light for style in OWN.values())
PAPER_DASHES = tuple(style.dash for style in OWN.values())
PAPER_MARKERS = tuple(style.marker for style in OWN.values())
OTHERS = [
    LineStyle(*colours, dash, marker)
    for colours, dash, marker in product(COLOURS, (*DASHES, *PAPER_DASHES), (*MARKERS, *PAPER_MARKERS))
]


def in_order(methods: Iterable[str]) -> list[str]:
    """Sort methods in the paper's order; those that it does not have follow by name."""
    return sorted(methods, key=lambda name: (PAPER.index(name) if name in PAPER else len(PAPER), name))


def line_styles(methods: Iterable[str]) -> dict[str, LineStyle]:
    """Give every method its style: what its name chooses, except where another one would share more with those before.

    Fourteen methods have fourteen dashes and fourteen markers, and no three of them a colour.
    """
    given: dict[str, LineStyle] = {}
    for name in in_order(methods):
        given[name] = OWN[name] if name in OWN else _another(name, list(given.values()))
    return given


def _another(name: str, given: Sequence[LineStyle]) -> LineStyle:
    """Choose the style that is least like those given; where several are, the name chooses."""
    colours, dashes, markers = (Counter(getattr(style, part) for style in given) for part in ("light", "dash", "marker"))

    def shared(style: LineStyle) -> tuple[int, ...]:
        of_paper = (style.light in PAPER_COLOURS) + (style.dash in PAPER_DASHES) + (style.marker in PAPER_MARKERS)
        return given.count(style), colours[style.light], dashes[style.dash] + markers[style.marker], of_paper

    place = crc32(name.encode()) % len(OTHERS)
    return min(OTHERS[place:] + OTHERS[:place], key=shared)


def require_matplotlib() -> None:
    """Raise an error that names the extra where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "a figure needs matplotlib.", "matplotlib is not installed.", "pip install segue[lab]"
        ) from None

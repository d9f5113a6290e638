"""Palette: one colour, dash and marker per method, the same in every figure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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

OWN = {
    "student_only": LineStyle(*GREY, (1, 1.4), "s"),
    "distillation": LineStyle(*ORANGE, (2.4, 1.4), "D"),
    "theseus": LineStyle(*TEAL, (4.5, 1.8), "^"),
    "theseus_gumbel": LineStyle(*CYAN, (5, 1.5, 1, 1.5), "v"),
    "gumbel_dfg": LineStyle(*MAGENTA, (5, 1.3, 1, 1.3, 1, 1.3), "P"),
    "dcr": LineStyle(*BLUE, (8, 2), "o"),
    "dcr_dfg": LineStyle(*RED, (), "X"),
}
COLOURS = (BLUE, ORANGE, TEAL, MAGENTA, GREY, CYAN, RED)
DASHES = ((3, 1, 3, 3), (6, 1, 2, 1), (1, 2.5), (10, 1.5, 1, 1.5), (3.5, 1, 1, 1, 1, 1, 1, 1), (2, 3))
MARKERS = ("<", ">", "h", "p", "*", "d", "8")


def in_order(methods: Iterable[str]) -> list[str]:
    """Sort methods in the paper's order; those that it does not have follow by name."""
    return sorted(methods, key=lambda name: (PAPER.index(name) if name in PAPER else len(PAPER), name))


def line_styles(methods: Iterable[str]) -> dict[str, LineStyle]:
    """Give every method its style: it depends on the name alone, except where two names would get the same one."""
    others = [
        LineStyle(*COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)], MARKERS[(i // len(COLOURS)) % len(MARKERS)])
        for i in range(len(COLOURS) * len(DASHES) * len(MARKERS))
    ]
    given: dict[str, LineStyle] = {}
    for name in in_order(methods):
        place = crc32(name.encode())
        while (style := OWN.get(name, others[place % len(others)])) in given.values() and len(given) < len(others):
            place += 1
        given[name] = style
    return given


def require_matplotlib() -> None:
    """Raise an error that names the extra where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "a figure needs matplotlib.", "matplotlib is not installed.", "pip install segue[lab]"
        ) from None

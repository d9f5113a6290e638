"""Palette: one colour, dash and marker per method, the same in every figure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from zlib import crc32

PAPER = ("student_only", "distillation", "theseus", "theseus_gumbel", "gumbel_dfg", "dcr", "dcr_dfg")


@dataclass(frozen=True)
class Look:
    """How one method is drawn: colours for light and dark paper, dashes in line widths, a marker of matplotlib."""

    light: str
    dark: str
    dash: tuple[float, ...]  # () is a whole line
    marker: str


# searched for, and measured by the tests: every two stay apart for protanopes and deuteranopes too, all stand out from paper
GREY = ("#404040", "#808080")
ORANGE = ("#d06417", "#ffb12d")
TEAL = ("#129e65", "#18ef97")
CYAN = ("#0390fc", "#3fa8fe")
MAGENTA = ("#db219c", "#f09bc7")
BLUE = ("#0b3bd1", "#4a74f7")
RED = ("#86200b", "#e8352e")

OWN = {
    "student_only": Look(*GREY, (1, 1.4), "s"),
    "distillation": Look(*ORANGE, (2.4, 1.4), "D"),
    "theseus": Look(*TEAL, (4.5, 1.8), "^"),
    "theseus_gumbel": Look(*CYAN, (5, 1.5, 1, 1.5), "v"),
    "gumbel_dfg": Look(*MAGENTA, (5, 1.3, 1, 1.3, 1, 1.3), "P"),
    "dcr": Look(*BLUE, (8, 2), "o"),
    "dcr_dfg": Look(*RED, (), "X"),
}
COLOURS = (BLUE, ORANGE, TEAL, MAGENTA, GREY, CYAN, RED)
DASHES = ((3, 1, 3, 3), (6, 1, 2, 1), (1, 2.5), (10, 1.5, 1, 1.5), (3.5, 1, 1, 1, 1, 1, 1, 1), (2, 3))
MARKERS = ("<", ">", "h", "p", "*", "d", "8")


def in_order(methods: Iterable[str]) -> list[str]:
    """Order methods as the paper does, those it does not have by name."""
    return sorted(methods, key=lambda name: (PAPER.index(name) if name in PAPER else len(PAPER), name))


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """Give every method its look: it depends on the name alone, save where two names would get the same one."""
    others = [
        Look(*COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)], MARKERS[(i // len(COLOURS)) % len(MARKERS)])
        for i in range(len(COLOURS) * len(DASHES) * len(MARKERS))
    ]
    given: dict[str, Look] = {}
    for name in in_order(methods):
        place = crc32(name.encode())
        while (look := OWN.get(name, others[place % len(others)])) in given.values() and len(given) < len(others):
            place += 1
        given[name] = look
    return given

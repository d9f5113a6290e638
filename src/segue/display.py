"""What a terminal and a notebook show of an object: one table, as text, Markdown and HTML; figures without global state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import compress
from typing import Any

from segue.errors import MissingExtraError, printable

MOST_ROWS = 12  # of a table in a terminal


@dataclass(frozen=True)
class Table:
    """Rows under headings, with a line above and notes below."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Leave columns out that are empty in every row."""
        used = [any(column) for column in zip(*self.rows, strict=True)] or [True] * len(self.headings)
        object.__setattr__(self, "headings", [*compress(self.headings, used)])
        object.__setattr__(self, "rows", [[*compress(row, used)] for row in self.rows])

    def text(self) -> str:
        r"""Align the columns; of many rows only the first and last are shown.

        >>> print(Table("two", ("site", "alpha"), [("blocks.0", "1"), ("head", "0.5")]).text())
        two
          site      alpha
          blocks.0  1
          head      0.5
        """
        rows = [*self.rows]
        if len(rows) > MOST_ROWS:
            half = MOST_ROWS // 2
            rows = [*rows[:half], ("...", *[""] * (len(self.headings) - 1)), *rows[-half:]]
        lines = [self.headings, *rows] if rows else []
        widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
        aligned = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return printable("\n".join([self.title, *(f"  {line}".rstrip() for line in aligned), *(f"  {n}" for n in self.notes)]))

    def markdown(self) -> str:
        """Write a table of GitHub's Markdown."""
        cells = [
            [cell.replace("|", "\\|") for cell in line] for line in (self.headings, ["---"] * len(self.headings), *self.rows)
        ]
        lines = ["| " + " | ".join(line) + " |" for line in cells] if self.rows else []
        return printable("\n".join([f"**{self.title}**", "", *lines, "", "\n\n".join(self.notes)]).rstrip())

    def html(self) -> str:
        """Write a table of HTML in the notebook's own style."""

        def row(kind: str, cells: Iterable[str]) -> str:
            left = ' style="text-align:left"'
            return "<tr>" + "".join(f"<{kind}{left}>{escape(printable(cell))}</{kind}>" for cell in cells) + "</tr>"

        body = "".join(row("td", cells) for cells in self.rows)
        table = f"<table><thead>{row('th', self.headings)}</thead><tbody>{body}</tbody></table>" if self.rows else ""
        notes = "".join(f"<p>{escape(printable(note))}</p>" for note in self.notes)
        return f"<div><p><strong>{escape(printable(self.title))}</strong></p>{table}{notes}</div>"


class Shown:
    """Show an object in a notebook by the table that it makes of itself."""

    def _table(self) -> Table:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return self._table().html()

    def _repr_markdown_(self) -> str:
        return self._table().markdown()


def pandas(what: str) -> Any:
    """Import pandas, or say what to install."""
    try:
        import pandas
    except ImportError:
        raise MissingExtraError(f"{what} needs pandas.", "It is not installed.", "pip install pandas") from None
    return pandas


def picture(what: str, *, height: float = 3.2) -> Any:
    """Return an empty figure that a notebook shows by itself, or say what to install."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError(f"{what} needs matplotlib.", "It is not installed.", "pip install matplotlib") from None

    class Picture(Figure):
        """A figure outside of pyplot: nobody has to close it, and the notebook shows what the last line of a cell returns."""

        def _repr_png_(self) -> bytes:
            from io import BytesIO

            written = BytesIO()
            self.savefig(written, format="png", dpi=120)
            return written.getvalue()

    return Picture(figsize=(6.4, height), layout="constrained")

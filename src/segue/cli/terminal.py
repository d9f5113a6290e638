"""The terminal: text is shown as it is, never obeyed, and never cut: a narrow terminal gets fewer columns of a table."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from segue.errors import SegueError, printable

WHOLE = 100_000  # columns of a file or a pipe: nothing is wrapped there


class PlainConsole(Console):
    """A console for names that anybody may have chosen: of modules, sites, runs, files."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    @property  # type: ignore[misc]  # nobody sets it
    def size(self) -> ConsoleDimensions:
        """The size of the terminal; files and pipes have no end."""
        isatty = getattr(self.file, "isatty", None)
        endless = self._force_terminal is None and not (isatty is not None and isatty())
        return ConsoleDimensions(WHOLE, super().size.height) if endless else super().size

    @property  # type: ignore[misc]
    def width(self) -> int:
        """The width of the terminal."""
        return self.size.width

    def render_str(self, text: str, **settings: Any) -> Text:
        """Write control characters out before a table measures its cells."""
        return super().render_str(printable(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Write out those of styled text too; rich's own codes are apart from the text. A table keeps its words whole."""
        omitted: list[str] = []
        if isinstance(renderable, Table):
            renderable, omitted = _fitted(renderable, self, (options or self.options).max_width)
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
        if omitted:
            yield from self.render(Text(f"Not shown for want of width: {', '.join(omitted)}.", style="dim"), options)


def _fitted(table: Table, console: Console, width: int) -> tuple[Table, list[str]]:
    """Return the table with as many of its first columns as the width has room for, and the names of the others."""
    plain = console.options.update(width=WHOLE)
    needs = []
    for column in table.columns:
        cells = [Measurement.get(console, plain, cell) for cell in (column.header, *column.cells)]
        whole = max(cell.maximum for cell in cells)
        needs.append((whole if column.no_wrap else max(cell.minimum for cell in cells), whole))
    count = len(needs)
    while count > 1 and sum(least for least, _ in needs[:count]) > width - _frame(table, count):
        count -= 1
    made = copy.copy(table)
    made.columns = [copy.copy(column) for column in table.columns[:count]]
    for column, given in zip(made.columns, _shared(needs[:count], width - _frame(table, count)), strict=True):
        column.width, column.overflow, column.no_wrap = given, "fold", False  # so wide that it only breaks between words
    return made, [_plain(column.header) for column in table.columns[count:]]


def _frame(table: Table, columns: int) -> int:
    """Return the width of lines and padding."""
    sides = 0 if table.box is None else columns - 1 + 2 * table.show_edge
    return sides + sum(table.padding[1::2]) * columns


def _shared(needs: list[tuple[int, int]], width: int) -> list[int]:
    """Give every column the width of its longest word, and share what is left by what each could use."""
    spare = width - sum(least for least, _ in needs)
    if spare < 0:  # the first column alone is wider than the terminal, and goes on in the next line
        return [max(1, width)]
    wanted = sum(whole - least for least, whole in needs)
    part = min(1.0, spare / wanted) if wanted else 0.0
    return [least + int((whole - least) * part) for least, whole in needs]


def _plain(header: RenderableType) -> str:
    return header.plain if isinstance(header, Text) else str(header)


console = PlainConsole()


def say(text: str) -> None:
    """Print a sentence, whatever its length, as it is."""
    console.print(text, soft_wrap=True, highlight=False)


def say_aside(text: str) -> None:
    """Print a sentence on stderr: stdout holds JSON."""
    PlainConsole(stderr=True).print(text, soft_wrap=True, highlight=False)


def print_json(value: Any) -> None:
    """Print data for another program, and nothing else, on stdout."""
    say(json.dumps(value, default=str))


@contextmanager
def resumed_by(*words: object) -> Iterator[None]:
    """Name the command, by its words, that resumes if the work is interrupted."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        say_aside(f"To resume: {command_line(*words)}")
        raise


def command_line(*words: object) -> str:
    """Write a command of Segue as a shell takes it."""
    return shlex.join(["segue", *map(str, words)])


def show_error(error: SegueError) -> None:
    """Print an error in three lines: what is wrong, what was found, what to do."""
    first, *rest = str(error).splitlines()
    output = PlainConsole(stderr=True)
    output.print(Text.assemble((type(error).__name__, "bold red"), f": {first}"), soft_wrap=True)
    for line in rest:
        output.print(line, soft_wrap=True)

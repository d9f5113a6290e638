"""Figures: PNG and PDF at the width of a paper's column, drawn with matplotlib from a summary of saved runs."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from segue.lab.report.heat import heat_figures
from segue.lab.report.panels import Panel, group_figures
from segue.lab.report.summary import Group, Summary
from segue.lab.report.tables import MARKS
from segue.reporting.formatting import counted, listed, shortened, significant
from segue.reporting.palette import LineStyle, line_styles, require_matplotlib

WIDTH = 3.3  # inches: a column of a two-column paper
FAINT = (1, 1.6)  # dashes of a second curve
LEFT, RIGHT, BOTTOM, TOP, GAP = 0.52, 0.08, 0.38, 0.06, 0.3
PANEL = 1.25
LEGEND_ROW = 0.135
NOTE_ROW, NOTE_LETTERS = 0.13, 62
FONT = 7
SETTINGS: Any = {
    "font.size": FONT,
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same everywhere
    "axes.titlesize": FONT,
    "axes.labelsize": FONT,
    "xtick.labelsize": FONT,
    "ytick.labelsize": FONT,
    "legend.fontsize": FONT,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.2,
    "pdf.fonttype": 42,  # text stays text, as publishers require
    "text.parse_math": False,  # a dollar sign in a label is a dollar sign
    "axes.formatter.use_mathtext": False,
}


def draw(summary: Summary, folder: Path) -> list[Path]:
    """Draw every figure of a summary as PNG and PDF."""
    require_matplotlib()
    style_of = line_styles(name for name, _ in summary.methods)
    paths = []
    for group, suffix in zip(summary.groups, _suffixes([group.name for group in summary.groups]), strict=True):
        for name, panels in group_figures(group, summary, style_of).items():
            if any(panel.lines for panel in panels):
                paths += write(folder, f"{name}{suffix}", lambda p=panels, g=group: _figure(p, _seeds_note(g)))  # type: ignore[misc]
        for name, drawing in heat_figures(
            group, _seeds_note(group).replace("mean and 95 % interval over", "mean over")
        ).items():
            paths += write(folder, f"{name}{suffix}", drawing)
    if summary.groups:
        paths += write(folder, "groups", lambda: _heat_table(summary))
    return paths


def _figure(panels: list[Panel], note: str) -> Any:
    from matplotlib.figure import Figure

    panels = [panel for panel in panels if panel.lines]
    fullest_first = sorted(panels, key=lambda panel: -len(panel.lines))  # it has all methods, in order
    entries = {line.style: line.label for panel in fullest_first for line in panel.lines if not line.faint}
    columns = 2 if all(len(label) <= 22 for label in entries.values()) and len(entries) > 1 else 1
    legend_height = LEGEND_ROW * -(-len(entries) // columns) + 0.02
    titles = [0.14 if panel.title else 0.0 for panel in panels]
    same_x = len({panel.x_label for panel in panels}) == 1
    gaps = [BOTTOM if not same_x or i == len(panels) - 1 else 0.12 for i in range(len(panels))]
    notes = textwrap.wrap("; ".join([note, *_zeros(panels)]), NOTE_LETTERS)
    note_height = 0.03 + NOTE_ROW * len(notes)
    height = TOP + legend_height + sum(PANEL + title + gap for title, gap in zip(titles, gaps, strict=True)) + note_height
    figure = Figure(figsize=(WIDTH, height))
    top = height - TOP - legend_height
    for index, (panel, title, gap) in enumerate(zip(panels, titles, gaps, strict=True)):
        top -= title
        box = (LEFT / WIDTH, (top - PANEL) / height, (WIDTH - LEFT - RIGHT) / WIDTH, PANEL / height)
        _fill(figure.add_axes(box), panel, show_x=not same_x or index == len(panels) - 1)
        top -= PANEL + gap
    legend(figure, entries, columns, 1 - TOP / height)
    figure.text(0.02, 0.05 / height, "\n".join(notes), color="#555555", fontsize=FONT, linespacing=1.2)
    return figure


def _zeros(panels: list[Panel]) -> list[str]:
    """Name what a logarithmic axis cannot show."""
    lines = [[y for y in line.mean if y is not None] for panel in panels if _logarithmic(panel) for line in panel.lines]
    names = dict.fromkeys(
        line.label for panel in panels if _logarithmic(panel) for line in panel.lines if not line.faint and not any(line.mean)
    )
    some = any(y <= 0 for means in lines if any(means) for y in means)
    return ["values of 0 and below are not shown"] * some + ([f"0 throughout: {listed(list(names))}"] if names else [])


def _fill(axes: Any, panel: Panel, *, show_x: bool) -> None:
    logarithmic = _logarithmic(panel)
    for index, line in enumerate(panel.lines):
        points = zip(line.x, line.mean, line.half, strict=True)
        known = [(x, y, half) for x, y, half in points if y is not None and (y > 0 or not logarithmic)]
        x = [point[0] for point in known]
        every = max(1, len(x) // 6)
        axes.plot(
            x,
            [point[1] for point in known],
            color=line.style.light,
            linestyle=(0, FAINT) if line.faint else (0, line.style.dash) if line.style.dash else "-",
            linewidth=0.7 if line.faint else 1.1,
            marker="" if line.faint else line.style.marker,
            markevery=(index * max(1, every // 4) % every, every) if len(x) > 1 else 1,
            markeredgewidth=0,
            zorder=3,
        )
        if line.marks:
            bottom = {"transform": axes.get_xaxis_transform(), "clip_on": False, "linestyle": "", "zorder": 4}
            axes.plot(line.marks, [0.0] * len(line.marks), marker="|", markersize=7, color=line.style.light, **bottom)
        banded = [(x, y - half, y + half) for x, y, half in known if half is not None]
        if banded and not line.faint:
            axes.fill_between(*zip(*banded, strict=True), color=line.style.light, alpha=0.13, linewidth=0, zorder=2)
    _scale_y(axes, panel)
    if panel.reference is not None:
        axes.axhline(panel.reference, color="#222222", linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
        place = ("right", 1.0) if panel.lines else ("left", 0.0)
        axes.annotate(
            panel.reference_name, (place[1], panel.reference), xycoords=("axes fraction", "data"), ha=place[0], va="bottom",
            xytext=(0, 1), textcoords="offset points", color="#222222",
        )  # fmt: skip
    if panel.ticks is not None:
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    else:
        axes.locator_params(axis="x", nbins=6)
    axes.set_title(panel.title, loc="left", pad=2, color="#333333")
    axes.set_ylabel(f"{panel.y_label}, log" if logarithmic else panel.y_label)
    axes.set_xlabel(panel.x_label if show_x else "")
    axes.tick_params(labelbottom=show_x, length=2, pad=2)
    axes.yaxis.set_label_coords(-0.4 / (WIDTH - LEFT - RIGHT), 0.5)
    axes.margins(x=0.02)


def _scale_y(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    means = [value for line in panel.lines for value in line.mean if value is not None]
    if _logarithmic(panel):
        positive = [value for value in [*means, panel.reference or 0.0] if value > 0]
        axes.set_yscale("log", nonpositive="clip")
        name_above = 1.0 if panel.reference is None else (max(positive) / min(positive)) ** 0.1
        axes.set_ylim(min(positive) / 1.6, max(positive) * 1.6 * name_above)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(positive) < 60 * min(positive) else (1, 3)))
        axes.yaxis.set_major_formatter(lambda value, _: significant(value))
        axes.yaxis.set_minor_formatter(NullFormatter())
        return
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    elif panel.bottom is not None and means:
        top = max([*means, panel.reference or 0.0])
        axes.set_ylim(panel.bottom, 1.13 * top if top > panel.bottom else panel.bottom + 1)
    elif panel.log and means:
        top = max([*means, panel.reference or 0.0])
        axes.set_ylim(min(0.0, *means), 1.15 * top if top > 0 else 1.0)


def _logarithmic(panel: Panel) -> bool:
    means = [value for line in panel.lines for value in line.mean if value is not None]
    positive = [value for value in [*means, panel.reference or 0.0] if value > 0]
    return panel.log and bool(positive) and max(positive) > 30 * min(positive)


def legend(figure: Any, entries: dict[LineStyle, str], columns: int, top: float) -> None:
    """Draw the legend of a figure at its top."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [], [], color=style.light, linestyle=(0, style.dash) if style.dash else "-", marker=style.marker, markeredgewidth=0
        )
        for style in entries
    ]
    most = 24 if columns == 2 else 44
    names = [f" {text}" if (text := shortened(label, most)).startswith("_") else text for label in entries.values()]
    figure.legend(
        handles,
        names,
        loc="upper left",
        bbox_to_anchor=(0.02, top),
        ncols=columns,
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        handlelength=3.2,
        labelspacing=0.25,
        columnspacing=1.2,
    )


def _heat_table(summary: Summary) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    rows, groups = summary.methods, summary.groups
    label_width, cell_width, row_height = 1.15, max(0.78, (WIDTH - 1.15 - 0.05) / len(groups)), 0.3
    letters = int(cell_width / 0.065)
    names = [
        textwrap.wrap(shortened(group.name, 4 * letters), letters, max_lines=4, placeholder="…") or [""] for group in groups
    ]
    head = max(row_height, 0.1 + 0.13 * max(len(lines) for lines in names))
    width = label_width + cell_width * len(groups) + 0.05
    height = row_height * len(rows) + head + 0.42
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    for column, group in enumerate(groups):
        left = label_width + column * cell_width
        axes.text(
            left + cell_width / 2, height - head / 2, "\n".join(names[column]), ha="center", va="center", fontweight="bold"
        )
        means = [method.final.mean for method in group.methods if method.final]
        for row, (name, _) in enumerate(rows):
            bottom = height - head - row_height * (row + 1)
            method = group.method(name)
            best = method is not None and method.standing["final"] == "best"
            found = method.final if method else None
            shade = 0.0 if found is None or max(means) == min(means) else (found.mean - min(means)) / (max(means) - min(means))
            colour = tuple(1 - shade * (1 - part) * 0.75 for part in (0.45, 0.66, 0.86)) if found else (0.96,) * 3
            axes.add_patch(Rectangle((left, bottom), cell_width, row_height, facecolor=colour, edgecolor="white", linewidth=1))
            text = summary.score_format.estimate(found).replace(" %", "")
            mark = MARKS[method.standing["final"]] if method else ""
            axes.text(
                left + cell_width / 2, bottom + row_height / 2, f"{text}\n{mark}" if mark else text, ha="center", va="center",
                fontweight="bold" if best else "normal", linespacing=0.95,
            )  # fmt: skip
    for row, (_, label) in enumerate(rows):
        axes.text(0.04, height - head - row_height * (row + 0.5), shortened(label, 20), va="center")
    axes.text(0.04, height - head / 2, f"final {groups[0].score}{' (%)' if summary.score_format.percent else ''}", va="center")
    axes.text(0.04, 0.26, "± half of the 95 % interval over seeds", color="#555555", va="center")
    axes.text(0.04, 0.11, "≈ best: not distinguishable from the best", color="#555555", va="center")
    return figure


def write(folder: Path, name: str, draw: Callable[[], Any]) -> list[Path]:
    """Draw a figure and write it as PNG and PDF."""
    folder.mkdir(parents=True, exist_ok=True)
    with settings():
        figure = draw()
        paths = [folder / f"{name}.png", folder / f"{name}.pdf"]
        figure.savefig(paths[0], dpi=300, metadata={"Software": None})
        figure.savefig(paths[1], metadata={"CreationDate": None, "Producer": None})  # the same runs give the same file
    return paths


@contextmanager
def settings() -> Iterator[None]:
    """Draw with the settings of the report, whatever those of the process are."""
    import matplotlib

    with warnings.catch_warnings(), matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        warnings.filterwarnings("ignore", message=".*[Gg]lyph")  # a label may have characters that the font lacks
        yield


def _suffixes(names: list[str]) -> list[str]:
    if len(names) == 1:
        return [""]
    found: list[str] = []
    for name in names:
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", name.replace("%", " percent ")).strip("-.")[:40] or "group"
        while f"-{slug}" in found:
            slug += "-again"
        found.append(f"-{slug}")
    return found


def _seeds_note(group: Group) -> str:
    counts = sorted({len(method.seeds) for method in group.methods})
    if counts == [1]:
        return "one seed: no interval"
    seeds = counted(counts[0], "seed") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    return f"mean and 95 % interval over {seeds}" + ("; one seed: no interval" if counts[0] == 1 else "")

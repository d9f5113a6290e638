"""Build the paper's figures 1 and 2 and its Table 1 from committed results, as PDF and LaTeX.

Command:  python -m experiments.paper_figures    (writes into this folder; --results FOLDER for others, --out DIR)

Figures are of CIFAR-100, the paper's data; the table is of digits, where the variances of gradients are measured. Figure 2 over
time (figure2_time.pdf) is of runs that had the machine for themselves.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.evidence.judges import ALONE, FOLDERS, Place, places_of
from experiments.evidence.measures import shown_sites
from segue.lab.report import figures, table_one
from segue.lab.report.curves import Line, gather
from segue.reporting import palette, records

HERE = Path(__file__).parent
SHOWN = (*palette.PAPER, "halo", "local_fit")  # the paper's seven, and two local fits
STYLES = palette.line_styles(SHOWN)
WIDTH, HEIGHT = 6.75, 1.9  # inches: the width of a page
SPECIAL = str.maketrans({"%": r"\%", "&": r"\&", "_": r"\_", "±": r"$\pm$", "“": "``", "”": "''"})


def lines_of(place: Place) -> dict[str, Line]:
    """Return the curves of the shown arms that a place has."""
    found = {name: list(place.arms[name].values()) for name in SHOWN if name in place.arms}
    return {name: gather(runs, shown_sites(runs[0])) for name, runs in found.items()}


def labels_of(place: Place) -> dict[str, str]:
    """Return what legends call the arms."""
    return {name: next(iter(runs.values())).run_info.label for name, runs in place.arms.items()}


def cosine_figure(place: Place) -> Any:
    """Draw figure 1: interface cosine over epochs at three blocks."""
    lines = lines_of(place)
    sites = shown_sites(next(iter(place.arms[next(iter(lines))].values())))
    drawn, panels = _panels(len(sites), place, list(lines))
    for axes, site in zip(panels, sites, strict=True):
        for name, line in lines.items():
            _draw(axes, line.epoch, line.by_site["cosine"][site], name)
        axes.set_title(site, loc="left", pad=2)
        axes.set_xlabel("epoch")
        axes.set_ylim(-0.1, 1.02)
    panels[0].set_ylabel("interface cosine")
    return drawn


def accuracy_figure(place: Place, along: Sequence[str] = ("epoch", "flops")) -> Any:
    """Draw figure 2: the score of the students alone over epochs, operations, or seconds."""
    lines = lines_of(place)
    runs = [run for name in lines for run in place.arms[name].values()]
    drawn, panels = _panels(len(along), place, list(lines))
    for axes, axis in zip(panels, along, strict=True):
        scale, label = {"epoch": (1, "epoch"), "flops": (1e12, "TFLOPs, teachers included"), "seconds": (1, "seconds")}[axis]
        for name, line in lines.items():
            _draw(axes, [value / scale for value in getattr(line, axis)], line.overall["students"], name)
        axes.axhline(place.teacher_eval, color="#222222", linewidth=0.8, linestyle=(0, (4, 2)))
        axes.set_xlabel(label)
    place_of_name = {"xycoords": ("axes fraction", "data"), "xytext": (0, 2), "textcoords": "offset points"}
    panels[0].annotate("teacher", (1.0, place.teacher_eval), ha="right", va="bottom", **place_of_name)
    panels[0].set_ylabel(f"{runs[0].train_info.score}, students alone")
    return drawn


def _panels(count: int, place: Place, names: list[str]) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    rows = -(-len(names) // 4)
    drawn = Figure(figsize=(WIDTH, HEIGHT + 0.16 * rows), layout="constrained")
    panels = list(drawn.subplots(1, count, sharey=True))
    labels = labels_of(place)
    handles = [panels[0].plot([], [], color=STYLES[name].light, **_dash(STYLES[name]))[0] for name in names]
    drawn.legend(handles, [labels[name] for name in names], loc="outside upper left", ncols=4, frameon=False)
    return drawn, panels


def _draw(axes: Any, x: list[float], curve: Any, name: str) -> None:
    style = STYLES[name]
    known = [(a, mean, half or 0.0) for a, mean, half in zip(x, curve.mean, curve.half, strict=True) if mean is not None]
    if not known:
        return
    places, means, halves = zip(*known, strict=True)
    axes.plot(places, means, color=style.light, **_dash(style))
    low, high = ([m + side * h for m, h in zip(means, halves, strict=True)] for side in (-1, 1))
    axes.fill_between(places, low, high, color=style.light, alpha=0.13, linewidth=0)


def _dash(style: palette.LineStyle) -> dict[str, Any]:
    dash = (0, style.dash) if style.dash else "-"
    return {
        "linestyle": dash,
        "linewidth": 1.1,
        "marker": style.marker,
        "markersize": 3,
        "markeredgewidth": 0,
        "markevery": 0.2,
    }


def table(place: Place) -> str:
    """Write Table 1 in LaTeX, measured, with the paper's words where it has any and whether they hold."""
    labels = labels_of(place)
    rows = []
    for name in (name for name in SHOWN if name in place.arms):
        runs = list(place.arms[name].values())
        row = table_one.measure(runs, runs[0].train_info.sites)
        cells = [labels[name]]
        for aspect in table_one.ASPECTS:
            claim = aspect.claims.get(name)
            said = f" (“{claim.partition(' ')[0]}”: {aspect.verdict(row, claim)})" if claim else ""
            cells.append(f"{aspect.measured(row)}{said}")
        rows.append(" & ".join(cell.translate(SPECIAL) for cell in cells) + r" \\")
    heads = " & ".join(["Method", *(aspect.heading for aspect in table_one.ASPECTS)])
    return "\n".join(
        [r"\begin{tabular}{llll}", r"\toprule", rf"{heads} \\", r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", ""]
    )


def place_in(results: Path) -> Place:
    """Return the group of some results that has the paper's methods, or the first."""
    places = places_of(results.name, records.read_all(results))
    return next((place for place in places if place.has("dcr", "theseus")), places[0])


def build(results: Path, variances: Path, out: Path) -> list[Path]:
    """Write the figures of some results and the table of others; return their files."""
    place = place_in(results)
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    with figures.settings():
        drawn = {"figure1": cosine_figure(place), "figure2": accuracy_figure(place)}
        if FOLDERS[ALONE].is_dir():
            drawn["figure2_time"] = accuracy_figure(place_in(FOLDERS[ALONE]), ("epoch", "seconds"))
        for name, figure in drawn.items():
            paths.append(out / f"{name}.pdf")
            figure.savefig(paths[-1], metadata={"CreationDate": None, "Producer": None})  # the same runs, the same file
    paths.append(records.write_file(table(place_in(variances)), out / "table1.tex"))
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=FOLDERS["cifar100"], help="Packed results, for the figures.")
    parser.add_argument("--variances", type=Path, default=FOLDERS["digits"], help="Packed results, for the table.")
    parser.add_argument("--out", type=Path, default=HERE, help="Folder of the figures and the table.")
    options = parser.parse_args()
    for path in build(options.results, options.variances, options.out):
        print(path)


if __name__ == "__main__":
    main()

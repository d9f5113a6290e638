"""The figures and tables of docs/results.md, from the committed results.

Command:  python -m experiments.evidence.page    (docs/figures/evidence-*.png, and what stands between the page's two markers)
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from experiments.evidence.arms import OURS
from experiments.evidence.judges import ALONE, PROTOCOL, RECIPES, ROOT, Evidence, Place, best_published
from experiments.evidence.measures import FINAL, Runs, work
from segue.lab.report import figures
from segue.lab.report.curves import Line, gather
from segue.lab.report.tables import as_table
from segue.reporting import records
from segue.reporting.formatting import NOTHING, duration, flops, interval, work_unit
from segue.reporting.palette import line_styles
from segue.reporting.statistics import Interval, estimate, paired_ratio

PAGE = ROOT / "docs" / "results.md"
FIGURES = ROOT / "docs" / "figures"
BEGIN, END = "<!-- written by python -m experiments.evidence.page -->", "<!-- to here -->"
FIRST = ("local_fit", "halo", "dcr_dfg", "distillation", "student_only", "dcr", "theseus", "fit_adaptive")  # of every table
NOTES = {
    "stories": " The score is exp(-KL), the divergence from the original in nats a token: 95 % is a KL of 0.051.",
    "minilm": " Work is judged on 256 sentences, the score at the end on all 872.",
}
TITLES = {"cifar100": "CIFAR-100", "minilm": "MiniLM", "fashion": "Fashion-MNIST", "stories": "stories15M"}
ON_THE_CLOCK = "One thread of a machine with two cores, nothing else running; without evaluations."
ONE_RATE = "Every phase of every arm has the rate that suits swap and train best; all other settings are as above, untuned."
WORK, END_OF_RUN = "work until 95 % is held", "score at the end"


def shown(evidence: Evidence) -> list[Place]:
    """Return the places of the page: those tuned for each arm, with all their seeds."""
    return [place for place in evidence.places if place.setting not in (RECIPES, ALONE, PROTOCOL) and place.has(OURS)]


def others(evidence: Evidence, setting: str) -> list[Place]:
    """Return the places of the paper's protocol, or those of runs that had the machine for themselves."""
    return [place for place in evidence.places if place.setting == setting and place.has(OURS)]


def spent(runs: Runs, fraction: float = 0.95, axis: str = "flops") -> tuple[Interval | None, int]:
    """Return the geometric mean of the operations until a fraction is held, and how many runs never hold it."""
    found = [work(run, fraction, axis) for run in runs.values()]
    missing = sum(not one.reached for one in found)
    return (None if missing else paired_ratio([(one.spent, 1.0) for one in found])), missing


def in_order(place: Place) -> list[str]:
    """Name the arms of a place, those of every setting first."""
    return [name for name in FIRST if name in place.arms] + [name for name in place.arms if name not in FIRST]


def label(place: Place, arm: str) -> str:
    """Return what people call an arm."""
    return next(iter(place.arms[arm].values())).run_info.label


def table(place: Place) -> list[str]:
    """Write what every arm needs and reaches, and how much less our recipe needs."""
    rows = []
    for name in in_order(place):
        runs = place.arms[name]
        text = f"**{label(place, name)}**" if name == OURS else label(place, name)
        rows.append([text, *(_work(runs, fraction) for fraction in (0.95, 0.99)), _final(runs), _against(place, name)])
    return as_table(["arm", WORK, "until 99 %", END_OF_RUN, "our work over this arm's"], rows)


def _work(runs: Runs, fraction: float) -> str:
    found, missing = spent(runs, fraction)
    if found is None:
        return "never" if missing == len(runs) else f"never in {missing} of {len(runs)}"
    scale, unit = work_unit(found["mean"])
    return _short({name: value if value is None else value / scale for name, value in found.items()}, f" {unit}")


def _short(found: Interval, unit: str = "") -> str:
    """Format an interval, or its mean alone where all seeds have the same."""
    spread = found["low"] is not None and found["high"] > 1.001 * found["low"]
    return interval(found if spread else {**found, "low": None}, unit=unit)


def _final(runs: Runs) -> str:
    found = estimate([FINAL.read(run) for run in runs.values()])
    if found is None:
        return NOTHING
    half = "" if found.half is None else f" ± {100 * found.half:.1f}"
    divergence = estimate([run.train_info.final.get("kl") for run in runs.values()])
    return f"{100 * found.mean:.1f}{half} %" + ("" if divergence is None else f", KL {divergence.mean:.4f}")


def times(place: Place) -> list[str]:
    """Write how long every arm takes to hold 95 %, and a complete run, by runs that had the machine for themselves."""
    rows = []
    for name in in_order(place):
        runs = place.arms[name]
        until, missing = spent(runs, axis="seconds")
        whole = estimate([run.train_info.points[-1].seconds for run in runs.values()])
        assert whole is not None
        reached = _short(until, " s") if until else "never" if missing == len(runs) else f"never in {missing} of {len(runs)}"
        rows.append([label(place, name), reached, duration(whole.mean), _against(place, name, "seconds")])
    return as_table(["arm", "time until 95 % is held", "the run", "our time over this arm's"], rows)


def _against(place: Place, arm: str, axis: str = "flops") -> str:
    """Return the ratio of the work of our recipe to that of an arm; one that never gets there has spent all of its run."""
    ours, theirs = place.arms[OURS], place.arms[arm]
    if arm == OURS or spent(ours)[1]:
        return NOTHING
    seeds = sorted(ours.keys() & theirs.keys())
    pairs = [(work(ours[seed], 0.95, axis).spent, work(theirs[seed], 0.95, axis).spent) for seed in seeds]
    found = paired_ratio(pairs)
    bound = "at most " if spent(theirs)[1] else ""
    return NOTHING if found is None else bound + _short(found)


def summary(places: list[Place]) -> list[str]:
    """Write one row for each place: what our recipe needs, what the best method from outside needs, and what both reach."""
    rows = []
    for place in places:
        ours = place.arms[OURS]
        if (best := best_published(place, OURS)) is None:
            continue
        cells = [_work(ours, 0.95), label(place, best), _work(place.arms[best], 0.95), _against(place, best)]
        rows.append([place.name, percent(place.teacher), *cells, f"{_final(ours)}; {_final(place.arms[best])}"])
    heads = ["setting", "teacher", "local fit", "best other method", "its work", "ratio", "both at the end"]
    return as_table(heads, rows)


def percent(value: float) -> str:
    """Format a score."""
    return f"{100 * value:.1f} %"


def draw(places: list[Place], path: Path) -> Path:
    """Draw a setting: the students' score over operations, and the operations until 95 % of the teacher is held."""
    from matplotlib.figure import Figure

    with figures.settings():
        figure = Figure(figsize=(8.4, 2.9 * len(places)), layout="constrained")
        for place, (left, right) in zip(places, figure.subplots(len(places), 2, squeeze=False), strict=True):
            _curves(left, place)
            _needs(right, place)
        known = {line.get_label(): line for axes in figure.axes[::2] for line in axes.get_legend_handles_labels()[0]}
        figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=7)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140, metadata={"Software": None})
    return path


def _curves(axes: Any, place: Place) -> None:
    names = [name for name in FIRST if name in place.arms]
    styles = line_styles(names)
    for name in names:
        line: Line = gather(list(place.arms[name].values()), [])
        curve, style = line.overall["students"], styles[name]
        known = [
            (x, mean, half or 0.0)
            for x, mean, half in zip(line.flops, curve.mean, curve.half, strict=True)
            if mean is not None and x > 0
        ]
        x, mean, half = zip(*known, strict=True)
        look = {"linewidth": 2.2} if name == OURS else {"linestyle": (0, style.dash) if style.dash else "-", "linewidth": 1.0}
        axes.plot(x, mean, label=label(place, name), color=style.light, **look)
        low, high = ([m + side * h for m, h in zip(mean, half, strict=True)] for side in (-1, 1))
        axes.fill_between(x, low, high, alpha=0.13, color=style.light)
    axes.axhline(place.teacher_eval, color="#222222", linewidth=0.8)
    axes.axhline(0.95 * place.teacher_eval, color="#222222", linewidth=0.8, linestyle=(0, (4, 2)))
    _logarithmic(axes, "operations, teachers included (log)")
    axes.set_title(place.name, loc="left")
    axes.set_ylabel("score of the students alone")
    where: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axes.annotate("teacher, 95 % of it", (1.0, place.teacher_eval), (0, 3), ha="right", fontsize=6, **where)


def _needs(axes: Any, place: Place) -> None:
    names = [name for name in in_order(place) if name in FIRST]
    styles = line_styles(names)
    for row, name in enumerate(names):
        found, missing = spent(place.arms[name])
        colour = styles[name].light
        if found is not None:
            ends = [[found["mean"] - found["low"]], [found["high"] - found["mean"]]] if found["low"] is not None else None
            axes.errorbar([found["mean"]], [row], xerr=ends, fmt="o", color=colour, capsize=2)
        else:  # all that was spent
            most = max(run.train_info.points[-1].flops for run in place.arms[name].values())
            axes.plot([most], [row], ">", color=colour, markerfacecolor="none")
            axes.annotate(f"never in {missing} of {len(place.arms[name])}", (most, row), (-6, -2), ha="right", fontsize=6,
                          textcoords="offset points")  # fmt: skip
    axes.set_yticks(range(len(names)), [label(place, name) for name in names])
    axes.invert_yaxis()
    _logarithmic(axes, "operations until 95 % is held (log; 95 % interval)")
    low, high = axes.get_xlim()
    axes.set_xlim(left=min(low, high / 4))  # room for the words beside runs that never get there


def _logarithmic(axes: Any, text: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(xscale="log", xlabel=text)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: flops(value).replace("FLOPs", "")))
    axes.xaxis.set_minor_formatter(NullFormatter())


def markdown(evidence: Evidence) -> str:
    """Write what stands between the markers: the summary, a figure and the tables of each setting, the paper's protocol."""
    places = shown(evidence)
    cheapest = "Where no other method gets there, the one with the cheapest run stands for them: it bounds the ratio least."
    lines = ["## All settings", "", *summary(places), "", cheapest, ""]
    for setting, found in by_setting(places).items():
        lines += [
            f"## {TITLES.get(setting, setting.capitalize())}",
            "",
            f"![Score and work of the arms: {setting}](figures/{figure_of(setting).name})",
            "",
        ]
        for place in found:
            lines += [_caption(place), "", *table(place), ""]
    for heading, note, setting, write in (
        ("The paper's protocol: one rate for all", ONE_RATE, PROTOCOL, table),
        ("Wall clock", ON_THE_CLOCK, ALONE, times),
    ):
        if found := others(evidence, setting):
            lines += [f"## {heading}", "", note, ""]
        for place in found:
            lines += [_caption(place), "", *write(place), ""]
    return "\n".join(lines)


def _caption(place: Place) -> str:
    seeds, note = len(place.arms[OURS]), NOTES.get(place.setting, "")
    return f"**{place.name}**: teacher {percent(place.teacher)}, {seeds} seeds.{note}"


def by_setting(places: list[Place]) -> dict[str, list[Place]]:
    """Group places by their setting."""
    return {setting: list(found) for setting, found in groupby(places, key=lambda place: place.setting)}


def figure_of(setting: str) -> Path:
    """Return the file of a setting's figure."""
    return FIGURES / f"evidence-{setting}.png"


def parts(page: str) -> tuple[str, str, str]:
    """Return a page up to its first marker, what the markers enclose, and the rest."""
    head, rest = page.split(BEGIN)
    inside, tail = rest.split(END)
    return head + BEGIN, inside, END + tail


def main() -> None:
    evidence = Evidence.read()
    places = shown(evidence)
    for setting, found in by_setting(places).items():
        print(draw(found, figure_of(setting)).relative_to(ROOT))
    head, _, tail = parts(PAGE.read_text(encoding="utf-8"))
    print(records.write_file(f"{head}\n\n{markdown(evidence)}\n{tail}", PAGE).relative_to(ROOT))


if __name__ == "__main__":
    main()
